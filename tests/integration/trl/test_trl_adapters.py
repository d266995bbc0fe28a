"""The adapter of a PEFT model is published alone where its server takes adapters: with real PEFT, and replicas in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integration.server.service_support import free_port
from tests.integration.trl.test_trl_transfer import RolloutServer, Training, generation_of
from tests.integration.trl.trl_ranks import adapted, merge_after_a_pass, update

from weightsync import Adapters, Engine
from weightsync.config import Secret, ServerSettings
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ConfigurationError, DeadlineExceeded
from weightsync.integrations.trl.server_mode import ServerModePublisher
from weightsync.integrations.trl.transfer import JoinOptions
from weightsync.server.server import BackgroundServer

pytestmark = [pytest.mark.vllm]
peft = pytest.importorskip("peft")
X = torch.linspace(-1, 1, 15).view(3, 5)
LORA = {"lora_config": {"max_lora_rank": 8, "max_cpu_loras": 3}}
BYTES = 4 * 3 * (5 + 7)
"""Of the adapter: float32 and rank 3, for a layer of 7 x 5."""


def module(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7))


def trained(seed: int, **more: Any) -> Any:
    config = peft.LoraConfig(**{"r": 3, "target_modules": ["0"], "init_lora_weights": False} | more)
    return peft.get_peft_model(module(seed), config)


def step(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.25)


class Replica:
    """A replica, and the server that TRL samples from."""

    def __init__(self, running: BackgroundServer, rollout: RolloutServer, slots: int = 3, rank: int = 64) -> None:
        self.served = module(1)
        self.engine = ModuleAdapter(self.served, adapter_slots=slots, max_lora_rank=rank)
        rollout.label = lambda: str(self.engine.version)
        rollout.models = lambda: ["tiny", *self.engine.loras()]
        rollout.config = LORA
        self.joined = Engine(self.engine, "one", running.url, token=running.token)

    def answer(self, name: str | None) -> torch.Tensor:
        with self.engine.in_use(adapter=name), torch.no_grad():
            answer: torch.Tensor = self.served(X)
            return answer

    def agrees(self, model: Any, name: str | None) -> bool:
        with torch.no_grad():
            return torch.allclose(self.answer(name), model(X), atol=1e-5)


@contextmanager
def coordinator(run: str = "math", port: int = 0) -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings.load({}, port=port, run=run, token=Secret("t" * 43))) as running:
        yield running


class Server:
    """TRL's server mode with one model."""

    def __init__(self, running: BackgroundServer, url: str, model: Any, wait: float = 0.0, **more: Any) -> None:
        self.generation = generation_of(model, url)
        options = JoinOptions(running.url, token=running.token, dtype=None, timeout=30, **more)
        self.publisher, self.training = ServerModePublisher(self.generation, options, wait), Training(url)

    def update(self) -> Any:
        self.training.call(lambda: self.publisher.publish(self.generation))
        return self.publisher.result

    @property
    def asks(self) -> str:
        return getattr(self.generation.vllm_client, "model", "tiny")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "merges the adapter" in record.getMessage()]


def test_the_base_moves_once_and_then_only_the_adapter(rollout: RolloutServer, caplog: pytest.LogCaptureFixture) -> None:
    with coordinator() as running, (replica := Replica(running, rollout)).joined:
        server = Server(running, rollout.url, model := trained(2))
        for number in range(5):
            step(model)
            result = server.update()
            assert str(result.version) == server.asks == f"trl/math@{number}"
            assert [(each.nbytes, each.paused_seconds, each.verified) for each in result.replicas] == [(BYTES, 0, "installed")]
            assert replica.agrees(model, server.asks) and replica.agrees(model, "trl/math")
            assert not replica.agrees(model, None)
        assert str(replica.engine.version) == "math@1", "the base moved once"
        assert sorted(replica.engine.loras()) == ["trl/math@3", "trl/math@4"]
        with model.disable_adapter():
            assert replica.agrees(model, None)
        server.publisher.close()
    assert not told(caplog)


def test_a_request_keeps_its_version_during_an_update(rollout: RolloutServer) -> None:
    with coordinator() as running, (replica := Replica(running, rollout)).joined:
        server = Server(running, rollout.url, model := trained(2), adapter="alice/math")
        server.update()
        with replica.engine.in_use(adapter="alice/math"), torch.no_grad():
            before = replica.served(X)
            step(model)
            assert str(server.update().version) == "alice/math@1"
            assert torch.equal(replica.served(X), before)
        assert replica.agrees(model, "alice/math")
        server.publisher.close()


