"""What TRL calls of weightsync, called as TRL calls it: no TRL and no vLLM are needed, replicas are modules of this process."""

from __future__ import annotations

import json
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from tests.integration.pauses import NotesPauses
from tests.integration.server.service_support import free_port

from weightsync import Engine
from weightsync.config import ServerSettings
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import (
    Aborted,
    AuthenticationError,
    ConfigurationError,
    CoordinatorUnreachable,
    DeadlineExceeded,
    ManifestMismatch,
    RoundFailed,
    WeightSyncError,
)
from weightsync.integrations.__main__ import main as check_installation
from weightsync.integrations.trl import WeightTransfer
from weightsync.integrations.trl.server_mode import ServerModePublisher
from weightsync.integrations.trl.transfer import JoinOptions
from weightsync.server.server import BackgroundServer

T = TypeVar("T")
WEIGHTS = {"up.weight": (7, 5), "down.weight": (3, 7)}


def module(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    made = torch.nn.ModuleDict({"up": torch.nn.Linear(5, 7, bias=False), "down": torch.nn.Linear(7, 3, bias=False)})
    return torch.nn.Module.to(made, dtype=torch.bfloat16)


class Source:
    """A generator as TRL has it: each tensor is gone when the next one is asked for."""

    def __init__(self, seed: int, broken: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = {name: torch.randn(shape, generator=generator) for name, shape in WEIGHTS.items()}
        self.broken = broken
        self.drained = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.weights.items():
            lent = tensor.clone()
            yield name, lent
            lent.fill_(float("nan"))
            if self.broken:
                raise RuntimeError("a collective failed")
        self.drained = True


@contextmanager
def coordinator() -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings.load({}, port=0)) as running:
        yield running


_ADAPTERS: dict[str, ModuleAdapter] = {}
"""Of the last replica of each coordinator, by URL."""


@contextmanager
def replica(running: BackgroundServer, served: torch.nn.Module) -> Iterator[Engine]:
    _ADAPTERS[running.url] = ModuleAdapter(served)
    with Engine(_ADAPTERS[running.url], "one", running.url, token=running.token) as engine:
        yield engine


def holds(served: torch.nn.Module, source: Source) -> bool:
    return all(torch.equal(one, source.weights[name].to(torch.bfloat16)) for name, one in served.named_parameters())


def generation_of(model: torch.nn.Module, url: str) -> SimpleNamespace:
    """What weightsync uses of TRL's ``VLLMGeneration`` in one process."""
    distributed, client = SimpleNamespace(is_zero3=False, fsdp_version=0), SimpleNamespace(base_url=url)
    accelerator = SimpleNamespace(is_main_process=True)
    return SimpleNamespace(accelerator=accelerator, _dist=distributed, model=model, vllm_client=client)


class RolloutServer:
    """What vLLM's development routes say of the server that TRL samples from."""

    def __init__(self) -> None:
        self.backend = "weightsync"
        self.label: Callable[[], str] = lambda: "run-of-another@7"
        self.lacks = ""
        self.config: dict[str, Any] = {}
        self.models: Callable[[], Iterable[str]] = tuple
        said = self

        class Routes(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/weight_info":
                    info: dict[str, Any] = {"weight_version": said.label()}
                elif path == "/v1/models":
                    info = {"data": [{"id": name} for name in said.models()]}
                elif path == "/version":
                    info = {"version": "0.25.0"}
                else:
                    info = {"vllm_config": {"weight_transfer_config": {"backend": said.backend}, **said.config}}
                body = json.dumps(info).encode()
                self.send_response(404 if path == said.lacks else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self.http = HTTPServer(("127.0.0.1", 0), Routes)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def serves(self, running: BackgroundServer) -> None:
        """It is the replica ``one`` of ``running``."""

        def label() -> str:
            return str(_ADAPTERS[running.url].version)

        self.label = label


class Training:
    """A trainer of TRL's, as far as weightsync looks at it: it calls its weight transfer from a method of its own."""

    def __init__(self, url: str | None = None) -> None:
        self.args = SimpleNamespace(**({} if url is None else {"vllm_server_base_url": url}))
        self._metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}

    def call(self, work: Callable[[], T]) -> T:
        return work()


def options(running: BackgroundServer, timeout: float = 30.0) -> JoinOptions:
    return JoinOptions(running.url, token=running.token, timeout=timeout)


def update(transfer: WeightTransfer, training: Training, source: Source) -> None:
    training.call(transfer.init_weight_transfer)
    try:
        training.call(lambda: transfer.send_weights(iter(source)))
    finally:
        transfer.destroy()


def test_a_server_that_is_not_the_updated_replica_ends_the_training(rollout: RolloutServer) -> None:
    """TRL would sample from a policy that no update reaches, while each update says that all replicas took it."""
    with coordinator() as running, replica(running, module(1)):
        transfer = WeightTransfer(running.url, token=running.token, timeout=30)
        with pytest.raises(ConfigurationError, match=r"samples from .* serves 'run-of-another@7'; this update brought .*@1"):
            update(transfer, Training(rollout.url), Source(1))
        with pytest.raises(ConfigurationError, match="serves 'run-of-another@7'"):
            update(WeightTransfer(running.url, token=running.token, timeout=30, server=rollout.url), Training(), Source(2))
        publisher = ServerModePublisher(made := generation_of(module(2), rollout.url), options(running))
        with pytest.raises(ConfigurationError, match="serves 'run-of-another@7'"):
            publisher.publish(made)
        publisher.close()
        rollout.lacks = "/weight_info"
        with pytest.raises(ConfigurationError, match=r"is release 0\.25\.0 and has no route /weight_info, .*Use vLLM 0\.27"):
            update(transfer, Training(rollout.url), Source(3))
        rollout.lacks = "/server_info"
        with pytest.raises(ConfigurationError, match="Restart it with its development routes: VLLM_SERVER_DEV_MODE=1"):
            update(transfer, Training(rollout.url), Source(4))


def test_a_server_without_our_backend_is_refused_before_anything_is_waited_for(rollout: RolloutServer) -> None:
    rollout.backend = "nccl"
    with coordinator() as running:
        transfer = WeightTransfer(running.url, token=running.token, timeout=600)
        with pytest.raises(ConfigurationError, match=r"has the weight-transfer backend nccl.*Restart it"):
            update(transfer, Training(rollout.url), Source(1))


@pytest.mark.parametrize("server_mode", [False, True])
def test_every_update_is_a_line_on_the_terminal_and_in_trls_metrics(
    server_mode: bool, rollout: RolloutServer, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "weightsync.rounds")  # where the log shows rounds, nothing is printed beside it
    training = Training(rollout.url)
    with coordinator() as running, replica(running, module(1)):
        rollout.serves(running)
        if server_mode:
            publisher = ServerModePublisher(made := generation_of(module(2), rollout.url), options(running))
            for _ in range(2):
                training.call(lambda: publisher.publish(made))
            publisher.close()
        else:
            for seed in range(2):
                update(WeightTransfer(running.url, token=running.token, timeout=30), training, Source(seed))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("weightsync: round ")]
    assert len(lines) == 2
    assert re.search(r"@2 serves in 1 of 1 replicas \(one\) after .*verified as installed", lines[1]), lines
    metrics = training._metrics["train"]
    assert metrics["weightsync/replicas_ok"] == [1.0, 1.0]
    assert len(metrics["weightsync/update_s"]) == 2


@pytest.mark.parametrize("server_mode", [False, True])
def test_weights_that_are_rounded_while_they_are_published_are_warned_of_once(
    server_mode: bool, rollout: RolloutServer, caplog: pytest.LogCaptureFixture
) -> None:
    with coordinator() as running, replica(running, module(1)):
        rollout.serves(running)
        if server_mode:
            publisher = ServerModePublisher(made := generation_of(module(2).float(), rollout.url), options(running))
            for _ in range(2):
                publisher.publish(made)
            publisher.close()
        else:
            transfer = WeightTransfer(running.url, token=running.token, timeout=30, server=rollout.url)
            transfer.init_weight_transfer()
            for seed in range(2):
                transfer.send_weights(iter(Source(seed)))
            transfer.destroy()
    warned = [record.getMessage() for record in caplog.records if "rounded weights" in record.getMessage()]
    assert len(warned) == 1
    assert re.match(r"the trainer's weights are float32 \(.*\.weight\) and are published as bfloat16", warned[0])


def test_a_server_that_is_killed_and_started_again_can_be_waited_for(rollout: RolloutServer) -> None:
    with coordinator() as running:
        made = generation_of(trained := module(2), rollout.url)
        rollout.serves(running)
        publisher = ServerModePublisher(made, options(running), wait_for_replicas=30)
        with replica(running, module(1)):
            publisher.publish(made)
        with ThreadPoolExecutor(1) as other:
            asked = other.submit(publisher.publish, made)
            with pytest.raises(TimeoutError):
                asked.result(1)
            with replica(running, served := module(3)):
                asked.result(30)
                assert all(torch.equal(one, other) for one, other in zip(served.parameters(), trained.parameters(), strict=True))
        publisher.close()


def test_a_server_with_another_model_is_refused_at_once(rollout: RolloutServer) -> None:
    with coordinator() as running, replica(running, torch.nn.Linear(3, 3)):
        started = time.monotonic()
        publisher = ServerModePublisher(made := generation_of(module(2), rollout.url), options(running, timeout=50))
        with pytest.raises(ManifestMismatch, match=r"(?s)one is refused: .*missing: down\.weight"):
            publisher.publish(made)
        assert time.monotonic() - started < 20


def test_replicas_serve_what_the_generator_yields_and_a_new_trainer_counts_on() -> None:
    with coordinator() as running, replica(running, served := module(1)):
        for numbers in ((1, 2), (3, 4)):  # the second trainer is one that was started again
            transfer = WeightTransfer(running.url, token=running.token, timeout=30)
            transfer.init_weight_transfer()
            for number in numbers:
                source = Source(number)
                transfer.pause()
                transfer.send_weights(iter(source))
                transfer.resume()
                assert source.drained
                assert holds(served, source)
                assert transfer.result is not None
                assert transfer.result.version.number == number
            transfer.destroy()
            transfer.destroy()


def test_a_generator_that_raises_leaves_the_last_version_and_the_next_update_works() -> None:
    with coordinator() as running, replica(running, served := module(1)):
        transfer = WeightTransfer(running.url, token=running.token, timeout=30)
        transfer.init_weight_transfer()
        transfer.send_weights(iter(good := Source(1)))
        with pytest.raises(RuntimeError, match="a collective failed"):
            transfer.send_weights(iter(Source(2, broken=True)))
        assert holds(served, good)
        transfer.send_weights(iter(good := Source(3)))
        assert holds(served, good)
        transfer.destroy()


@pytest.mark.parametrize("server_mode", [False, True])
def test_running_requests_are_kept_whatever_the_coordinators_setting_is(server_mode: bool, rollout: RolloutServer) -> None:
    """As TRL's own client does it: an aborted request would be a completion without an end, and TRL would train on it."""
    pauses = NotesPauses(module(1))
    with (
        BackgroundServer(ServerSettings.load({}, port=0, pause_mode="abort")) as running,
        Engine(pauses, "one", running.url, token=running.token),
    ):
        _ADAPTERS[running.url] = pauses
        if server_mode:
            rollout.serves(running)
            publisher = ServerModePublisher(made := generation_of(module(2), rollout.url), options(running))
            publisher.publish(made)
            publisher.close()
        else:
            transfer = WeightTransfer(running.url, token=running.token, timeout=30)
            transfer.init_weight_transfer()
            transfer.send_weights(iter(Source(1)))
            transfer.destroy()
    assert pauses.modes == ["keep"]


def test_a_coordinator_that_is_not_there_fails_before_anything_is_gathered() -> None:
    with pytest.raises(CoordinatorUnreachable):
        WeightTransfer(f"http://127.0.0.1:{free_port()}", token="x" * 43).init_weight_transfer()


@pytest.mark.parametrize("main", [True, False])
def test_whole_tensors_are_gathered_to_the_end_on_all_ranks_also_if_the_first_cannot_join(main: bool) -> None:
    """TRL's server mode under ZeRO-3: the other ranks are in the gather meanwhile."""
    unreachable = JoinOptions(f"http://127.0.0.1:{free_port()}", token="x" * 43, dtype=None, timeout=5.0)
    source = Source(1)
    distributed = SimpleNamespace(is_zero3=True, fsdp_version=0)
    accelerator = SimpleNamespace(is_main_process=main)
    client = SimpleNamespace(base_url=f"http://127.0.0.1:{free_port()}")
    generation = SimpleNamespace(
        accelerator=accelerator, _dist=distributed, _iter_named_params=lambda: iter(source), vllm_client=client
    )
    publisher = ServerModePublisher(generation, unreachable)
    with pytest.raises(CoordinatorUnreachable) if main else nullcontext():
        publisher.publish(generation)
    assert source.drained


def test_weights_that_cannot_be_sent_are_gathered_to_the_end() -> None:
    source = Source(1)
    with pytest.raises(Aborted, match="init_weight_transfer"):
        WeightTransfer().send_weights(iter(source))
    assert source.drained


def test_a_wrong_token_fails_before_anything_is_gathered() -> None:
    with coordinator() as running, pytest.raises(AuthenticationError):
        WeightTransfer(running.url, token="x" * 43).init_weight_transfer()


def test_without_a_server_training_begins_with_the_error_that_says_so() -> None:
    with coordinator() as running:
        transfer = WeightTransfer(running.url, token=running.token, timeout=1)
        # A coordinator that stands still for a quarter of a second at the deadline says nothing.
        which = r"(1 replica .*ready: none|WaitForReplicas was not answered)"
        with pytest.raises(DeadlineExceeded, match=which + r".*--weight-transfer-config.*WEIGHTSYNC_COORDINATOR.*log"):
            transfer.init_weight_transfer()
        with pytest.raises(Aborted, match="init_weight_transfer"):
            transfer.send_weights(iter(Source(1)))


def test_a_server_that_is_gone_fails_the_update_within_its_deadline() -> None:
    with coordinator() as running:
        transfer = WeightTransfer(running.url, token=running.token, timeout=20)
        with replica(running, module(1)):
            transfer.init_weight_transfer()
            transfer.send_weights(iter(Source(1)))
        source = Source(2)
        with pytest.raises(RoundFailed):
            transfer.send_weights(iter(source))
        assert source.drained
        transfer.destroy()


def test_a_coordinator_that_dies_before_an_update_fails_it_within_its_deadline_after_all_was_gathered() -> None:
    with coordinator() as running, replica(running, module(1)):
        transfer = WeightTransfer(running.url, token=running.token, timeout=3)
        transfer.init_weight_transfer()
        running.stop()
        source = Source(1)
        with pytest.raises(WeightSyncError):
            transfer.send_weights(iter(source))
        assert source.drained
        transfer.destroy()


def test_the_check_of_an_installation_asks_the_coordinator_and_says_whether_trl_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with coordinator() as running:
        monkeypatch.setenv("WEIGHTSYNC_COORDINATOR", running.url)
        monkeypatch.setenv("WEIGHTSYNC_TOKEN", running.token)
        works = check_installation(["trl"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok") and "the token is accepted" in line for line in lines), lines
    there = find_spec("trl") is not None
    assert works == (0 if there else 1), lines
    assert any(line.startswith("ok" if there else "missing") and line.split()[1] == "trl" for line in lines), lines
