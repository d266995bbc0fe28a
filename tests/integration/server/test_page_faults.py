"""The status page during the demo under faults: what it shows is what the coordinator says, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.integration.examples.test_demo import Run, start
from tests.integration.examples.test_demo_kill import KILL, CoordinatorOfDemo, token_file
from tests.integration.server.browser import Page, PageTimeout, browser, check_accessibility, check_width, page, replica_rows

import weightsync
from weightsync.config import Address, Secret
from weightsync.protocol.tokens import login_url

__all__ = ["browser", "page", "start", "token_file"]

pytestmark = [pytest.mark.slow, pytest.mark.rare, pytest.mark.timeout(900)]

SLOW = 1.0
TRIES = 10
SHOWS = """([rows, alerts]) => JSON.stringify(rows) === JSON.stringify([...document.querySelectorAll('#replicas tr')].map((row) => {
    const [name, state, version, behind, age, verified, pause, ranks] = [...row.cells].map((cell) => cell.textContent.trim());
    return [name, state, version, behind, verified, ranks.split(" ")[0]];
}).sort((a, b) => a[0] < b[0] ? -1 : 1)) && [...document.querySelectorAll('.alert')].length === alerts.length &&
    [...document.querySelectorAll('.alert')].every((shown, index) => shown.textContent.startsWith(alerts[index]))"""


class SlowFlush(weightsync.ModuleAdapter):
    """An engine that takes a second to drop its caches."""

    def flush(self) -> bool:
        threading.Event().wait(SLOW)
        return super().flush()


class Watched:
    """The demo's coordinator, its page, and what both say."""

    def __init__(self, page: Page, url: str, token: str) -> None:
        self.page, self.url = page, url
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, trust_env=False)
        page.goto(login_url(Address.parse(url), Secret(token)))

    def ask(self, path: str) -> Any:
        answer = self._http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def states(self) -> dict[str, str]:
        """States by replica, once the page shows the very status that the coordinator tells."""
        for _ in range(TRIES):  # the run continues
            status = self.ask("/v1/status")
            rows, alerts = replica_rows(status), [alert["text"] for alert in status["alerts"]]
            try:
                self.page.wait_for_function(SHOWS, arg=[rows, alerts], timeout=1000)
            except PageTimeout:
                continue
            return {row[0]: row[1] for row in rows}
        raise AssertionError(f"the page never showed what the coordinator says: {rows} {alerts}\n{self.page.inner_text('main')}")

    def close(self) -> None:
        self._http.close()


@pytest.fixture
def run(start: Callable[..., Run], token_file: Path) -> Run:
    return start(*KILL, "--token-file", str(token_file))


@pytest.fixture
def watched(run: Run, page: Page, token_file: Path) -> Iterator[Watched]:
    found = Watched(page, CoordinatorOfDemo(run, token_file).url, token_file.read_text())
    yield found
    found.close()


def test_the_page_shows_what_the_coordinator_says_of_a_killed_a_refused_and_a_slow_replica(
    run: Run, page: Page, watched: Watched, token_file: Path
) -> None:
    from examples.demo.models import build_model

    url, token = watched.url, token_file.read_text()
    with (
        weightsync.Engine(weightsync.ModuleAdapter(torch.nn.Linear(3, 3)), "refused-0", url, token=token),
        weightsync.Engine(SlowFlush(build_model("llama", tied=True, seed=3)), "slow-0", url, token=token),
    ):
        run.read_until("killing replica-1")
        run.read_until("round 2  version 2")
        assert watched.states() == {"refused-0": "refused", "replica-0": "serving", "replica-1": "lost", "slow-0": "serving"}
        assert "Restart it. It catches up by itself." in page.locator(".alert", has_text="replica-1/0 disappeared").inner_text()
        assert "Correct the engine's model" in page.locator(".alert", has_text="refused-0 was refused").inner_text()
        assert "flush at slow-0/0" in page.locator("#rounds tr").first.inner_text()
        check_width(page)
        check_accessibility(page)

        run.read_until("killing trainer-1")
        run.read_until("  replica-1  out of service")
        assert watched.states()["replica-1"] == "out of service"
        assert "trainer ranks 0/" in page.inner_text("#tiles")

        run.read_until("killing coordinator")
        page.get_by_text("The coordinator does not answer").wait_for()
        run.read_until("coordinator is back")
        states = watched.states()
        assert (states["replica-0"], states["replica-1"], states["refused-0"]) == ("serving", "serving", "refused")
        rounds = page.locator("#rounds tr").all_inner_texts()
        assert any("2@3" in line for line in rounds), "rounds of the coordinator that was killed"
        assert page.locator("#rounds tr.error").count() == sum(not one["ok"] for one in watched.ask("/v1/rounds?last=20"))
        check_accessibility(page)
    assert run.process.stderr is not None
    errors = run.process.stderr.read()
    assert run.process.wait(60) == 0, errors
    run.check_nothing_is_left()