NOT_SERVED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no LoRA": (
        {"lora_config": None},
        {},
        r"without --enable-lora.*start it with --enable-lora --max-lora-rank 8 --max-cpu-loras 3",
    ),
    "rank": ({"lora_config": {"max_lora_rank": 2, "max_cpu_loras": 3}}, {}, "started with --max-lora-rank 2 .*--max-lora-rank 8"),
    "slots": ({"lora_config": {"max_lora_rank": 8, "max_cpu_loras": 2}}, {}, "--max-cpu-loras 2.*--max-cpu-loras 3"),
    "stale": (LORA, {"args": SimpleNamespace(max_staleness=4)}, "--max-cpu-loras 7"),
    "API servers": (LORA | {"parallel_config": {"data_parallel_size": 2, "_api_process_count": 2}}, {}, "--api-server-count 1"),
    "data parallel, of an older vLLM": (LORA | {"parallel_config": {"data_parallel_size": 2}}, {}, "--api-server-count 1"),
    "own rollouts": (LORA, {"rollout_func": print}, "rollout_func of your own"),
    "own worker": (LORA, {"rollout_worker": SimpleNamespace()}, "rollout_worker"),
    "teacher": (LORA, {"use_teacher_server": True}, "teacher on the same server"),
    "refused": (LORA, {}, "trl/math@0 was not published, and its number is free.*no LoRA layer"),
}


@pytest.mark.parametrize("case", NOT_SERVED)
def test_where_the_server_cannot_the_adapter_is_merged_and_one_line_says_why(
    case: str, rollout: RolloutServer, caplog: pytest.LogCaptureFixture
) -> None:
    config, trainer, why = NOT_SERVED[case]
    with coordinator() as running, (replica := Replica(running, rollout)).joined:
        rollout.config = config
        server = Server(running, rollout.url, model := trained(2, r=8 if case == "rank" else 3))
        vars(server.training).update(trainer)
        if case == "refused":
            replica.engine.check_lora = refuse  # type: ignore[method-assign, assignment]
        for number in (1, 2):
            step(model)
            result = server.update()
            assert result.version.number == number + (case == "refused")  # the base was the first
            assert result.version.run == "math" and server.asks == "tiny"
            assert replica.agrees(model, None) and not replica.engine.loras()
        server.publisher.close()
    (line,) = told(caplog)
    assert re.search(why, line), line


def test_what_is_trained_beside_the_adapter_is_sent_too(rollout: RolloutServer, caplog: pytest.LogCaptureFixture) -> None:
    """Only the adapter was sent, and the server sampled from another policy."""
    with coordinator() as running, (replica := Replica(running, rollout)).joined:
        server = Server(running, rollout.url, model := trained(2))
        beside = next(own for name, own in model.named_parameters() if model.prefix not in name)
        beside.requires_grad_(True)
        for _ in range(2):
            step(model)
            with torch.no_grad():
                beside.add_(0.5)
            server.update()
            assert replica.agrees(model, None)
        server.publisher.close()
    (line,) = told(caplog)
    assert "is trained beside the adapter" in line


def test_what_is_trained_beside_the_adapter_from_a_later_step_on_ends_the_training(rollout: RolloutServer) -> None:
    with coordinator() as running, Replica(running, rollout).joined:
        server = Server(running, rollout.url, model := trained(2))
        server.update()
        beside, parameter = next(pair for pair in model.named_parameters() if model.prefix not in pair[0])
        parameter.requires_grad_(True)
        with pytest.raises(ConfigurationError, match=f"{re.escape(beside)} is trained now, and only the adapter is sent"):
            server.update()
        server.publisher.close()


def test_trainers_on_one_coordinator_have_their_own_names_and_leave_those_of_others_alone(rollout: RolloutServer) -> None:
    models = [trained(2), trained(3)]
    for model in models:
        model.base_model.model.hf_quantizer = object()
    with coordinator() as running, (replica := Replica(running, rollout, slots=12)).joined:
        rollout.config = {"lora_config": {"max_lora_rank": 8, "max_cpu_loras": 12}}
        with Adapters(models[0], None, coordinator=running.url, token=running.token, rank=0, world_size=1) as direct:
            direct.publish("trl/alice")
            servers = [Server(running, rollout.url, model) for model in models]
            for _ in range(3):
                assert [server.update().version.run for server in servers] == ["trl/math", "trl/math-2"]
            assert sorted(replica.engine.loras()) == [
                "trl/alice@0", "trl/math-2@1", "trl/math-2@2", "trl/math@1", "trl/math@2",
            ]  # fmt: skip
        for server in servers:
            server.publisher.close()
        server = Server(running, rollout.url, models[0])
        server.update()
        assert sorted(replica.engine.loras()) == ["trl/math@2", "trl/math@3"], "nobody publishes the others any more"
        server.publisher.close()


