"""A process that stores two versions, and may be killed at a fault point of the second. For test_crashes.py."""

from __future__ import annotations

import logging
import os
import resource
import signal

from tests.unit.store.stored import RUN, StoringTrainer, change, large_state, small_state

from weightsync import failpoints
from weightsync.config import Secret
from weightsync.model import Version
from weightsync.protocol.messages import Body, Done
from weightsync.protocol.store_messages import ManifestStored, SignedManifest, StorePart
from weightsync.store.catalog import collect_garbage
from weightsync.store.signing import SigningKey
from weightsync.store.writer import StoreWriter

SECONDS = 60.0


class Signing:
    """A trainer of one rank with its writer, and what the coordinator does for it."""

    def __init__(self, folder: str, secret: Secret, size: str) -> None:
        self.trainer = StoringTrainer(folder, small_state() if size == "small" else large_state())
        self.trainer.key = SigningKey(secret)
        self.rank = self.trainer.ranks[0]
        self.writer = StoreWriter(self.rank.objects, self.trainer.store, 0, self.answer, SECONDS, None)
        self.told: list[ManifestStored] = []

    def answer(self, body: Body, seconds: float) -> Body:
        if isinstance(body, StorePart):
            described = self.trainer.described(self.version, self.totals, [body.chain])
            return SignedManifest(self.trainer.key.signed(described), self.trainer.key.public)
        assert isinstance(body, ManifestStored)
        self.told.append(body)
        return Done()

    def publish(self, number: int) -> Version:
        self.version, self.totals = self.trainer.place(number)
        self.writer.store(self.version, None, self.rank.published())
        assert self.writer.wait(SECONDS)
        return self.version


class ManifestFirst(Signing):
    """A mutant: the manifest of a version is there before its object."""

    def publish(self, number: int) -> Version:
        put, size = self.trainer.store.put, self.trainer.store.size
        written: list[tuple[str, list[bytes]]] = []
        self.trainer.store.put = lambda path, parts: written.append((path, list(parts)))  # type: ignore[method-assign]
        self.trainer.store.size = lambda path: sum(map(len, dict(written).get(path, ()))) or size(path)  # type: ignore[method-assign]
        version = super().publish(number)
        self.trainer.store.put, self.trainer.store.size = put, size  # type: ignore[method-assign]
        for path, parts in written:
            put(path, parts)
        return version


def run(descriptors: list[int], arguments: list[str]) -> None:
    """What a process does that a fork server made."""
    folder, secret, size, point, *mutant = arguments
    for number in (1, 2):
        os.dup2(descriptors[0], number)
    os.close(descriptors[0])
    logging.basicConfig(level="WARNING", format="%(message)s")
    signing = (ManifestFirst if mutant else Signing)(folder, Secret(secret), size)
    signing.publish(0)
    change(signing.trainer.state, 0.2, 1)
    if point == "full":  # no file can be larger than this: as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, 20 << 20))
    else:
        failpoints.install(lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == point else None)
    signing.publish(1)
    collect_garbage(signing.trainer.store, RUN, signing.trainer.key.public, 1, grace=0)
    assert signing.writer.last is not None
    print(f"ended after {signing.writer.last.number}", flush=True)
