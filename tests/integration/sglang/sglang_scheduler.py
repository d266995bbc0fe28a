"""SGLang's own scheduler, model runner and Llama on this machine's CPU, in this process, for its tests.

Four modules that need CUDA's libraries, or a build of torch that is not here, are stubs of SGLang's own kind, which it installs on
macOS: ``sgl_kernel``, ``flashinfer``, ``deep_gemm`` and ``torchvision``. None of them is called: a CPU without AMX runs SGLang's
native PyTorch code. SGLang itself is not changed but by the hooks of the plugin, and by one method that its attention in plain
PyTorch lacks (:func:`add_what_sglang_lacks_on_a_cpu`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from weightsync.closing import Closeable
from weightsync.engines.sglang.loop import SchedulerLoop

WITHOUT_SGLANG = importlib.util.find_spec("sglang") is None
STUBBED = ("deep_gemm", "flashinfer", "sgl_kernel", "torchvision")
_SECONDS = 30.0
_SCENARIO_SECONDS = 240.0


class _StubFinder:
    def __init__(self, stubs: ModuleType) -> None:
        self._stubs = stubs

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in STUBBED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = self._stubs._MockModule(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install_stubs() -> None:
    """Make the modules of :data:`STUBBED` importable. Before the first import of SGLang. Idempotent."""
    if any(isinstance(finder, _StubFinder) for finder in sys.meta_path):
        return
    from transformers import AutoConfig, AutoProcessor  # noqa: F401 - they must not find the stub of torchvision

    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations is not None
    path = Path(found.submodule_search_locations[0], "_platform_stubs.py")
    spec = importlib.util.spec_from_file_location("sglang_platform_stubs", path)
    assert spec is not None and spec.loader is not None
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    sys.meta_path.append(_StubFinder(stubs))


def make_checkpoint(directory: str, seed: int = 0, *, vocab_size: int = 128, intermediate_size: int = 96, heads: int = 2) -> None:
    """Save a tiny random Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=intermediate_size, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)


def make_experts_checkpoint(directory: str, *, vocab_size: int) -> None:
    """Save a tiny random mixture-of-experts model, of a family that can serve with data-parallel attention."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1024,
        tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(directory)


def add_what_sglang_lacks_on_a_cpu() -> None:
    """Give SGLang's attention in plain PyTorch a method that data-parallel attention calls, and that other attentions have."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1


