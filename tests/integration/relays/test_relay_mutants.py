"""Bugs planted in a relay: a region whose store is tampered with must show each of them, and nothing without a bug."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import msgpack, structs
from tests.integration.relays.test_relayed_stores import SECONDS, Far, change, following, model
from tests.simulation.installation import replaced
from tests.simulation.mutants_store import STORE_MUTANTS
from tests.simulation.object_store import SIGNED_BODY
from tests.unit.store.stored import RUN, StoringTrainer

import weightsync
from weightsync.deadline import Deadline
from weightsync.model.stored import VersionManifest
from weightsync.planning.coverage import Coverage
from weightsync.store.catalog import manifest_path
from weightsync.store.signing import SigningKey, new_secret
from weightsync.trainer.trainer import Trainer
from weightsync_relay import relay as relay_module
from weightsync_relay.kept_region import KeptRegion
from weightsync_relay.relay import _RelayTrainer

pytestmark = pytest.mark.usefixtures("runtime")

_FORGED = 5


class Tampered:
    """A region with a relay, and what went wrong in it while its store was tampered with."""

    def __init__(self, folder: Path, owned: ExitStack) -> None:
        self.folder, self.far, self.state = folder, Far(owned), model().state_dict()
        self.trainer = StoringTrainer(folder, self.state, ranks=2)
        self.published: dict[weightsync.Version, dict[str, torch.Tensor]] = {}
        self.wrong: list[str] = []

    def run(self) -> list[str]:
        with following(self.trainer, self.far):
            first = self._publish(0)
            self._comes(first)
            self._forged(first)
            for number in (1, 2):  # the chain gets longer
                self._comes(self._publish(number))
            self._changed(3)
        return self.wrong

    def _publish(self, number: int) -> weightsync.Version:
        change(self.state)
        version = self.trainer.publish(number)
        self.published[version] = {name: tensor.clone() for name, tensor in self.state.items()}
        return version

    def _forged(self, version: weightsync.Version) -> None:
        """A later version that another key signed."""
        genuine, forged = (self.folder / manifest_path(RUN, (1, number)) for number in (version.number, _FORGED))
        body = msgpack.decode(genuine.read_bytes()[SIGNED_BODY:], type=VersionManifest)
        later = weightsync.Version(RUN, _FORGED, version.manifest, version.digest, version.epoch)
        forged.write_bytes(SigningKey(new_secret()).signed(structs.replace(body, version=later)))
        self._until(lambda: self._failing or self.far.engine.serving != version)
        self._look()
        forged.unlink()
        self._until(lambda: not self._failing)

    def _changed(self, number: int) -> None:
        """An object of the next version is changed, and put back."""
        change(self.state)
        put, kept = self.trainer.store.put, dict[str, bytes]()

        def wrong(path: str, parts: Any) -> None:
            kept[path] = b"".join(parts)
            put(path, [kept[path][:-1] + bytes([kept[path][-1] ^ 1])])

        self.trainer.store.put = wrong  # type: ignore[method-assign]
        version = self._publish(number)
        self._until(lambda: self._failing or self.far.engine.serving == version)
        self._look()
        for path, data in kept.items():
            (self.folder / path).write_bytes(data)
        self._until(lambda: self.far.engine.serving == version)
        self._look()

    def _comes(self, version: weightsync.Version) -> None:
        self._until(lambda: self._failing or self.far.engine.serving == version)
        if self.far.engine.serving != version:
            self.wrong.append(f"{version} does not come")
        self._look()

    def _look(self) -> None:
        serving, module = self.far.engine.serving, self.far.served
        if serving is not None and serving not in self.published:
            self.wrong.append(f"{serving} is served, which nobody published")
        elif serving is not None and not _same(module, self.published[serving]):
            self.wrong.append(f"{serving} is served with other bytes")

    @property
    def _failing(self) -> bool:
        return self.far.server.coordinator.gauges().relay_failing

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = Deadline(SECONDS)
        while not self.wrong and not condition():
            threading.Event().wait(min(0.02, deadline.remaining("the relay's next step")))


def _same(served: torch.nn.Module, trained: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, trained[name]) for name, tensor in served.state_dict().items())


def _delta_left_out(*others: tuple[Any, str, Any]) -> AbstractContextManager[None]:
    update = KeptRegion.update

    def short(region: KeptRegion, chain: tuple[Any, ...], deadline: Deadline) -> None:
        update(region, chain[:-1] or chain, deadline)
        region.chain = chain

    return replaced((KeptRegion, "update", short), *others)


def _nothing_compared() -> AbstractContextManager[None]:
    return _delta_left_out((Coverage, "check", lambda *_: None), (_RelayTrainer, "_ask", Trainer._ask))


MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "a version is published whoever signed its manifest": STORE_MUTANTS["a stored manifest is believed whoever signed it"],
    "a chain is applied with one delta left out": _delta_left_out,
    "and what came of it is compared with no digest": _nothing_compared,
}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "_LONGEST_PAUSE", 0.1)


def test_nothing_is_wrong_without_a_bug(tmp_path: Path) -> None:
    with ExitStack() as owned:
        assert Tampered(tmp_path / "store", owned).run() == []


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_noticed(tmp_path: Path, name: str) -> None:
    with MUTANTS[name](), ExitStack() as owned:
        assert Tampered(tmp_path / "store", owned).run()
