"""What TRL calls of weightsync, called as TRL calls it: no TRL and no vLLM are needed, replicas are modules of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from tests.integration.service_support import free_port

from weightsync import Engine
from weightsync.config import ServerSettings
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import (
    Aborted,
    AuthenticationError,
    ConfigurationError,
    CoordinatorUnreachable,
    DeadlineExceeded,
    RoundFailed,
    WeightSyncError,
)
from weightsync.integrations.__main__ import main as check_installation
from weightsync.integrations.trl import WeightTransfer
from weightsync.integrations.trl.server_mode import ServerModePublisher, check_interface
from weightsync.integrations.trl.transfer import JoinOptions
from weightsync.server.server import BackgroundServer

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


@contextmanager
def replica(running: BackgroundServer, served: torch.nn.Module) -> Iterator[Engine]:
    with Engine(ModuleAdapter(served), "one", running.url, token=running.token) as engine:
        yield engine


def holds(served: torch.nn.Module, source: Source) -> bool:
    return all(torch.equal(one, source.weights[name].to(torch.bfloat16)) for name, one in served.named_parameters())


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


def test_a_coordinator_that_is_not_there_fails_before_anything_is_gathered() -> None:
    with pytest.raises(CoordinatorUnreachable):
        WeightTransfer(f"http://127.0.0.1:{free_port()}", token="x" * 43).init_weight_transfer()


@pytest.mark.parametrize("main", [True, False])
def test_whole_tensors_are_gathered_to_the_end_on_all_ranks_also_if_the_first_cannot_join(main: bool) -> None:
    """TRL's server mode under ZeRO-3: the other ranks are in the gather meanwhile."""
    options = JoinOptions(f"http://127.0.0.1:{free_port()}", "x" * 43, None, 1, 5.0, None)
    source = Source(1)
    distributed = SimpleNamespace(is_zero3=True, fsdp_version=0)
    accelerator = SimpleNamespace(is_main_process=main)
    generation = SimpleNamespace(accelerator=accelerator, _dist=distributed, _iter_named_params=lambda: iter(source))
    publisher = ServerModePublisher(generation, options)
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
        with pytest.raises(DeadlineExceeded, match="1 replica"):
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


def test_a_trl_without_what_is_substituted_is_refused_by_name() -> None:
    class Generation:
        def sync_weights(self) -> None: ...

    with pytest.raises(ConfigurationError, match=r"has no VLLMClient\.init_communicator, VLLMGeneration\._iter_named_params"):
        check_interface(
            SimpleNamespace(VLLMGeneration=Generation),
            {"VLLMClient": ("init_communicator",), "VLLMGeneration": ("sync_weights", "_iter_named_params")},
        )
