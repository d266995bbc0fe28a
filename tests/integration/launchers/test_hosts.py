"""A run over several hosts (network namespaces): found by name, over TLS, launched by torchrun and Slurm, cut off and healed."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.hosts import Hosts, obstacle
from tests.integration.ray.ray_actors import change, mark, model

trustme = pytest.importorskip("trustme", reason="needs trustme: pip install '.[test]'")

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "0123456789abcdefghijklmnopqrstuv"
STARTED = 60.0
"""Seconds for processes that import torch to begin, on a busy machine."""
SOON = 20.0
EGRESS = 24 << 20
TORCHRUN = "torchrun"
SLURM = "slurm"


class Party:
    """A process on a host, and the events that it writes."""

    def __init__(self, hosts: Hosts, host: str, environment: Mapping[str, str], *command: str) -> None:
        self.name = host
        self._process = subprocess.Popen(
            hosts.on(host, *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=ROOT,
            env={**environment, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"},
        )
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._following = threading.Thread(target=self._follow, daemon=True)
        self._following.start()

    def _follow(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith("{"):
                self._events.put(json.loads(line))
        self._events.put({"event": "ended"})

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def take(self, timeout: float = SOON) -> dict[str, Any]:
        """Return the next event."""
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            pytest.fail(f"{self.name} was silent for {timeout:g} s")

    def expect(self, event: str, timeout: float = SOON) -> dict[str, Any]:
        """Return the next event, which must be this one."""
        happened = self.take(timeout)
        assert happened["event"] == event, f"{self.name}: {happened}"
        return happened

    def end(self) -> None:
        """End its input, and the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(SOON) == 0, f"{self.name} ended with {self._process.returncode}"

    def kill(self) -> None:
        """End what is left of it: a launcher has processes of its own."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._following.join(SOON)
        with self._process:
            pass


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if reason := obstacle():
        pytest.skip(reason)
    with Hosts.made("head", "train-0", "train-1", "serve-0", "serve-1", egress=EGRESS) as made:
        yield made


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What every process of the run has: where the coordinator is, its certificate's authority, and the token."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("head").private_key_and_cert_chain_pem.write_to_path(tmp_path / "head.pem")
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WEIGHTSYNC_", "SLURM_"))}
    return {
        **clean,
        "WEIGHTSYNC_COORDINATOR": "https://head:7400",
        "WEIGHTSYNC_CA_FILE": str(tmp_path / "ca.pem"),
        "WEIGHTSYNC_TOKEN_FILE": str(tmp_path / "token"),
        "GLOO_SOCKET_IFNAME": Hosts.interface,
    }


def trainer_rank(hosts: Hosts, launcher: str, number: int, environment: Mapping[str, str]) -> Party:
    """One of two trainer ranks, as ``launcher`` starts it on a host of its own."""
    host = f"train-{number}"
    if launcher == SLURM:
        variables = {"SLURM_STEP_ID": "0", "SLURM_PROCID": str(number), "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
        rendezvous = {"MASTER_ADDR": "train-0", "MASTER_PORT": "29500"}
        command = [sys.executable, "-m", "tests.integration.launchers.host_ranks", "train"]
        return Party(hosts, host, {**environment, **variables, **rendezvous}, *command)
    nodes = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", "train-0", "--master-port", "29500"]
    ranks = ["-m", "tests.integration.launchers.host_ranks", "train"]
    command = ["-m", "torch.distributed.run", *nodes, "--nproc-per-node", "1", *ranks]
    return Party(hosts, host, environment, sys.executable, *command)


def trained(steps: int) -> list[str]:
    """What a replica holds after so many steps."""
    reference = model(5)
    for number in range(1, steps + 1):
        change(reference, number)
    return mark([*reference.parameters()])


@pytest.mark.rare
@pytest.mark.parametrize("launcher", [TORCHRUN, SLURM])
def test_a_run_over_five_hosts(hosts: Hosts, environment: dict[str, str], tmp_path: Path, launcher: str) -> None:
    """Two FSDP2 ranks publish to two replicas, with a coordinator on a fifth host. One replica's host is cut off and comes back."""
    state = [f"--{what}={tmp_path / where}" for what, where in (("tls-cert", "head.pem"), ("tls-key", "head.pem"))]
    with ExitStack() as owned:

        def started(party: Party) -> Party:
            owned.callback(party.kill)
            return party

        serve = [sys.executable, "-m", "weightsync", "serve", "--host", "head", "--require", "1", "--state-dir", str(tmp_path)]
        head = started(Party(hosts, "head", {**environment, "WEIGHTSYNC_HEARTBEAT": "1"}, *serve, *state))
        served = [
            started(
                Party(
                    hosts,
                    f"serve-{number}",
                    {**environment, "WEIGHTSYNC_REPLICA": f"policy-{number}"},
                    sys.executable,
                    "-m",
                    "tests.integration.launchers.host_ranks",
                    "serve",
                )
            )
            for number in range(2)
        ]
        trainers = [started(trainer_rank(hosts, launcher, number, environment)) for number in range(2)]
        for party in (*served, *trainers):
            party.expect("ready", STARTED)

        trainers[0].tell("30")
        for rank in trainers:
            replicas = rank.expect("published", 30)["replicas"]
            assert replicas == {f"policy-{number}": ["loaded", 1, "installed", "tcp"] for number in range(2)}
        for engine in served:
            engine.expect("paused")
            assert engine.expect("serving") == {"event": "serving", "version": 1, "marks": trained(1)}

        trainers[0].tell("10")
        for engine in served:
            engine.expect("paused")
        hosts.cut("serve-1")
        for rank in trainers:
            replicas = rank.expect("published", 30)["replicas"]
            assert replicas["policy-0"][:3] == ["loaded", 2, "installed"]
            assert replicas["policy-1"][:2] in (["dirty", None], ["lost", None]), replicas
        assert served[0].expect("serving")["marks"] == trained(2)

        hosts.heal("serve-1")  # joins again, and is given version 2 without another publication, unless it had just got all of it
        while served[1].take(STARTED)["event"] != "serving":
            pass
        trainers[0].tell("30")  # waits until both replicas are ready
        for rank in trainers:
            replicas = rank.expect("published", STARTED)["replicas"]
            assert replicas == {f"policy-{number}": ["loaded", 3, "installed", "tcp"] for number in range(2)}
        for engine in served:
            while (last := engine.take())["version"] != 3:
                assert last["version"] is None or last["marks"] == trained(2)
            assert last["marks"] == trained(3)
        for party in (trainers[0], *served):
            party.end()
        trainers[1].end()
        head.kill()
