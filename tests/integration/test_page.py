"""The status page in a real browser: the link that ``weightsync token`` prints logs in, and leaves the token in no address."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.integration.browser import Page, check_accessibility, check_width, page
from tests.integration.service_support import engine_hello, joined, trainer_hello
from tests.integration.test_sight import SlowAdapter, publish

from weightsync.config import ClientSettings, Secret, ServerSettings
from weightsync.protocol.messages import Publish
from weightsync.protocol.tokens import login_url
from weightsync.server.page import HTML
from weightsync.server.server import BackgroundServer

__all__ = ["page"]

pytestmark = pytest.mark.timeout(180)


def text_with(page: Page, words: str) -> str:
    """The page's text once it contains ``words``."""
    page.get_by_text(words).first.wait_for()
    return str(page.inner_text("body"))


def test_the_link_logs_in_and_the_page_follows_what_happens(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with BackgroundServer(ServerSettings(port=0, run="run")) as server:
        page.goto(server.url)
        assert "weightsync token" in text_with(page, "This coordinator needs its token.")
        check_accessibility(page)
        page.goto(login_url(server.address, Secret(server.token)))  # in the same tab: only the fragment changes
        assert "no version can be seeded" in text_with(page, "run run")
        assert "needs its token" not in page.inner_text("body")
        assert server.token not in page.evaluate("location.href + JSON.stringify(history.state)")
        settings = ClientSettings(coordinator=server.address)
        with joined(settings, engine_hello("mine-0")), joined(settings, trainer_hello()) as trainer:
            trainer.link.call(Publish(3), 20)
            shown = text_with(page, "16 B")
            assert re.search(r"mine-0\s+loaded\s+3\s+0\s+\d+ s\s+[0-9a-f]{16}\s+1/1", shown)
            assert re.search(r"\d+:\d\d:\d\d( [AP]M)?\s+1\s+3\s+ok\s+16 B", shown)
            check_accessibility(page)
        page.locator("#replicas .left").wait_for()
        shown = page.inner_text("body")
        assert re.search(r"mine-0\s+left\s", shown), "it was closed on purpose, which is no error"
        assert "code 1005" not in shown
        page.goto(server.url + "/")  # a reload of the same tab: the token is kept in the tab's session storage
        text_with(page, "run run")
        page.goto(server.url + "/#token=wrong")
        text_with(page, "This coordinator needs its token.")


def test_the_page_names_the_slow_rank_fits_any_screen_and_is_accessible(page: Page) -> None:
    assert len(HTML.encode()) < 200_000
    with BackgroundServer(ServerSettings(port=0, run="run")) as server:
        page.goto(login_url(server.address, Secret(server.token)))
        text_with(page, "No round yet.")
        publish(server, {"a": [SlowAdapter()], "b": [SlowAdapter(), SlowAdapter("flush")]}, rounds=2)
        page.wait_for_function(
            "document.body.innerText.includes('Round 2,') && document.querySelectorAll('#rounds tr').length === 2"
        )
        shown = page.inner_text("body")
        assert re.search(r"Round 2, .*Slowest: flush at b/1, \d+ ms", shown)
        assert len(re.findall(r"flush at b/1", shown)) == 3, "of the trace that is shown, and of each round"
        lanes = page.locator("#waterfall th").all_text_contents()
        assert set(lanes) == {"coordinator", "trainer/0", "a/0", "b/0", "b/1"}
        label = page.locator("#waterfall tr", has_text="b/1").locator(".lane").get_attribute("aria-label")
        assert re.search(r"flush \d{3} ms", str(label))
        assert page.locator("#chart canvas").count() == 1
        page.locator("button.round").last.click()
        text_with(page, "Round 1,")
        check_width(page)
        check_accessibility(page)
        page.evaluate("document.querySelector('main').append(document.createElement('img'))")
        with pytest.raises(AssertionError, match="image-alt"):
            check_accessibility(page)
