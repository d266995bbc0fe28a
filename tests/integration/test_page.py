"""The status page in a real browser: the link that ``weightsync token`` prints logs in, and leaves the token in no address."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.service_support import engine_hello, joined, trainer_hello
from tests.integration.test_sight import SlowAdapter, publish
from websockets.sync.client import ClientConnection, connect

from weightsync.config import ClientSettings, Secret, ServerSettings
from weightsync.protocol.messages import Publish
from weightsync.protocol.tokens import login_url
from weightsync.server import page
from weightsync.server.server import BackgroundServer

BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian's package: chromium)")

SECONDS = 30
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--remote-debugging-port=0",
    "--disable-dev-shm-usage",
)


class Tab:
    """One tab, driven over the DevTools protocol."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters, **self._session}))
        while True:
            answer = json.loads(self._socket.recv(timeout=SECONDS))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, code: str) -> Any:
        found = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True, timeout=1000 * SECONDS)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, condition: str) -> str:
        """The page's text once the JavaScript ``condition`` on ``text`` and the document holds."""
        return str(
            self.run(
                "new Promise((done) => { const look = () => { const text = document.body ? document.body.innerText : '';"
                f" if ({condition}) done(text); }};"
                " new MutationObserver(look).observe(document, {subtree: true, childList: true, characterData: true});"
                " look(); })"
            )
        )

    def text_with(self, words: str) -> str:
        """The page's text once it contains ``words``."""
        return self.until(f"text.includes({json.dumps(words)})")


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    browser = subprocess.Popen(
        [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "about:blank"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert browser.stderr is not None
        address = next(found[0] for line in browser.stderr if (found := re.search(r"ws://\S+", line)))
        with connect(address, max_size=1 << 24) as socket:
            yield Tab(socket)
    finally:
        browser.terminate()
        browser.wait(SECONDS)
        if browser.stderr is not None:
            browser.stderr.close()


def test_the_link_logs_in_and_the_page_follows_what_happens(tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with BackgroundServer(ServerSettings(port=0, run="run")) as server:
        tab.open(server.url)
        assert "weightsync token" in tab.text_with("This coordinator needs its token.")
        tab.open(login_url(server.address, Secret(server.token)))  # in the same tab: only the fragment changes
        assert "no version can be seeded" in tab.text_with("run run")
        assert "needs its token" not in tab.run("document.body.innerText")
        assert server.token not in tab.run("location.href + JSON.stringify(history.state)")
        settings = ClientSettings(coordinator=server.address)
        with joined(settings, engine_hello("mine-0")), joined(settings, trainer_hello()) as trainer:
            trainer.link.call(Publish(3), 20)
            shown = tab.text_with("16 B")
            assert re.search(r"mine-0\s+loaded\s+3\s+0\s+\d+ s\s+[0-9a-f]{16}\s+1/1", shown)
            assert re.search(r"\d+:\d\d:\d\d( [AP]M)?\s+1\s+3\s+ok\s+16 B", shown)
        assert re.search(r"mine-0\s+left\s", tab.text_with("left")), "it was closed on purpose, which is no error"
        assert "code 1005" not in tab.run("document.body.innerText")
        tab.open(server.url + "/")  # a reload of the same tab: the token is kept in the tab's session storage
        tab.text_with("run run")
        tab.open(server.url + "/#token=wrong")
        tab.text_with("This coordinator needs its token.")


def test_the_page_names_the_slow_rank_and_fits_any_screen(tab: Tab) -> None:
    assert len(page.HTML.encode()) < 200_000
    with BackgroundServer(ServerSettings(port=0, run="run")) as server:
        tab.open(login_url(server.address, Secret(server.token)))
        tab.text_with("No round yet.")
        publish(server, {"a": [SlowAdapter()], "b": [SlowAdapter(), SlowAdapter("flush")]}, rounds=2)
        shown = tab.until("text.includes('Round 2,') && document.querySelectorAll('#rounds tr').length === 2")
        assert re.search(r"Round 2, .*Slowest: flush at b/1, \d+ ms", shown)
        assert len(re.findall(r"flush at b/1", shown)) == 3, "of the trace that is shown, and of each round"
        lanes = tab.run("[...document.querySelectorAll('#waterfall th')].map((cell) => cell.textContent)")
        assert set(lanes) == {"coordinator", "trainer/0", "a/0", "b/0", "b/1"}
        bars = (
            "[...document.querySelectorAll('#waterfall tr')]"
            ".map((line) => [line.cells[0].textContent, line.querySelector('.lane').ariaLabel])"
        )
        assert re.search(r"flush \d{3} ms", dict(tab.run(bars))["b/1"])
        assert tab.run("document.querySelectorAll('#chart canvas').length") == 1
        tab.run("[...document.querySelectorAll('button.round')].pop().click()")
        tab.text_with("Round 1,")
        for width in (320, 1280, 3840):
            tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            assert tab.run("document.documentElement.scrollWidth") <= width
