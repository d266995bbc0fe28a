"""Adapters that an engine could not drop, that were staged for an earlier base, and numbers that overflow on the way."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from tests.integration.rounds.test_adapters import Fleet, Made, close, gate, made
from tests.integration.rounds.test_rounds import Joined
from tests.integration.server.service_support import free_port

from weightsync import failpoints
from weightsync.config import Secret, ServerSettings
from weightsync.errors import ConfigurationError, RoundFailed, VersionError
from weightsync.server.server import BackgroundServer

__all__ = ["gate", "made"]


def test_what_could_not_be_dropped_is_known_again_when_its_rank_reconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank had forgotten it before the engine failed to drop it, so it kept its slot for ever."""
    settings = ServerSettings.load({"WEIGHTSYNC_REQUIRE": "0"}, port=free_port(), run="kept", token=Secret("t" * 20))
    with ExitStack() as owned:
        with BackgroundServer(settings) as server:
            fleet = Fleet(Joined(server, owned), owned)
            fleet.adapters.publish("alice/math", 5)
            with monkeypatch.context() as patched:
                patched.setattr(fleet.modules[0], "drop_lora", lambda label: 1 / 0)
                with pytest.raises(RoundFailed, match="division by zero"):
                    fleet.adapters.retire("alice/math", keep=0)
        with BackgroundServer(settings) as server:
            fleet.server = server
            assert fleet.wait_for(lambda: fleet.names() == ["alice/math@5"])
            assert fleet.adapters.retire("alice/math", keep=0) == ("alice/math@5",)
            assert not fleet.modules[0].loras()


def test_an_adapter_that_could_not_be_refused_is_refused_before_the_engine_serves_again(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was forgotten, and served with the next base."""
    fleet = made(on_base_update="refuse")
    fleet.adapters.publish("alice/math", 1)
    own = fleet.modules[0].drop_lora
    with monkeypatch.context() as patched:
        patched.setattr(fleet.modules[0], "drop_lora", lambda label: 1 / 0)
        assert fleet.trainer.publish(1).missed
        patched.setattr(fleet.modules[0], "drop_lora", own)
        assert not fleet.trainer.publish(2).missed
    with pytest.raises(VersionError, match="does not serve alice/math"):
        fleet.answer("alice/math")


def test_what_overflows_as_it_is_converted_is_not_published(made: Made) -> None:
    fleet = made(dtype=torch.float16)
    fleet.tensors["0.lora_B.weight"][3, 1] = 1e5
    with pytest.raises(ConfigurationError, match=r"0\.lora_B\.weight holds NaN or infinity as float16"):
        fleet.adapters.publish("alice/math", 1)
    fleet.tensors["0.lora_B.weight"][3, 1] = 6e4
    assert fleet.adapters.publish("alice/math", 1).ok


@pytest.mark.parametrize("point", ["staged", "register"])
@pytest.mark.parametrize("policy", ["keep", "refuse"])
def test_a_base_that_is_updated_while_an_adapter_is_staged(made: Made, gate: None, point: str, policy: str) -> None:
    fleet = made(on_base_update=policy)

    def update(name: str) -> None:
        if name == f"engine.lora.{point}":
            failpoints.install(lambda name: None)
            with torch.no_grad():
                for parameter in fleet.base.parameters():
                    parameter.mul_(1.5)
            fleet.trainer.publish(1)

    failpoints.install(update)
    [replica] = fleet.adapters.publish("alice/math", 1).replicas
    assert replica.version is None and "and this engine holds version" in str(replica.error), "it was staged for another base"
    if policy == "keep":  # and is brought to the later one then
        assert fleet.wait_for(lambda: fleet.names() == ["alice/math@1"])
        assert close(fleet.answer("alice/math")[1], fleet.right(fleet.tensors))
    else:
        assert fleet.wait_for(lambda: not fleet.modules[0].loras()) and fleet.names() == []
    assert fleet.adapters.publish("alice/math", 2).ok
    assert close(fleet.answer("alice/math@2")[1], fleet.right(fleet.tensors))
