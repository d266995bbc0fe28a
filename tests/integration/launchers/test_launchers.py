"""Agents that a launcher started: place, replica and coordinator by torchrun's and Slurm's variables, and what wins over what."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import weightsync
from weightsync.config import Secret, ServerSettings, launched_place
from weightsync.errors import ConfigurationError
from weightsync.server.server import BackgroundServer

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "0123456789abcdefghijklmnopqrstuv"
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3"}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8"}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher but the test's."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(("SLURM_", "WEIGHTSYNC_REPLICA", "WEIGHTSYNC_COORDINATOR")):
            monkeypatch.delenv(name)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[BackgroundServer]:
    """A coordinator that agents find by their environment alone."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    with BackgroundServer(ServerSettings.load({}, port=0, token=Secret(TOKEN))) as running:
        monkeypatch.setenv("WEIGHTSYNC_COORDINATOR", running.url)
        monkeypatch.setenv("WEIGHTSYNC_TOKEN_FILE", str(file))
        yield running


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (TORCHRUN, (1, 3)),
        (SLURM, (2, 4)),
        ({**SLURM, **TORCHRUN}, (1, 3)),  # torchrun under srun
        ({"RANK": "", "WORLD_SIZE": "", **SLURM}, (2, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script, or the shell of an allocation
    ],
)
def test_the_launcher_says_which_rank(environment: Mapping[str, str], place: tuple[int, int] | None) -> None:
    assert launched_place(environment) == place


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK='1' and WORLD_SIZE=None: set both or neither"),
        ({"WORLD_SIZE": "2"}, "RANK=None and WORLD_SIZE='2'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2' is no rank of WORLD_SIZE='2'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({**SLURM, "SLURM_PROCID": "4"}, "SLURM_PROCID='4' is no rank of SLURM_STEP_NUM_TASKS='4'"),
    ],
)
def test_a_place_that_cannot_be_is_refused_by_name(environment: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        launched_place(environment)


@pytest.mark.parametrize(
    ("environment", "given", "place"),
    [
        ({}, {}, (0, 1)),
        (TORCHRUN, {}, (1, 3)),
        (SLURM, {}, (2, 4)),
        (TORCHRUN, {"rank": 0, "world_size": 2}, (0, 2)),
        (TORCHRUN, {"rank": 0}, (0, 3)),
    ],
)
def test_a_trainer_takes_its_place_in_the_documented_order(
    server: BackgroundServer,
    monkeypatch: pytest.MonkeyPatch,
    environment: Mapping[str, str],
    given: Mapping[str, int],
    place: tuple[int, int],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with weightsync.Trainer({"a": torch.zeros(2)}, **given) as trainer:  # type: ignore[arg-type]
        assert (trainer.rank, trainer.world_size) == place
        assert trainer.coordinator == server.url


def test_an_engine_named_by_the_environment_is_its_launch_and_one_named_in_code_is_not(
    server: BackgroundServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine(**given: object) -> weightsync.Engine:
        return weightsync.Engine(weightsync.ModuleAdapter(torch.nn.Linear(2, 2)), **given)  # type: ignore[arg-type]

    with pytest.raises(ConfigurationError, match="WEIGHTSYNC_REPLICA"):
        engine()
    for name, value in {**SLURM, "WEIGHTSYNC_REPLICA": "named"}.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as owned:
        made = [owned.enter_context(engine(**given)) for given in ({}, {"rank": 1}, {"replica": "own"})]
        places = [(one.replica, one.rank, one.world_size) for one in made]
    assert places == [("named", 2, 4), ("named", 1, 4), ("own", 0, 1)]
    with pytest.raises(ConfigurationError, match="rank 4 is out of range for 4 ranks"):
        engine(rank=4)


def test_torchrun_launches_a_trainer_and_a_replica_that_find_each_other(server: BackgroundServer) -> None:
    environment = {**os.environ, "WEIGHTSYNC_REPLICA": "launched", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "tests/integration/launchers/torchrun_rank.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[('launched', 'loaded', 1)]") == 2, done.stdout


def test_the_slurm_script_of_the_guide_is_a_script() -> None:
    blocks = re.findall(r"^```bash\n(#!.*?)^```$", (ROOT / "docs/guides/launchers.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    checked = subprocess.run(["bash", "-n"], input=blocks[0], capture_output=True, text=True, timeout=10, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
