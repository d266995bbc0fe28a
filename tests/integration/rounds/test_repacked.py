"""An engine that changes what was written to it: results say so, and its memory is not taken for the version's again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from tests.integration.rounds.test_audits import metric
from tests.integration.rounds.test_rounds import Joined, Net, change

from weightsync.config import ServerSettings
from weightsync.coordinator.audits import Audits
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ConfigurationError, DeadlineExceeded
from weightsync.model import Version
from weightsync.server.server import BackgroundServer

SECONDS = 30.0


class Doubling(ModuleAdapter):
    """Computes with weights that are twice those of the checkpoint, in the same memory."""

    repacks = True

    def finish(self, version: Version) -> None:
        super().finish(version)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.mul_(2)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joined]:
    monkeypatch.setattr(Audits, "least_seconds", 0.2)
    monkeypatch.setattr("weightsync.coordinator.audits.random.random", lambda: 1.0)
    with BackgroundServer(ServerSettings.load({}, port=0, audit_share=1.0)) as server, ExitStack() as owned:
        yield Joined(server, owned)


def test_what_is_repacked_is_received_whole_and_never_compared_or_read_again(joined: Joined) -> None:
    source, target = Net(), Net()
    trainer = joined.trainer(source, deltas=True)
    engine = joined.engine(Doubling(target))
    for number in (1, 2, 3):
        change(source, number)
        [replica] = trainer.publish(number, timeout=SECONDS).replicas
        assert (replica.version, replica.delivery, replica.verified, replica.base) == (number, "direct", "received", None)
        pairs = zip(source.parameters(), target.parameters(), strict=True)
        assert all(torch.equal(2 * sent, held) for sent, held in pairs)
    with pytest.raises(DeadlineExceeded):
        engine.wait_for_version(4, timeout=1.0)
    assert metric(joined, "audit_failures_total") == metric(joined, "audit_seconds_count") == 0
    with pytest.raises(ConfigurationError, match="do not stay as they are written"):
        joined.engine(Doubling(Net()), "other", serve_weights=True)
