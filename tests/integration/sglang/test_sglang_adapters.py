"""LoRA adapters in SGLang's own scheduler, models and tokenizer manager on a CPU: answers equal Transformers' with merged weights.

Needs the environment of ``make sglang-test``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.integration.sglang.sglang_scheduler import (
    WITHOUT_SGLANG,
    install_stubs,
    make_checkpoint,
    random_weights,
    use_environment,
)

from weightsync.closing import Closeable
from weightsync.config import ServerSettings
from weightsync.errors import ConfigurationError, RoundFailed, WeightSyncError
from weightsync.server.server import BackgroundServer
from weightsync.trainer.adapters import Adapters
from weightsync.trainer.trainer import Trainer

pytestmark = [
    pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(WITHOUT_SGLANG, reason="SGLang is not installed here: make sglang-test"),
]  # fmt: skip

ROOT = Path(__file__).resolve().parents[3]
PROMPT = [3, 1, 2]
SECONDS = 150.0
EVERY = tuple(f"self_attn.{part}_proj" for part in "qkvo") + tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down"))
SIZES = {
    "q_proj": (128, 64), "o_proj": (64, 128), "gate_proj": (128, 64), "up_proj": (128, 64), "down_proj": (64, 128),
}  # fmt: skip
DELIVERIES = {1: ("direct", "installed"), 2: ("streamed", "received")}
"""By the number of ranks."""
Matrices = dict[str, torch.Tensor]


class Process(Closeable):
    """A process of ``sglang_served.py``."""

    def __init__(self, role: str, directory: str, sockets: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.sglang.sglang_served", role, directory, sockets],
            cwd=ROOT, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answers: dict[int, Future[Any]] = {}
        self._ready = threading.Event()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                if line == "ready\n":
                    self._ready.set()
                elif line.startswith("["):
                    number, result = json.loads(line)
                    self._answers[number].set_result(result)

    def wait_until_ready(self) -> None:
        assert self._ready.wait(2 * SECONDS)  # of which SGLang's imports take most where processors are shared

    def begin(self, method: str, *arguments: Any) -> Future[Any]:
        assert self._process.stdin is not None
        number, future = len(self._answers), Future[Any]()
        self._answers[number] = future
        self._process.stdin.write(json.dumps([number, method, arguments]) + "\n")
        self._process.stdin.flush()
        return future

    def ask(self, method: str, *arguments: Any) -> Any:
        return self.begin(method, *arguments).result(SECONDS)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20.0)
        self._reading.join(20.0)


class Served:
    """A running SGLang with LoRA, the coordinator that it joined, and a Transformers model to compare with."""

    def __init__(self, directory: str, server: BackgroundServer, ranks: int, owned: ExitStack) -> None:
        from sglang.srt.server_args import PortArgs, ServerArgs
        from transformers import LlamaForCausalLM

        self.server = server
        arguments = ServerArgs(model_path=directory, device="cpu", tp_size=ranks)
        arguments.resolve_once()
        sockets = json.dumps(dataclasses.asdict(PortArgs.init_new(arguments)))
        environment = os.environ | {
            "WEIGHTSYNC_COORDINATOR": server.url, "WEIGHTSYNC_TOKEN": server.token, "WEIGHTSYNC_DELIVERY": DELIVERIES[ranks][0],
            "RANKS": str(ranks),
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(min(rank, (os.cpu_count() or 1) - 1)) for rank in range(ranks)),
        }  # fmt: skip
        roles = [*map(str, range(ranks)), "tokenizer"]
        processes = [owned.enter_context(Process(role, directory, sockets, environment)) for role in roles]
        self.ranks, self.tokenizer = processes[:-1], processes[-1]
        for process in processes:
            process.wait_until_ready()
        self.reference: Any = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.reference.generation_config.eos_token_id = None
        self.state = {name: tensor.clone() for name, tensor in self.reference.state_dict().items()}

    def answer(self, adapter: Any = None, tokens: int = 8) -> Any:
        return self.tokenizer.ask("generate", adapter, tokens, PROMPT)

    def expected(self, matrices: Matrices | None = None, scaling: float | Mapping[str, float] = 1.0, tokens: int = 8) -> list[int]:
        weights = {name: tensor.clone() for name, tensor in self.state.items()}
        for name in matrices or {}:
            module, kind, _ = name.rsplit(".", 2)
            if matrices is not None and kind == "lora_A":
                factor = scaling if isinstance(scaling, float) else scaling[module]
                weights[f"{module}.weight"] += factor * matrices[f"{module}.lora_B.weight"] @ matrices[name]
        self.reference.load_state_dict(weights)
        made = self.reference.generate(torch.tensor([PROMPT]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return list(made[0, len(PROMPT) :].tolist())

    def held(self) -> Any:
        """Return what each rank holds, once all ranks hold the same."""
        end = time.monotonic() + SECONDS
        while True:
            held = [rank.ask("held") for rank in self.ranks]
            if all(other == held[0] for other in held):
                return held[0]
            assert time.monotonic() < end

    def wait_until_held(self, names: list[str]) -> None:
        end = time.monotonic() + SECONDS
        while (held := self.held()[0]) != names:
            assert time.monotonic() < end, held
            time.sleep(0.02)


def lora(seed: int, rank: int = 4, modules: tuple[str, ...] = EVERY, layers: int = 2) -> Matrices:
    """Matrices that change the model's greedy tokens."""
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for layer in range(layers):
        for module in modules:
            output, inputs = SIZES.get(module.rpartition(".")[2], (64, 64))
            name = f"model.layers.{layer}.{module}"
            matrices[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.3
            matrices[f"{name}.lora_B.weight"] = torch.randn(output, rank, generator=generator) * 0.3
    return matrices


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    install_stubs()
    use_environment()
    directory = str(tmp_path_factory.mktemp("checkpoint"))
    make_checkpoint(directory, intermediate_size=128, heads=4)
    with BackgroundServer(ServerSettings.load({"WEIGHTSYNC_REQUIRE": "0"}, port=0)) as server, ExitStack() as owned:
        yield Served(directory, server, request.param, owned)


@pytest.fixture
def trainer(served: Served) -> Iterator[Trainer]:
    random_weights(served.state, 1)
    with Trainer(served.state, served.server.url, token=served.server.token, rank=0, world_size=1) as trainer:
        trainer.wait_for_replicas(timeout=SECONDS)
        result = trainer.publish(timeout=60.0)
        assert [(replica.delivery, replica.verified) for replica in result.replicas] == [DELIVERIES[len(served.ranks)]]
        yield trainer


def test_versions_are_served_by_name_and_by_number_and_a_request_keeps_its_own(served: Served, trainer: Trainer) -> None:
    first, second = lora(1), lora(2)
    state = {name: tensor.clone() for name, tensor in first.items()}
    base = served.answer()
    assert base == served.expected()
    with Adapters(state, base=trainer, alpha=8) as adapters:
        replica = adapters.publish("alice/math", timeout=60.0).replicas[0]
        assert (replica.error, replica.verified, replica.paused_seconds) == (None, "received", 0.0)
        expected = [served.expected(first, 2.0), served.expected(second, 2.0)]
        assert len({tuple(tokens) for tokens in (base, *expected)}) == 3
        assert served.answer("alice/math") == served.answer("alice/math@0") == expected[0]
        assert "does not serve alice/math@1; it serves alice/math@0" in served.answer("alice/math@1")
        alone = served.answer("alice/math", 600)
        running = served.tokenizer.begin("generate", "alice/math", 600, PROMPT)
        while not served.tokenizer.ask("running"):
            time.sleep(0.005)
        for name, tensor in second.items():
            state[name].copy_(tensor)
        adapters.publish("alice/math", timeout=60.0)
        assert not running.done(), "it was to run while the version came"
        assert served.answer(["alice/math", None, "alice/math@0"]) == [expected[1], base, expected[0]]
        adapters.retire("alice/math", keep=1)
        assert not running.done()
        assert "does not serve alice/math@0; it serves alice/math@1" in served.answer("alice/math@0")
        assert served.tokenizer.ask("names") == ["alice/math@1"]
        assert served.held()[0] == ["alice/math@0", "alice/math@1"], "a request still uses it"
        assert running.result(SECONDS) == alone
        assert alone[:8] == expected[0]
        served.wait_until_held(["alice/math@1"])
        assert served.answer("alice/math") == expected[1]
        assert served.answer() == base
        adapters.retire("alice/math", keep=0)
        served.wait_until_held([])
        assert "does not serve alice/math; it serves no version of alice/math" in served.answer("alice/math")


def test_parts_of_stacked_layers_with_ranks_and_scalings_of_their_own(served: Served, trainer: Trainer, tmp_path: Path) -> None:
    matrices = lora(3, 2, ("self_attn.k_proj", "mlp.up_proj")) | lora(4, 8, ("self_attn.o_proj",), layers=1)
    scalings = {name.rsplit(".", 2)[0]: 6 / math.sqrt(tensor.shape[0]) for name, tensor in matrices.items() if "lora_A" in name}
    with Adapters(matrices, base=trainer, alpha=6, rslora=True) as adapters:
        adapters.publish("bob/code", timeout=60.0)
        tokens = served.answer("bob/code")
        assert tokens == served.expected(matrices, scalings) != served.expected()
        adapters.retire("bob/code", keep=0)


def test_answers_equal_those_of_sglangs_own_loading_and_its_routes_stay_usable(
    served: Served, trainer: Trainer, tmp_path: Path
) -> None:
    matrices = lora(5)
    targets = sorted({name.split(".")[-3] for name in matrices})
    config = {"peft_type": "LORA", "target_modules": targets, "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({f"base_model.model.{name}": tensor for name, tensor in matrices.items()}, tmp_path / "adapter_model.safetensors")
    assert not served.tokenizer.ask("load", "carol/own", str(tmp_path))
    with Adapters(matrices, base=trainer, alpha=8) as adapters:
        shadowing = adapters.publish("carol/own", 1, timeout=60.0).replicas[0]
        assert "SGLang has loaded another adapter as carol/own" in str(shadowing.error)
        adapters.retire("carol/own", keep=0)
        adapters.publish("alice/same", 1, timeout=60.0)
        assert served.answer("alice/same") == served.answer("carol/own") == served.expected(matrices, 2.0)
        assert not served.tokenizer.ask("load", "alice/same@2", str(tmp_path))
        taken = adapters.publish("alice/same", 2, timeout=60.0).replicas[0]
        assert "SGLang did not take alice/same@2: LoRA with name alice/same@2 already exists" in str(taken.error)
        assert served.answer("alice/same@2") == served.answer("alice/same") == served.expected(matrices, 2.0)
        adapters.retire("alice/same", keep=0)  # and no later attempt brings the one that was refused
        served.wait_until_held(["alice/same@2", "carol/own"])
        for name in ("alice/same@2", "carol/own"):
            assert not served.tokenizer.ask("unload", name)
        adapters.publish("alice/same", 3, timeout=60.0)
        assert served.answer("alice/same") == served.expected(matrices, 2.0)
        assert not served.tokenizer.ask("unload", "alice/same@3"), "an operator may"
        assert isinstance(served.answer("alice/same"), str)
        assert not served.tokenizer.ask("load", "alice/same@3", str(tmp_path))
        assert "another client of SGLang has unloaded alice/same@3" in served.answer("alice/same@3"), "other weights answered"
        assert not served.tokenizer.ask("unload", "alice/same@3")
        adapters.retire("alice/same", keep=0)
        adapters.publish("alice/same", 4, timeout=60.0)
        assert served.answer("alice/same") == served.expected(matrices, 2.0)
        adapters.retire("alice/same", keep=0)
        served.wait_until_held([])


def test_what_does_not_fit_is_refused_before_anything_is_read(served: Served, trainer: Trainer) -> None:
    def refusal(matrices: Matrices, name: str = "bob/bad", **options: Any) -> str:
        with Adapters(matrices, alpha=8, **({"base": trainer} | options)) as adapters:
            with pytest.raises(WeightSyncError) as raised:
                adapters.publish(name, timeout=60.0)
            return str(raised.value)

    head = {"lm_head.lora_A.weight": torch.ones(4, 64), "lm_head.lora_B.weight": torch.ones(128, 4)}
    wide = {name: torch.ones(4, 65) if "lora_A" in name else tensor for name, tensor in lora(1, 4, EVERY[:1]).items()}
    spoiled = lora(6)
    spoiled["model.layers.0.self_attn.q_proj.lora_B.weight"][3, 1] = float("nan")
    assert "has rank 16, and this engine allows 8" in refusal(lora(1, 16))
    assert "model.layers.2.mlp.down_proj, and this SGLang has no LoRA layer for it" in refusal(lora(1, layers=3))
    assert "lm_head, and this SGLang has no LoRA layer for it" in refusal(head)
    assert "in this engine it is 128 x 64" in refusal(wide)
    assert "NaN" in refusal(spoiled)
    assert "is for base weights that weightsync did not deliver, and the replica serves" in refusal(
        lora(1), base=None, coordinator=served.server.url, token=served.server.token
    )
    assert served.held()[0] == []


def test_slots_are_bounded_and_free_again_and_adapters_share_a_batch(served: Served, trainer: Trainer) -> None:
    """Three, and SGLang computes with two of them in a batch beside the base weights."""
    matrices = lora(7)
    with Adapters(matrices, base=trainer, alpha=8) as adapters:
        for number in (1, 2, 3):
            adapters.publish("alice/many", number, timeout=60.0)
        with pytest.raises(RoundFailed, match="all 3 slots for adapters are in use"):
            adapters.publish("alice/many", 4, timeout=60.0)
        expected = served.expected(matrices, 2.0)
        with ThreadPoolExecutor(4) as threads:
            names = ["alice/many@1", "alice/many@2", "alice/many@3", None]
            assert list(threads.map(served.answer, names)) == [expected, expected, expected, served.expected()]
        adapters.retire("alice/many", keep=1)
        served.wait_until_held(["alice/many@3"])
        adapters.publish("alice/many", 5, timeout=60.0)
        assert served.answer("alice/many@5") == expected
        adapters.retire("alice/many", keep=0)
        served.wait_until_held([])


def test_adapters_for_exactly_one_base_are_gone_with_it_and_others_stay(served: Served, trainer: Trainer) -> None:
    matrices = lora(8)
    with (
        Adapters(matrices, base=trainer, alpha=8) as kept,
        Adapters(matrices, base=trainer, alpha=8, on_base_update="refuse") as strict,
    ):
        kept.publish("alice/kept", timeout=60.0)
        strict.publish("bob/strict", timeout=60.0)
        assert served.answer("bob/strict") == served.answer("alice/kept")
        random_weights(served.state, 2)
        trainer.publish(timeout=60.0)
        assert "does not serve bob/strict; it serves no version of bob/strict" in served.answer("bob/strict")
        assert served.answer("alice/kept") == served.expected(matrices, 2.0)
        served.wait_until_held(["alice/kept@0"])
        kept.retire("alice/kept", keep=0)
        served.wait_until_held([])


def test_requests_by_name_never_fail_while_versions_come_and_go(served: Served, trainer: Trainer) -> None:
    versions = [lora(seed) for seed in range(20, 28)]
    expected = [served.expected(matrices, 2.0) for matrices in versions]
    assert len({tuple(tokens) for tokens in expected}) == len(versions)
    state = {name: tensor.clone() for name, tensor in versions[0].items()}
    answers: list[Any] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            answers.append(served.answer("alice/flow"))

    with Adapters(state, base=trainer, alpha=8) as adapters, ThreadPoolExecutor(3) as threads:
        adapters.publish("alice/flow", timeout=60.0)
        asking = [threads.submit(ask) for _ in range(3)]
        try:
            for matrices, tokens in zip(versions[1:], expected[1:], strict=True):
                for name, tensor in matrices.items():
                    state[name].copy_(tensor)
                assert adapters.publish("alice/flow", timeout=60.0).replicas[0].error is None
                adapters.retire("alice/flow", keep=1)
                assert served.answer("alice/flow") == tokens
        finally:
            ended.set()
        for each in asking:
            each.result(SECONDS)
        assert all(answer in expected for answer in answers)
        adapters.retire("alice/flow", keep=0)
        served.wait_until_held([])


def test_a_version_that_one_rank_does_not_hold_is_taken_by_none(served: Served, trainer: Trainer) -> None:
    with Adapters(lora(9), base=trainer, alpha=8) as adapters:
        served.ranks[-1].ask("lose_the_next")
        lost = adapters.publish("alice/lost", timeout=60.0).replicas[0]
        assert "a rank does not hold it any more" in str(lost.error)
        assert served.answer() == served.expected(), "SGLang goes on"
        served.wait_until_held(["alice/lost@0"])  # by the one more attempt that follows
        end = time.monotonic() + SECONDS
        while isinstance(served.answer("alice/lost"), str):
            assert time.monotonic() < end
        assert served.answer("alice/lost@0") == served.expected(lora(9), 2.0)
        adapters.retire("alice/lost", keep=0)
        served.wait_until_held([])


def test_a_tokenizer_that_does_not_answer_fails_the_version_and_frees_it_later(served: Served, trainer: Trainer) -> None:
    with Adapters(lora(10), base=trainer, alpha=8) as adapters:
        served.ranks[0].ask("wait_for_the_tokenizer", 1.0)
        blocked = served.tokenizer.begin("stand_still", 8.0)
        try:
            late = adapters.publish("alice/late", timeout=60.0).replicas[0]
        finally:
            served.ranks[0].ask("wait_for_the_tokenizer", 30.0)
        assert "SGLang's tokenizer did not answer for alice/late@0 within 1 s" in str(late.error)
        blocked.result(SECONDS)
        served.wait_until_held([])
        assert "does not serve alice/late; it serves no version of alice/late" in served.answer("alice/late")


def test_headers_that_ask_for_another_version_than_the_body_are_a_conflict(served: Served, trainer: Trainer) -> None:
    with Adapters(lora(6), base=trainer, alpha=8) as adapters:
        for number in (1, 2):
            adapters.publish("alice/named", number, timeout=60.0)
        models = ("alice/named", "alice/named@2", "alice/named@1", None)
        statuses = [served.tokenizer.ask("demand", model, "alice/named@2", PROMPT) for model in models]
        assert statuses == [200, 200, 409, 409]
        adapters.retire("alice/named", keep=0)


def test_an_adapter_that_weightsync_does_not_serve_is_still_an_error_of_sglang(served: Served) -> None:
    assert isinstance(served.answer("nobody/here"), str)


def test_peft_is_not_needed_and_an_alpha_is(served: Served, trainer: Trainer) -> None:
    with pytest.raises(ConfigurationError):
        Adapters(lora(1), base=trainer)
