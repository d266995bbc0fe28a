"""What TRL's asynchronous trainers do with a weight transfer, called as TRL calls it: each rank publishes what it holds."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integration.trl.test_trl_transfer import RolloutServer, Source, Training, coordinator, holds, module, replica, update
from tests.integration.trl.trl_ranks import train_twice

from weightsync import Trainer
from weightsync.errors import ConfigurationError, ManifestMismatch
from weightsync.integrations.trl import WeightTransfer
from weightsync.integrations.trl.transfer import follow
from weightsync.server.server import BackgroundServer


class AsyncTraining(Training):
    """An asynchronous trainer of TRL's that was imported before its weight transfer was made, on rank 0."""

    def __init__(self, url: str, model: torch.nn.Module, weight_transfer: Any) -> None:
        super().__init__(url)
        self.accelerator = SimpleNamespace(is_main_process=True, unwrap_model=lambda wrapped: wrapped)
        self.weight_transfer, self.model, self.model_version = weight_transfer, model, 0
        self.told: list[int] = []
        self.rollout_worker = SimpleNamespace(update_model_version=self.told.append, _loop_kwargs={"model_name": "tiny"})
        self.gathered = 0
        self.ends_transfer = True

    def _sync_weight_merged(self, began: float) -> tuple[float, float, float]:
        self.gathered += 1
        self.weight_transfer.pause()
        self.weight_transfer.send_weights((name, parameter.detach()) for name, parameter in self.model.named_parameters())
        self.weight_transfer.resume()
        return began, began, began

    def _inner_training_loop(self, updates: int) -> None:
        self.call(self.weight_transfer.init_weight_transfer)
        try:
            for _ in range(updates):
                with torch.no_grad():
                    next(iter(self.model.parameters())).add_(1)
                self._sync_weight_merged(time.time())
        finally:
            if self.ends_transfer:
                self.weight_transfer.destroy()

    def train(self, updates: int) -> None:
        self._inner_training_loop(updates)

    def is_served(self, served: torch.nn.Module) -> bool:
        return all(
            torch.equal(one, other.to(one.dtype)) for one, other in zip(served.parameters(), self.model.parameters(), strict=True)
        )


follow(AsyncTraining)


def transfer_of(running: BackgroundServer, **more: Any) -> WeightTransfer:
    return WeightTransfer(running.url, token=running.token, timeout=30, **more)


def test_an_asynchronous_trainer_publishes_what_it_holds_and_gathers_nothing(rollout: RolloutServer) -> None:
    """Rank 0 sent whole tensors that all ranks gathered, through host memory, and results said `received`."""
    with coordinator() as running, replica(running, served := module(1)):
        rollout.serves(running)
        training = AsyncTraining(rollout.url, module(2), weight_transfer=(transfer := transfer_of(running)))
        frozen = list(training.model.parameters())[-1].requires_grad_(False)
        for count in (2, 1):  # TRL ends a transfer after each run
            training.train(count)
            assert training.is_served(served)
        assert not frozen.requires_grad and not training.gathered
        assert transfer.result is not None
        assert str(transfer.result.version).endswith("@3")
        (one,) = transfer.result.replicas
        assert (one.delivery, one.verified) == ("direct", "installed")
    assert training.told == [1, 2, 3] and training.model_version == 3
    assert training._metrics["train"]["weightsync/replicas_ok"] == [1.0] * 3
    assert training.rollout_worker._loop_kwargs == {"model_name": "tiny"}


def test_another_transfer_in_the_process_leaves_a_trainers_own_alone(rollout: RolloutServer) -> None:
    """The one that was made last counted for all trainers: earlier ones gathered, into a transfer that had not joined."""
    with coordinator() as running, replica(running, served := module(1)):
        rollout.serves(running)
        first, second = (AsyncTraining(rollout.url, module(seed), transfer_of(running)) for seed in (2, 3))
        for training in (first, second, first):
            training.train(1)
            transfer_of(running).check()
            assert training.is_served(served) and not training.gathered


class Notes(WeightTransfer):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


class Delegating:
    """A weight transfer of the user's own, which has one of weightsync's."""

    def __init__(self, own: WeightTransfer) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class Overrides(AsyncTraining):
    """A trainer with a synchronization of its own."""

    gathers = False

    def _sync_weight_merged(self, began: float) -> tuple[float, float, float]:
        if not self.gathers:
            return super()._sync_weight_merged(began)
        self.gathered += 1
        self.weight_transfer.send_weights((name, parameter.detach()) for name, parameter in self.model.named_parameters())
        return began, began, began


