"""The oracle of adapters: who names a version gets exactly that version's bytes, on a base that it is for, or an error."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from tests.simulation.threads import Thread, threads

from weightsync.coordinator.loras import held_by
from weightsync.engines.module_loras import ModuleLoras
from weightsync.errors import VersionError
from weightsync.model import Box, Manifest, TensorSpec, Version
from weightsync.model.lora import PREFIX, LoraSlots, adapter_label
from weightsync.tensors.shards import Shard

if TYPE_CHECKING:
    from tests.simulation.ranks import EngineProcess
    from tests.simulation.world import World

__all__ = ["LORA", "SPOILED", "LoraMemory", "Loras", "Published"]

LORA = Manifest(TensorSpec(f"{PREFIX}0.lora_{matrix}.weight", shape, "float32") for matrix, shape in (("A", (2, 4)), ("B", (6, 2))))
SPOILED = "spoiled by the engine"
_SLOTS = 4
_ELEMENTS = sum(spec.size for spec in LORA)


@functools.lru_cache(maxsize=4096)
def _matrices(content: int, salt: int) -> bytes:
    draw = random.Random(f"{content} {salt}")
    return np.array([draw.randrange(1 << 20) for _ in range(_ELEMENTS)], np.float32).tobytes()


class LoraMemory:
    """One rank's rows of the matrices of an adapter, as :class:`tests.simulation.weights.Memory` holds parameters."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._whole = torch.zeros(_ELEMENTS)
        self.shards = []
        first = 0
        for spec in LORA:
            tensor, first = self._whole[first : first + spec.size].view(spec.shape), first + spec.size
            start, stop = spec.shape[0] * rank // ranks, spec.shape[0] * (rank + 1) // ranks
            self.shards.append(Shard(spec.name, spec.shape, Box((start, 0), (stop, spec.shape[1])), tensor[start:stop]))

    def fill(self, content: int, salt: int) -> None:
        """Make them those of ``content``."""
        self._whole.copy_(torch.from_numpy(np.frombuffer(_matrices(content, salt), np.float32).copy()))


@dataclass(frozen=True)
class Published:
    """What somebody tried to publish."""

    name: str
    base: Version
    refuses: bool
    """Whether it is for that base only."""


class Loras:
    """What was published, what engines hold of it, and who is asked. Nothing happens here unless adapters are ``taken``."""

    def __init__(self, world: World, taken: bool) -> None:
        self.taken, self._world = taken, world
        self.published: dict[int, Published] = {}
        """By content."""
        self.contents: dict[str, int] = {}
        """What each label means, which never changes."""
        self._digests: dict[str, str] = {}
        self._known: dict[bytes, int] = {}
        self._staged: dict[tuple[str, str, int], int | None] = {}
        """What each rank of a replica staged last as a label."""

    def of_an_engine(self) -> ModuleLoras | None:
        """What a new engine rank holds its adapters in."""
        return ModuleLoras(torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False)), LoraSlots(_SLOTS, 8)) if self.taken else None

    def publishes(self, content: int, published: Published) -> None:
        """Somebody is about to publish it."""
        self.published[content] = published
        self._known[_matrices(content, self._world.salt)] = content

    def _content(self, engine: EngineProcess, label: str) -> int | None:
        held = None if engine.loras is None else engine.loras._held.get(label)
        if held is None:
            return None
        a, b, _ = held.pairs["0"]
        return self._known.get(a.numpy().tobytes() + b.numpy().tobytes())

    def staged(self, engine: EngineProcess, label: str) -> None:
        """A rank has made its copy, which nobody sees."""
        self._staged[engine.name, label, engine.rank] = self._content(engine, label)

    def registered(self, engine: EngineProcess, version: Version) -> None:
        """Requests may name it at this rank from now on: so all ranks of the replica have staged just that."""
        world, label = self._world, adapter_label(version.run, version.number)
        content = self._content(engine, label)
        meant = self.contents.setdefault(label, -1 if content is None else content)
        ranks = [self._staged.get((engine.name, label, rank)) for rank in range(engine.ranks)]
        if content is None or content != meant or any(other != content for other in ranks):
            world.violated("mislabelled", f"{engine} serves {label} as {content}, which means {meant}; its replica staged {ranks}")
        elif self.published[content].name != version.run:
            world.violated("mislabelled", f"{engine} serves {label}, which is of {self.published[content]}")
        if self._digests.setdefault(label, version.digest) != version.digest:
            world.violated("mislabelled", f"{label} has digests {self._digests[label]} and {version.digest}")
        self.look(engine)
        world.seen["adapter registered"] += 1

    def visible(self, engine: EngineProcess) -> set[str]:
        """Labels that a request may name at this rank."""
        held = {} if engine.loras is None else engine.loras._held
        return {label for label, one in held.items() if one.version is not None and not one.dropped}

    def look(self, engine: EngineProcess) -> None:
        """It generates, or has something new to generate with: what it serves must be for the base that it has."""
        if not self.taken or not engine.generating or engine.label is None:
            return
        for label in self.visible(engine):
            published = self.published.get(self.contents[label])
            if published is None:
                continue  # said already
            has = engine.label
            if has != published.base and (published.refuses or has.order < published.base.order):
                self._world.violated("mislabelled", f"{engine} serves {label} on {has}, and it is for {published}")

    def taken_over(self, engine: EngineProcess) -> None:
        """Another driver writes the base weights of this rank: nothing that refuses other weights is served any more."""

        def overwrite() -> None:
            engine.role.session._taken()
            engine.role.loras.base_changed(None)
            for label in self.visible(engine):
                if self.published[self.contents[label]].refuses:
                    self._world.violated("mislabelled", f"{engine} was overwritten, and serves {label}")

        Thread(overwrite, f"{engine.member} other driver", owner=engine).start()

    def ask(self, engine: EngineProcess, name: str, seconds: float) -> None:
        """A request that names an adapter, or a version of it, arrives at this rank and runs for so long."""

        def answer() -> None:
            held = engine.loras
            if held is None:
                return
            try:
                with held.using(name) as version:
                    label = adapter_label(version.run, version.number)
                    if name not in (version.run, label):
                        self._world.violated("mislabelled", f"{engine} answers a request for {name} by {label}")
                    for _ in range(2):
                        if self._content(engine, label) != self.contents[label]:
                            self._world.violated("mislabelled", f"{engine} answers as {label} with other bytes")
                        threads().sleep(seconds)
                    self._world.seen["request for an adapter answered"] += 1
            except VersionError:
                self._world.seen["request for an adapter refused"] += 1

        Thread(answer, f"{engine.member} request", owner=engine).start()

    def check_quiet(self) -> None:
        """Nothing runs: ranks serve what the coordinator says, of which every rank of a replica has all, and hold little else."""
        world = self._world
        if not self.taken or world.coordinator is None:
            return
        control = world.coordinator.coordinator
        for engine in world.engines.values():
            replica = control._members.replicas.get(engine.name)
            if engine.loras is None or not engine.alive or replica is None or not replica.complete:
                continue
            known = held_by(replica).keys()
            visible, reported = self.visible(engine), engine.role.loras._served.keys()
            if not visible == known == reported:
                world.violated("left", f"{engine} serves {sorted(visible)}, reports {sorted(reported)}; known {sorted(known)}")
            if len(engine.loras._held.keys() - visible) > 1:
                world.violated("left", f"{engine} holds {sorted(engine.loras._held)} and serves {sorted(visible)}")
