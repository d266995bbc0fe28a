"""A participant that wants harm: it has the workers' token, a credential of its own, and says whatever the protocol lets it say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tests.simulation.ranks import EngineProcess, SimulatedAdapter
from tests.simulation.threads import Thread, threads
from tests.simulation.training_program import ProgramTrainer, Step
from tests.simulation.weights import MANIFEST

from weightsync.engine.adapter import EngineAdapter
from weightsync.errors import WeightSyncError
from weightsync.model import FIRST_EPOCH, Version, fold
from weightsync.protocol.messages import Body, CannotPublish, Publish, WaitForReplicas
from weightsync.tensors.digest import COLUMNS, digest_box

if TYPE_CHECKING:
    from tests.simulation.people import PeopleWorld

__all__ = ["HARMS", "HostileEngine", "harm"]

CLAIM = "claims a version"
FORGE = "forges bytes of a digest"
LIE = "sends wrong digests"
CALLS = "calls what trainers call"
REVOKE = "revokes a rank"
ROUND = "asks for rounds"
PLACE = "takes the trainer's place"
SECOND = "takes a rank's place"
AS_ENGINE = (CLAIM, FORGE, LIE, CALLS)
HARMS = (*AS_ENGINE, REVOKE, ROUND, PLACE, SECOND)
"""What it does."""

_MANTISSA = 1 << 32
_TRIES = 400
_MOST_NUMBER, _MOST_EPOCH = (1 << 63) - 1, (1 << 31) - 1


def forged(true: torch.Tensor, wanted: torch.Tensor, spare: tuple[int, int] = (0, 1)) -> torch.Tensor | None:
    """``wanted`` with two words of its first row (float32) changed such that its digest is that of ``true``, if it can be."""
    shape, none = tuple(true.shape), [0] * true.dim()
    made = wanted.clone()
    words = made.view(torch.int32).view(shape[0], -1)
    words[0, list(spare)] = 0
    factor = (digest_box(_first_word(shape), shape, none) * pow(int(COLUMNS[0]), -1, 1 << 64)) % (1 << 64)
    lacking = (digest_box(true, shape, none) - digest_box(made, shape, none)) * pow(factor, -1, 1 << 64) % (1 << 64)
    a, b = (int(COLUMNS[index]) for index in spare)
    for carry in range(4):
        rest = lacking + (carry << 64)
        try:
            x = rest * pow(a, -1, b) % b
        except ValueError:
            return None
        y = (rest - a * x) // b
        if x < _MANTISSA and 0 <= y < _MANTISSA:
            words[0, list(spare)] = torch.from_numpy(np.array([x, y], np.uint32).view(np.int32))
            return made
    return None


def _first_word(shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.zeros(shape)
    tensor.view(torch.int32).view(-1)[0] = 1
    return tensor


class _Adapter(SimulatedAdapter):
    """Changes its own weights when it has been updated."""

    def resume(self) -> None:
        super().resume()
        if isinstance(self._process, HostileEngine):
            self._process.updated()


class HostileEngine(EngineProcess):
    """The real engine rank of a thief, alone in its replica, that does ``harm``."""

    def __init__(self, world: PeopleWorld, name: str, harm: str) -> None:
        self.harm, self._poison = harm, world.poison()
        super().__init__(world, name, 0, 1, "direct")
        if harm == CLAIM:
            self._claim(world)
        elif harm == CALLS:
            Thread(self._call, f"{self.member} harm", owner=self).start()

    def _make_adapter(self, direct: bool) -> EngineAdapter:
        return _Adapter(self, direct)

    def _claim(self, world: PeopleWorld) -> None:
        """Its first Hello says that it serves a version; its bytes have the digest that it says."""
        draw = world.draw
        self.memory.fill(self._poison, world.salt)
        digests = [digest_box(one.tensor, one.shape, [0] * len(one.shape)) for one in self.memory.shards]
        control = None if world.coordinator is None else world.coordinator.coordinator
        last = -1 if control is None else control._publications.last
        number = draw.choice((max(last, 0), last + 1, last + 1, last + 5, _MOST_NUMBER))
        epoch = draw.choice((FIRST_EPOCH, FIRST_EPOCH, FIRST_EPOCH + 1, _MOST_EPOCH))
        version = Version("simulated", number, MANIFEST.fingerprint, fold(np.array(digests, np.uint64)), epoch)
        world.trail.append(f"{world.loop.time():.4f} {self} claims {version}")
        self.role.session.serving = version
        self.refresh()

    def updated(self) -> None:
        """It was updated as everybody was."""
        if self.harm == LIE:
            self.lies = True
        elif self.harm == FORGE:
            embed, draw = self.memory.shards[0].tensor, self.world.random
            for _ in range(_TRIES):
                poison = torch.frombuffer(bytearray(draw.randbytes(embed.nbytes)), dtype=torch.float32).view(embed.shape)
                made = forged(embed, poison)
                if made is not None:
                    embed.copy_(made)
                    self.world.injected["bytes forged for a digest"] += 1
                    break

    def _call(self) -> None:
        draw = self.world.random
        while not self.role.session.closed and not self.world.calm:
            threads().sleep(draw.uniform(0.0, 3.0))
            number = draw.choice((None, 0, 7, (1 << 63) - 1))
            bodies: tuple[Body, ...] = (
                Publish(number, draw.randrange(4), None), CannotPublish(number, "LoadError", "no"), WaitForReplicas(1, ()),
            )  # fmt: skip
            try:
                self.link.call(draw.choice(bodies), draw.uniform(0.1, 2.0))
            except WeightSyncError as error:
                self.world.seen[f"harm refused: {type(error).__name__}"] += 1


class _Usurper(ProgramTrainer):
    """A trainer rank of the thief's."""

    def refused(self) -> None:
        """The coordinator does not take it: it gives up."""
        self.world.seen["usurper refused"] += 1
        self.crash()


