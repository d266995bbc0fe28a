"""A thousand rounds with replicas that come and go: memory, descriptors and threads stay flat, every version is verified."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.faults.campaign import Findings, spare_threads, warm_up
from tests.faults.leaks import Held, grown, held
from tests.faults.stage import Stage

from weightsync.errors import WeightSyncError

__all__ = ["soak"]

_WARM = 0.2  # of the rounds: caches and allocators have filled


def soak(stage: Stage, rounds: int, seed: int, found: Findings, say: Callable[[str], None]) -> None:
    """Publish ``rounds`` versions, every one verified and taken by all replicas that are there; note what grows."""
    draw = random.Random(seed)
    gone: set[str] = set()
    before: dict[str, Held] = {}
    warm_up(stage, found)
    for count in range(1, rounds + 1):
        if draw.random() < 0.1:
            name = draw.choice(("duo-1", "solo-0"))
            party = stage.parties[name]
            party.tell(do="join" if name in gone else "leave")
            party.hear(30.0)
            gone ^= {name}
        number, asked = stage.publish(20.0)
        answers = [party.hear(25.0) for party in asked]
        status = stage.status()
        complete = [replica for replica in status.replicas if not replica.missing]
        digest = None if status.version is None else status.version.digest
        wrong = [
            replica.name for replica in complete if (replica.state, replica.version, replica.digest) != ("loaded", number, digest)
        ]
        # Half a replica is missed by a round that needs all; one that was closed whole is not.
        failed = any(answer["error"] for answer in answers) and "duo-1" not in gone
        if complete and (wrong or failed):
            raise WeightSyncError(f"soak, seed {seed}, version {number}: {answers}, wrong: {wrong}; {stage.describe()}")
        if count >= _WARM * rounds and not before and not gone:
            before = {name: held(party.pid) for name, party in stage.parties.items()}
        if count % 100 == 0:
            say(f"soak: {count:,} of {rounds:,} rounds, {stage.tally.served:,} requests answered")
    for name in sorted(gone):
        stage.parties[name].tell(do="join")
        stage.parties[name].hear(30.0)
    stage.publish_well()
    for name, earlier in before.items():
        found.leaks += [
            f"soak: {name} {what}" for what in grown(earlier, stage.parties[name].pid, spare_threads=spare_threads(name))
        ]
