"""The server that TRL samples from, as far as weightsync asks it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.integration.trl.test_trl_transfer import RolloutServer


@pytest.fixture
def rollout() -> Iterator[RolloutServer]:
    server = RolloutServer()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(server.http.serve_forever, 0.02)
        yield server
        server.http.shutdown()
    server.http.server_close()