@pytest.mark.parametrize("how", ["notes", "delegates", "calls super", "gathers"])
def test_what_users_put_around_it_still_works(how: str, rollout: RolloutServer) -> None:
    with coordinator() as running, replica(running, served := module(1)):
        rollout.serves(running)
        kind = Overrides if how in {"calls super", "gathers"} else AsyncTraining
        transfer = Notes(running.url, token=running.token, timeout=30)
        training = kind(rollout.url, module(2), Delegating(transfer) if how == "delegates" else transfer)
        if isinstance(training, Overrides):
            training.gathers = how == "gathers"
        for run in range(2):
            training.train(2)
            assert training.is_served(served), run
        assert training.gathered == (4 if how in {"delegates", "gathers"} else 0)
        assert transfer.calls == ([] if how == "gathers" else ["pause", "resume"] * 4)


def test_a_trainer_with_another_model_publishes_that_one(rollout: RolloutServer) -> None:
    """The first one was published on, and nothing but a warning said so."""
    with coordinator() as running, replica(running, served := module(1)):
        rollout.serves(running)
        training = AsyncTraining(rollout.url, module(2), transfer_of(running))
        training.call(training.weight_transfer.init_weight_transfer)
        for seed in (2, 5):
            training.model = module(seed)
            training._sync_weight_merged(0.0)
            assert training.is_served(served)
        training.weight_transfer.destroy()


def test_a_launchers_variables_say_nothing_of_a_trainer_without_ranks(
    rollout: RolloutServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task of `srun` was the trainer and the other vLLM: the trainer waited for a second rank."""
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("RANK", "0")
    with coordinator() as running, replica(running, served := module(1)):
        rollout.serves(running)
        training = AsyncTraining(rollout.url, module(2), transfer_of(running))
        training.train(1)
        assert training.is_served(served)


@pytest.mark.parametrize("raises", [False, True])
def test_a_rank_whose_transfer_trl_does_not_end_leaves_when_its_run_ends(raises: bool, rollout: RolloutServer) -> None:
    """As ranks other than 0. They stayed, and the next trainer of their coordinator was refused."""
    with coordinator() as running, replica(running, served := module(1)):
        rollout.serves(running)
        training = AsyncTraining(rollout.url, module(2), transfer_of(running))
        training.ends_transfer = False
        if raises:
            training.rollout_worker.update_model_version = training.told.__getitem__
        with pytest.raises(IndexError) if raises else nullcontext():
            training.train(1)
        with Trainer(trained := module(5), running.url, token=running.token, rank=0, world_size=1) as other:
            other.publish()
        assert all(torch.equal(*pair) for pair in zip(served.parameters(), trained.parameters(), strict=True))


def test_an_asynchronous_trainer_ends_where_another_server_was_updated(rollout: RolloutServer) -> None:
    with coordinator() as running, replica(running, module(1)):
        training = AsyncTraining(rollout.url, module(2), transfer_of(running))
        with pytest.raises(ConfigurationError, match="serves 'run-of-another@7'"):
            training.train(1)
    assert training.told == []


def test_parts_that_do_not_say_what_they_are_parts_of_are_refused(rollout: RolloutServer) -> None:
    """As parameters under FSDP1 and ZeRO-3."""
    with coordinator() as running, replica(running, module(1)):
        parts = {"up": torch.zeros(18), "down": torch.zeros(0)}
        flat = torch.nn.ModuleDict({name: torch.nn.ParameterDict({"weight": part}) for name, part in parts.items()})
        training = AsyncTraining(rollout.url, flat, transfer_of(running))
        with pytest.raises(ManifestMismatch, match=r"up\.weight"):
            training.train(1)


def test_a_transfer_that_is_made_before_its_trainers_import_says_that_it_gathers(
    rollout: RolloutServer, caplog: pytest.LogCaptureFixture
) -> None:
    class Unknown(Training):
        def _sync_weight_merged(self, began: float) -> None: ...

    with coordinator() as running, replica(running, served := module(1)):
        rollout.serves(running)
        transfer, source = WeightTransfer(running.url, token=running.token, timeout=30), Source(1)
        update(transfer, Unknown(rollout.url), source)
        assert holds(served, source)
    lines = [record.getMessage() for record in caplog.records if "all ranks gather whole tensors" in record.getMessage()]
    assert len(lines) == 1 and "after the import of this trainer" in lines[0]


def test_the_other_ranks_join_again_with_the_first_one(tmp_path: Path) -> None:
    """TRL ends a transfer on rank 0 alone, and each run of one process begins with another one there."""
    with coordinator() as running, replica(running, module(1)), ProcessPoolExecutor(2, get_context("spawn")) as ranks:
        results = list(ranks.map(train_twice, (0, 1), [str(tmp_path / "store")] * 2, [running.url] * 2, [running.token] * 2))
    assert results == [["1", "2"]] * 2
