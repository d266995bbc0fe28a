"""A run over several hosts (network namespaces): found by name, over TLS, launched by torchrun and Slurm, cut off and healed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.hosts import Hosts, obstacle
from tests.integration.ray.ray_actors import change, mark, model
from tests.processes import ChildProcess

trustme = pytest.importorskip("trustme", reason="needs trustme: pip install '.[test]'")

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "0123456789abcdefghijklmnopqrstuv"
STARTED = 60.0
"""Seconds for processes that import torch to begin, on a busy machine."""
SOON = 20.0
EGRESS = 24 << 20
TORCHRUN = "torchrun"
SLURM = "slurm"
RANKS = "tests.integration.launchers.host_ranks"
TRAINER = ("-m", RANKS, "train")


class Party(ChildProcess):
    """A process on a host, and the events that it writes."""

    def __init__(self, hosts: Hosts, host: str, environment: Mapping[str, str], *arguments: object) -> None:
        super().__init__(*arguments, launcher=hosts.on(host), environment=environment, without=("WEIGHTSYNC_", "SLURM_"))
        self.name = host

    def take(self, timeout: float = SOON) -> dict[str, Any]:
        """Return the next event."""
        while not (line := self.line(timeout)).startswith("{"):
            pass
        event: dict[str, Any] = json.loads(line)
        return event

    def happens(self, event: str, timeout: float = SOON) -> dict[str, Any]:
        """Return the next event, which must be this one."""
        happened = self.take(timeout)
        assert happened["event"] == event, f"{self.name}: {happened}"
        return happened


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
    return {
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
        return Party(hosts, host, {**environment, **variables, **rendezvous}, *TRAINER)
    nodes = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", "train-0", "--master-port", "29500"]
    return Party(hosts, host, environment, "-m", "torch.distributed.run", *nodes, "--nproc-per-node", "1", *TRAINER)


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
        serve = ["-m", "weightsync", "serve", "--host", "head", "--require", "1", "--state-dir", tmp_path]
        head = owned.enter_context(Party(hosts, "head", {**environment, "WEIGHTSYNC_HEARTBEAT": "1"}, *serve, *state))
        names = [{"WEIGHTSYNC_REPLICA": f"policy-{number}"} for number in range(2)]
        served = [
            owned.enter_context(Party(hosts, f"serve-{number}", {**environment, **name}, "-m", RANKS, "serve"))
            for number, name in enumerate(names)
        ]
        trainers = [owned.enter_context(trainer_rank(hosts, launcher, number, environment)) for number in range(2)]
        for party in (*served, *trainers):
            party.happens("ready", STARTED)

        trainers[0].write("30")
        for rank in trainers:
            replicas = rank.happens("published", 30)["replicas"]
            assert replicas == {f"policy-{number}": ["loaded", 1, "installed", "tcp"] for number in range(2)}
        for engine in served:
            engine.happens("paused")
            assert engine.happens("serving") == {"event": "serving", "version": 1, "marks": trained(1)}

        trainers[0].write("10")
        for engine in served:
            engine.happens("paused")
        hosts.cut("serve-1")
        for rank in trainers:
            replicas = rank.happens("published", 30)["replicas"]
            assert replicas["policy-0"][:3] == ["loaded", 2, "installed"]
            assert replicas["policy-1"][:2] in (["dirty", None], ["lost", None]), replicas
        assert served[0].happens("serving")["marks"] == trained(2)

        hosts.heal("serve-1")  # joins again, and is given version 2 without another publication, unless it had just got all of it
        while served[1].take(STARTED)["event"] != "serving":
            pass
        trainers[0].write("30")  # waits until both replicas are ready
        for rank in trainers:
            replicas = rank.happens("published", STARTED)["replicas"]
            assert replicas == {f"policy-{number}": ["loaded", 3, "installed", "tcp"] for number in range(2)}
        for engine in served:
            while (last := engine.take())["version"] != 3:
                assert last["version"] is None or last["marks"] == trained(2)
            assert last["marks"] == trained(3)
        for party in (trainers[0], *served, trainers[1]):
            assert party.end(SOON) == 0
        head.kill()
