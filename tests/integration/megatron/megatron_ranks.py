"""The trainer ranks of the Megatron tests: real Megatron-core models on gloo, in processes forked from one that has imported it.

Reads one case a line, as JSON. Rank 0 of the case then writes lines, and waits for one after each publication.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from safetensors.torch import save_file
from tests.integration.megatron.megatron_cases import PADDED, VOCABULARY, Case, hf_config
from tests.integration.megatron.megatron_fsdp import change, sharded
from tests.integration.megatron.megatron_models import build, fill, initialize, wrapped
from tests.integration.megatron.optional_packages import stand_in

import weightsync
from weightsync.integrations.megatron import hf_state
from weightsync.integrations.megatron.bridged_state import Alone

COLLECTIVES = [
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "gather", "irecv", "isend", "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
]  # fmt: skip


@contextmanager
def no_collectives() -> Iterator[None]:
    """Fail on every call of torch.distributed that talks to other ranks."""

    def refuse(function: Any, *given: Any, **named: Any) -> Any:
        assert isinstance(named.get("group"), Alone), "a collective was called"
        return function(*given, **named)

    saved = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, function in saved.items():
        setattr(dist, name, partial(refuse, function))
        setattr(dist.distributed_c10d, name, partial(refuse, function))
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(dist, name, function)
            setattr(dist.distributed_c10d, name, function)


def say(output: TextIO, **what: Any) -> None:
    output.write(json.dumps(what) + "\n")
    output.flush()


def store(chunks: list[torch.nn.Module], folder: Path, version: int) -> None:
    """The raw Megatron parameters of this rank, for the reference conversion."""
    tensors = {f"{index}/{name}": value.detach().clone() for index, chunk in enumerate(chunks) for name, value in _state(chunk)}
    save_file(tensors, folder / f"{version}-{dist.get_rank()}.safetensors")


def _place(chunks: list[torch.nn.Module]) -> list[Any]:
    """This rank in each group, and the dimension along which each parameter is cut, -1 for none."""
    cut = {
        f"{index}/{name}": int(getattr(value, "partition_dim", -1)) if getattr(value, "tensor_model_parallel", False) else -1
        for index, chunk in enumerate(chunks)
        for name, value in _state(chunk)
    }
    return [
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
        cut,
    ]


def _state(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from chunk.named_parameters()
    yield from ((name, value) for name, value in chunk.named_buffers() if name.endswith("expert_bias"))


def forward(chunk: torch.nn.Module, folder: Path, version: int) -> None:
    """What Megatron computes with these weights."""
    ids = torch.arange(24).view(2, 12) * 7 % VOCABULARY
    positions = torch.arange(12).expand(2, 12).contiguous()
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = chunk(ids, positions, mask)
    if dist.get_rank() == 0:
        save_file({"ids": ids, "logits": logits[..., :VOCABULARY].contiguous()}, folder / f"{version}-logits.safetensors")


def bridge_of(case: Case) -> Any:
    """What the framework converts with."""
    config = hf_config(case.family, case.changes)
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    if case.bridge == "megatron_bridge":
        from megatron.bridge import AutoBridge

        return AutoBridge.from_hf_config(config)
    if case.bridge == "mbridge":
        from mbridge import AutoBridge as Bridges  # type: ignore[import-not-found, import-untyped, unused-ignore]

        bridge = Bridges.from_config(config, make_vocab_size_divisible_by=1)
        bridge.vocab_size, bridge.padded_vocab_size = VOCABULARY, PADDED
        return bridge
    return partial(converted, config) if case.bridge == "function" else None


def converted(config: Any, name: str, whole: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Convert a whole parameter of Llama, in the form that the converters of several frameworks have."""
    outside = {
        "embedding.word_embeddings.weight": "model.embed_tokens", "output_layer.weight": "lm_head",
        "decoder.final_layernorm.weight": "model.norm",
    }  # fmt: skip
    if name in outside:
        return [(f"{outside[name]}.weight", whole[: config.vocab_size])]
    _, _, number, rest = name.split(".", 3)
    layer = f"model.layers.{number}"
    if rest == "self_attention.linear_qkv.weight":
        groups, head = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        each = config.num_attention_heads // groups
        parts = torch.split(whole.view(groups, -1, head, config.hidden_size), [each, 1, 1], 1)
        return [
            (f"{layer}.self_attn.{kind}_proj.weight", part.reshape(-1, config.hidden_size))
            for kind, part in zip("qkv", parts, strict=True)
        ]
    if rest == "mlp.linear_fc1.weight":
        gate, up = whole.chunk(2)
        return [(f"{layer}.mlp.gate_proj.weight", gate), (f"{layer}.mlp.up_proj.weight", up)]
    renamed = {
        "self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj", "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
    }  # fmt: skip
    return [(f"{layer}.{renamed[rest.removesuffix('.weight')]}.weight", whole)]