def pin_no_memory() -> None:
    """Let what SGLang's LoRA layers pin be ordinary memory, as torch has no other one without a GPU."""

    def unpinned(make: Any, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, partial(unpinned, getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[assignment, method-assign, return-value]


def random_weights(state: dict[str, torch.Tensor], seed: int) -> None:
    """Fill the state of a model so that its greedy tokens differ from seed to seed."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * (0.2 if tensor.dim() > 1 else 1.0))


def arguments_of_sglang(directory: str, **arguments: Any) -> Any:
    """Hook SGLang as its processes do, and return its ``ServerArgs``."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import ServerArgs

    from weightsync.engines.sglang import plugin

    plugin.register()
    HookRegistry.apply_hooks()
    settings = {
        "model_path": directory, "device": "cpu", "skip_tokenizer_init": True, "dtype": "float32", "page_size": 1,
        "attention_backend": "torch_native", "sampling_backend": "pytorch", "disable_cuda_graph": True,
        "max_total_tokens": 2048, "context_length": 1024,
        "max_running_requests": 4, "log_level": "warning",
    }  # fmt: skip
    server_arguments = ServerArgs(**settings | arguments)
    server_arguments.resolve_once()
    server_arguments.check_server_args()
    return server_arguments


class RunningScheduler(Closeable):
    """A real ``Scheduler`` whose event loop runs on a thread, and its clients' ends of SGLang's sockets."""

    def __init__(
        self, directory: str, *, rank: int = 0, sockets: Mapping[str, Any] | None = None, clients: bool = True, **arguments: Any
    ) -> None:
        import zmq
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs

        server_arguments = arguments_of_sglang(directory, **arguments)
        ports = PortArgs.init_new(server_arguments) if sockets is None else PortArgs(**sockets)
        publish(server_arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank))
        self._context = zmq.Context()
        self._outputs, self._inputs = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        if rank == 0 and clients:
            self._outputs.bind(ports.tokenizer_ipc_name)
            self._inputs.bind(ports.scheduler_input_ipc_name)
        self.labels: list[str] = []
        self._leads, self._made = rank == 0 and clients, 0
        self._tokens: dict[str, list[int]] = {}
        self._ended: dict[str, Any] = {}
        self.scheduler = Scheduler(server_arguments, ports)
        self._thread = threading.Thread(target=self.scheduler.run_event_loop, name="sglang-scheduler")
        self._thread.start()

    @property
    def paused(self) -> bool:
        return bool(self.scheduler._engine_paused)

    @property
    def loop(self) -> SchedulerLoop:
        from weightsync.engines.sglang import plugin

        return plugin._loops[id(self.scheduler)]

    def send(self, request: object) -> None:
        from sglang.srt.managers.io_struct import sock_send

        sock_send(self._inputs, request)

    def ask(self, tokens: int, prompt: Sequence[int] = (3, 1, 2)) -> str:
        """Send a request for greedy tokens, and return its name."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._made += 1
        sampling = SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True)
        sampling.normalize(None)
        name = f"request-{self._made}"
        self.send(
            TokenizedGenerateReqInput(
                rid=name, input_text="", input_ids=array("q", prompt), input_embeds=None, mm_inputs=None, token_type_ids=None,
                sampling_params=sampling, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None,
                stream=False,
            )
        )  # fmt: skip
        return name

    def output(self, name: str, seconds: float = _SECONDS) -> Any:
        """Return all tokens of a request and their versions, or its abort, or ``None``."""
        end = time.monotonic() + seconds
        while name not in self._ended and (left := end - time.monotonic()) > 0:
            if self._outputs.poll(max(int(left * 1000), 1)):
                self._take()
        return self._ended.pop(name, None)

    def _take(self) -> None:
        from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput, UpdateWeightVersionReqInput, sock_recv

        output = sock_recv(self._outputs)
        if isinstance(output, UpdateWeightVersionReqInput):
            self.labels.append(output.new_version)
        elif isinstance(output, AbortReq):
            self._ended[output.rid] = output
        elif isinstance(output, BatchTokenIDOutput):
            for place, name in enumerate(output.rids):
                tokens = self._tokens.setdefault(name, [])
                tokens += output.output_ids[place]
                if output.finished_reasons[place] is not None:
                    self._ended[name] = tokens, output.weight_versions[place]

    def wait_until_running(self, count: int = 1) -> None:
        end = time.monotonic() + _SECONDS
        while len(self.scheduler.running_batch.reqs) < count:
            assert time.monotonic() < end
            time.sleep(0.005)

    def go_on(self) -> None:
        """Continue generation as another client does."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self.send(ContinueGenerationReqInput(torch_empty_cache=False))

    def padding(self) -> tuple[int, int]:
        """Return how many rows of this rank's vocabulary are padding, and how many of their elements are not zero."""
        from weightsync.engines.sglang.joining import padding_of_vocabulary

        model = self.scheduler.tp_worker.model_runner.model
        rows = [model.get_parameter(name)[part] for name, parts in padding_of_vocabulary(model).items() for part in parts]
        return sum(len(part) for part in rows), sum(int(part.count_nonzero()) for part in rows)

    def release_memory(self, *tags: str) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        end = time.monotonic() + _SECONDS
        while not self.scheduler.is_fully_idle():  # not yet where the last answer has just been sent: SGLang would end itself
            assert time.monotonic() < end
            time.sleep(0.005)
        self.send(ReleaseMemoryOccupationReqInput(tags=list(tags)))
        while self.scheduler.weight_updater.offload_tags != set(tags):
            assert time.monotonic() < end
            time.sleep(0.005)

    def wait_until_ended(self) -> None:
        """Return when the event loop has ended. Rank 0 may be gone before another rank's loop has read that it should end."""
        self._thread.join(_SCENARIO_SECONDS)

    def close(self) -> None:
        from sglang.srt.managers.io_struct import ShutdownReq

        if self._leads:
            self.send(ShutdownReq())
        self._thread.join(_SECONDS)
        self._context.destroy(linger=0)


def use_environment(**more: str) -> None:
    """Set what SGLang reads when it is imported."""
    os.environ.update({"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "WEIGHTSYNC_REPLICA": "sglang"} | more)