def harm(world: PeopleWorld, kind: str) -> None:
    """Do ``kind`` now."""
    coordinator = world.coordinator
    world.injected[f"hostile: {kind}"] += 1
    world.trail.append(f"{world.loop.time():.4f} hostile: {kind}")
    if kind in AS_ENGINE:
        world.hostiles.append(HostileEngine(world, f"{world.hostile}{len(world.hostiles)}", kind))
    elif kind == SECOND:
        victim = world.draw.choice(list(world.engines.values()))
        world.impostor(victim)
    elif coordinator is None:
        return
    elif kind == ROUND:
        coordinator.spawn(_post(world, coordinator, "/v1/rounds", {"timeout": 5.0}))
    elif kind == REVOKE:
        member = world.draw.choice([*world.engines, *world.trainers])
        coordinator.spawn(_post(world, coordinator, "/v1/revocations", {"member": member}))
    elif kind == PLACE and all(member in coordinator.coordinator._members.trainers for member in world.trainers):
        for member in world.trainers:
            coordinator.spawn(_post(world, coordinator, "/v1/revocations", {"member": member}))
        world.loop.call_later(world.draw.uniform(0.0, 0.5), _usurp, world)


async def _post(world: PeopleWorld, coordinator: Any, path: str, body: dict[str, Any]) -> None:
    status = await coordinator.request("POST", path, json.dumps(body).encode())
    world.seen[f"hostile request: {status}"] += 1
    world.trail.append(f"{world.loop.time():.4f} hostile request: POST {path} {body}: {status}")


def _usurp(world: PeopleWorld) -> None:
    ranks, sharing = world.trainer_shape
    usurpers = [_Usurper(world, rank, ranks, sharing) for rank in range(ranks)]
    world.hostiles += usurpers
    step = Step(world.poison(), "in place", None, 25.0, False, {})
    for one in usurpers:
        one.perform([step], 0.2, lambda trainer, outcome: trainer.crash())
        world.loop.call_later(60.0, lambda one=one: one.crash() if one.alive else None)