def export(model: list[torch.nn.Module], bridge: Any, folder: Path, version: int) -> None:
    """What Megatron-Bridge gathers on rank 0."""
    from megatron.bridge.models.conversion.utils import persistent_buffers

    registry, tensors = bridge._model_bridge.mapping_registry(), dict[str, torch.Tensor]()
    for chunk in model:
        inner: Any = chunk.module if hasattr(chunk, "module") else chunk
        for name, value in [*inner.named_parameters(), *persistent_buffers(inner)]:
            known_as = re.sub(r"local_experts\.([0-9]+)\.(linear_fc.\.weight)", r"\2\1", name)
            module = inner.get_submodule(name.rpartition(".")[0])
            module.config = inner.config
            tensors |= registry.megatron_to_hf_lookup(known_as).megatron_to_hf(value.detach(), module)
    if dist.get_rank() == 0:
        padded = {"model.embed_tokens.weight", "lm_head.weight"}
        tensors = {name: value[:VOCABULARY] if name in padded else value for name, value in tensors.items()}
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / f"{version}-exported.safetensors")


def refused(model: list[torch.nn.Module], case: Case, changes: dict[str, Any]) -> str:
    """What hf_state raises for a configuration that the model does not have."""
    try:
        hf_state(model, config=hf_config(case.family, {**case.changes, **changes}))
    except weightsync.WeightSyncError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run(rank: int, case: Case, folder: Path, orders: int, results: int) -> None:
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    multi_latent_attention.TELinear = torch.nn.Bilinear  # a type that no module has: None, without TransformerEngine, fails
    CudaRNGStatesTracker.fork = lambda self, *_, **__: nullcontext()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=case.world, timeout=timedelta(seconds=90)
    )
    if case.fsdp:
        shards = sharded(case)
        publish(rank, case, shards, orders, results, lambda version: change(shards, version))
        return
    initialize(case)
    torch.manual_seed(1)
    chunks = build(case)
    if case.lora:
        from megatron.bridge.peft import lora, utils

        utils.HAVE_TE = False  # whose classes are stand-ins
        lora.LoRA(dim=case.lora, alpha=2 * case.lora)(chunks)
    model = wrapped(chunks)
    (folder / f"place-{rank}.json").write_text(json.dumps(_place(chunks)))
    if case.contradictions:
        errors = [refused(model, case, changes) for changes in case.contradictions]
        if rank == 0:
            say(os.fdopen(os.dup(results), "w"), errors=errors)
        dist.barrier()
        dist.destroy_process_group()
        return
    bridge, config, adapter = bridge_of(case), hf_config(case.family, case.changes), None
    with no_collectives():
        state = hf_state(model, config=config, bridge=bridge, lora="base" if case.lora else None)
        if case.lora:
            adapter = hf_state(model, config=config, lora="adapter")

    def place(version: int) -> None:
        fill(chunks, version)
        store(chunks, folder, version)
        if case.forward:
            forward(chunks[0], folder, version)
        if case.exported:
            export(model, bridge, folder, version)

    publish(rank, case, state, orders, results, place, adapter)


def publish(
    rank: int, case: Case, state: Any, orders: int, results: int, place: Callable[[int], None], adapter: Any = None
) -> None:
    """Publish all versions. ``place`` gives the weights of a version."""
    output, control = os.fdopen(os.dup(results), "w"), os.fdopen(os.dup(orders))
    with ExitStack() as owned:
        trainer = owned.enter_context(weightsync.Trainer(state, dtype=torch.bfloat16 if case.fsdp else None))  # of float32 weights
        if adapter is not None:
            adapters = owned.enter_context(weightsync.Adapters(adapter, base=trainer, alpha=2 * case.lora))
        if rank == 0:
            say(output, environment=trainer.environment)
        for version in range(1, case.versions + 1):
            place(version)
            dist.barrier()
            trainer.wait_for_replicas(1, timeout=60)
            result = trainer.publish(version, timeout=60)
            if adapter is not None:
                result = adapters.publish("megatron/lora", version, timeout=60)
            if rank == 0:
                say(output, published=version, replicas=[[one.state, one.verified, one.delivery] for one in result.replicas])
                control.readline()
            dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    context = multiprocessing.get_context("fork")
    orders, results = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what Megatron prints is not for the pipe
    control, output = os.fdopen(orders), os.fdopen(results, "w")
    stand_in()
    for converters in ("megatron.bridge.models.conversion.auto_bridge", "mbridge"):
        if find_spec(converters.rpartition(".models")[0] or converters):  # vLLM's environment has neither
            import_module(converters)  # before ranks are forked: it takes seconds
    for late in ("publishing.published_shards", "trainer.format_choice", "trainer.storing", "protocol.connection", "server.server"):
        import_module(f"weightsync.{late}")  # what a trainer imports at its first publication; with numba, a second in each rank
    say(output, ready=True)
    for line in iter(control.readline, ""):
        given, folder = json.loads(line)
        case = Case(**given)
        ranks = [
            context.Process(target=run, args=(rank, case, Path(folder), orders, results), daemon=True) for rank in range(case.world)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(120)
        for one in ranks:
            if one.exitcode is None:
                one.kill()
        say(output, ended=[one.exitcode for one in ranks])


if __name__ == "__main__":
    main()