def test_after_a_merge_requests_name_what_they_named_before(rollout: RolloutServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with coordinator() as running, (replica := Replica(running, rollout)).joined:
        server = Server(running, rollout.url, model := trained(2))
        server.generation.vllm_client.model = "tiny"
        server.update()
        assert server.asks == "trl/math@0"
        server.publisher.close()
        rollout.config = {"lora_config": None}
        step(model)
        server.update()
        assert server.asks == "tiny" and replica.agrees(model, None)
        server.publisher.close()


@pytest.mark.parametrize("own", [pytest.param(True, marks=pytest.mark.rare), False])
def test_all_ranks_do_what_rank_zero_does(own: bool, tmp_path: Path) -> None:
    """Rank 1 waited for rank 0 in another collective until the group's timeout: only rank 0 knows its trainer's transfer."""
    nobody = f"http://127.0.0.1:{free_port()}"
    with ProcessPoolExecutor(2, get_context("spawn")) as ranks:
        results = list(ranks.map(update, (0, 1), [str(tmp_path / "store")] * 2, [nobody] * 2, [own] * 2))
    if own:
        assert results[0].startswith("CoordinatorUnreachable: ")
        assert results[1] == f"ConfigurationError: rank 0 could not publish: {results[0].partition(': ')[2]}"
    else:
        assert results == ["merged"] * 2


def test_a_coordinator_that_ends_after_an_update_ends_no_training(rollout: RolloutServer) -> None:
    """Old versions are retired on rank 0 alone, so its error would have left the others without it."""
    with ExitStack() as lives:
        running = lives.enter_context(coordinator())
        server = Server(running, rollout.url, model := trained(2))
        with (replica := Replica(running, rollout)).joined:
            server.update()
            step(model)

            def models() -> list[str]:  # asked after the update, and before the retirement
                lives.close()
                server.publisher._options.timeout = 1
                return ["tiny", *replica.engine.loras()]

            rollout.models = models
            assert str(server.update().version) == "trl/math@1"
            server.publisher.close()


def test_the_default_names_cannot_be_given() -> None:
    with pytest.raises(ConfigurationError, match="trl/alice is reserved"):
        JoinOptions("http://localhost:1", adapter="trl/alice")


def refuse(*_: object) -> None:
    raise ConfigurationError("it changes a module that has no LoRA layer")


@pytest.mark.parametrize("more", [{"modules_to_save": ["1"]}, {"use_dora": True}])
def test_an_adapter_with_other_parts_is_merged(
    more: dict[str, Any], rollout: RolloutServer, caplog: pytest.LogCaptureFixture
) -> None:
    with coordinator() as running, (replica := Replica(running, rollout)).joined:
        server = Server(running, rollout.url, model := trained(2, **more))
        assert server.update().version.run == "math" and replica.agrees(model, None)
        server.publisher.close()
    assert len(told(caplog)) == 1


def test_a_trainer_that_is_not_known_may_have_requests_that_name_the_base(
    rollout: RolloutServer, caplog: pytest.LogCaptureFixture
) -> None:
    with coordinator() as running, (replica := Replica(running, rollout)).joined:
        server = Server(running, rollout.url, model := trained(2))
        server.publisher.publish(server.generation)
        assert server.asks == "tiny" and replica.agrees(model, None)
        server.publisher.close()
    assert "a method of TRL's trainer has to ask" in told(caplog)[0]


def test_merging_stays_an_option(rollout: RolloutServer, caplog: pytest.LogCaptureFixture) -> None:
    with coordinator() as running, (replica := Replica(running, rollout)).joined:
        server = Server(running, rollout.url, model := trained(2), merge=True)
        assert server.update().version.run == "math" and replica.agrees(model, None)
        server.publisher.close()
    assert not told(caplog)


def test_what_is_merged_is_the_model_as_it_is_now(rollout: RolloutServer) -> None:
    """The first update's parameters were published again, also where the program had replaced one of them."""
    with coordinator() as running, (replica := Replica(running, rollout)).joined:
        server = Server(running, rollout.url, model := trained(2), merge=True)
        for number in range(3):
            layer = model.base_model.model[1]
            layer.weight = torch.nn.Parameter(layer.weight + number, requires_grad=False)
            step(model)
            server.update()
            assert replica.agrees(model, None)
        server.generation.model = other = trained(7)
        server.update()
        assert replica.agrees(other, None)
        server.publisher.close()


def test_parameters_that_a_pass_left_gathered_are_merged_as_shards(tmp_path: Path) -> None:
    """PEFT merged into the gathered copies, and the shards were published: a base without its adapter, verified."""
    served = torch.nn.ModuleDict({"up": torch.nn.Linear(5, 7, bias=False), "down": torch.nn.Linear(7, 3, bias=False)})
    with coordinator() as running, ProcessPoolExecutor(2, get_context("spawn")) as ranks:
        given = [str(tmp_path / "store")] * 2, [running.url] * 2, [running.token] * 2
        with Engine(ModuleAdapter(served.bfloat16()), "one", running.url, token=running.token):
            assert list(ranks.map(merge_after_a_pass, (0, 1), *given)) == ["installed"] * 2
    (model := adapted(2)).merge_adapter()
    wanted = {name: value for name, value in model.named_parameters() if "lora_" not in name}
    for value, other in zip(wanted.values(), served.parameters(), strict=True):
        assert torch.allclose(value.bfloat16(), other, atol=0.01), wanted.keys()


def test_a_quantized_base_stays_what_the_server_loaded(rollout: RolloutServer) -> None:
    """The trainer's bytes are those of 4-bit blocks, say, and no checkpoint has them: only the adapter is needed."""
    with coordinator() as running, (replica := Replica(running, rollout)).joined:
        replica.served.load_state_dict(module(2).state_dict())
        model = trained(2)
        model.base_model.model.hf_quantizer = object()
        server = Server(running, rollout.url, model)
        step(model)
        assert str(server.update().version) == "trl/math@0"
        assert replica.agrees(model, "trl/math") and replica.engine.version is None
        server.publisher.close()


def test_a_server_that_is_started_again_gets_the_base_and_the_adapter(rollout: RolloutServer) -> None:
    with coordinator() as running:
        server = Server(running, rollout.url, model := trained(2), wait=30)
        with Replica(running, rollout).joined:
            server.update()
        with ThreadPoolExecutor(1) as other:
            step(model)
            asked = other.submit(server.update)
            with pytest.raises(TimeoutError):
                asked.result(1)
            with (replica := Replica(running, rollout)).joined:
                assert asked.result(30).version.run == "trl/math"
                assert str(replica.engine.version) == "math@2", "it had loaded a base of its own"
                assert replica.agrees(model, server.asks)
        server.publisher.close()


def test_versions_of_an_earlier_run_leave_their_slots(rollout: RolloutServer) -> None:
    """The coordinator is started again with another run, and the server stays: it has three slots."""
    port = free_port()
    with ExitStack() as lives:
        with coordinator("first", port) as running:
            replica = Replica(running, rollout)
            lives.enter_context(replica.joined)
            server = Server(running, rollout.url, model := trained(2))
            for _ in range(3):
                server.update()
            server.publisher.close()
        assert sorted(replica.engine.loras()) == ["trl/first@1", "trl/first@2"]
        with coordinator("second", port) as running:
            server = Server(running, rollout.url, model)
            for _ in range(3):
                step(model)
                server.update()
            assert sorted(replica.engine.loras()) == ["trl/second@1", "trl/second@2"]
            assert replica.agrees(model, "trl/second")
            server.publisher.close()


def test_versions_of_other_names_need_slots_too(rollout: RolloutServer, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise an update in the middle of a training found no free slot."""
    with coordinator() as running, (replica := Replica(running, rollout, slots=4)).joined:
        rollout.config = {"lora_config": {"max_lora_rank": 8, "max_cpu_loras": 4}}
        first = Server(running, rollout.url, model := trained(2), adapter="alice/math")
        for _ in range(2):
            first.update()
        first.publisher.close()
        second = Server(running, rollout.url, model, adapter="alice/code")
        assert second.update().version.run == "math"
        assert re.search("--max-cpu-loras 4, and holds 2 of others.*--max-cpu-loras 5", told(caplog)[0])
        second.publisher.close()
        again = Server(running, rollout.url, model, adapter="alice/math")
        assert str(again.update().version) == "alice/math@2" and replica.agrees(model, "alice/math")
        again.publisher.close()


@pytest.mark.parametrize("give", ["argument", "variable"])
def test_a_name_that_is_none_is_refused_before_anything_starts(give: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if give == "variable":
        monkeypatch.setenv("WEIGHTSYNC_ADAPTER", "policy")
    with pytest.raises(ConfigurationError, match="an adapter's name is owner/name"):
        JoinOptions(adapter="policy" if give == "argument" else "")


def test_without_a_server_the_first_update_of_an_adapter_says_so(rollout: RolloutServer) -> None:
    with coordinator() as running:
        rollout.config = LORA
        server = Server(running, rollout.url, trained(2))
        server.publisher._options.timeout = 1
        with pytest.raises(DeadlineExceeded, match="WEIGHTSYNC_COORDINATOR"):
            server.update()
        with (replica := Replica(running, rollout)).joined:
            server.publisher._options.timeout = 30
            assert str(server.update().version) == "trl/math@0"
            assert replica.agrees(server.generation.model, server.asks)
        server.publisher.close()
