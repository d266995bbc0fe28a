"""Numbers of adapters' versions after a restart of the coordinator, of which the engines alone know."""

from __future__ import annotations

from contextlib import ExitStack

from tests.integration.rounds.test_adapters import Fleet, lora
from tests.integration.rounds.test_rounds import Joined
from tests.integration.server.service_support import free_port

from weightsync.config import Secret, ServerSettings
from weightsync.server.server import BackgroundServer


def test_an_engine_knows_the_number_of_what_it_served_and_dropped() -> None:
    settings = ServerSettings.load({"WEIGHTSYNC_REQUIRE": "0"}, port=free_port(), run="kept", token=Secret("t" * 20))
    with ExitStack() as owned:
        with BackgroundServer(settings) as server:
            fleet = Fleet(Joined(server, owned), owned)
            fleet.adapters.publish("alice/math", 5)
            assert fleet.adapters.retire("alice/math", keep=0) == ("alice/math@5",)
            fleet.adapters.publish("bob/code", 6)
        with BackgroundServer(settings) as server:
            fleet.server = server
            assert fleet.wait_for(lambda: fleet.names() == ["bob/code@6"])
            with fleet.elsewhere(fleet.trainer.version, lora(6)) as other:  # a publisher that knows no number
                assert other.publish("alice/math").version.number == 6
