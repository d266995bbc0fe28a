"""Takes the docs' screenshots of the status page from recorded data: ``python -m tools.screenshots`` (``make docs``).

Chromium shows the page with the answers of a coordinator that ``python -m tools.recording page`` kept in ``docs/data/page.json``.
A screenshot ends with a stamp: hashes of that data and of the page. One whose stamp is right is left alone. Without Playwright or
Chromium all are left alone, with a message.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from weightsync.config import Secret
from weightsync.protocol.proof import ANSWER_HEADER, CHALLENGE_PATH, Challenger
from weightsync.server.page import HTML

__all__ = ["ADDRESS", "ARGUMENTS", "SCREENSHOTS", "answers", "chromium", "main", "stamp"]

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "page.json"
FOLDER = ROOT / "docs" / "pictures"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
SCREENSHOTS: dict[str, tuple[dict[str, Any], str]] = {
    "page": ({"color_scheme": "light", "viewport": {"width": 1180, "height": 900}}, "main"),
    "page_dark": ({"color_scheme": "dark", "viewport": {"width": 1180, "height": 900}}, "main"),
    "page_phone": ({"color_scheme": "light", "viewport": {"width": 360, "height": 780}}, ""),
    "page_waterfall": ({"color_scheme": "light", "viewport": {"width": 900, "height": 900}}, "[aria-labelledby=of-round]"),
}
"""The browser's settings, and what of the page is shown: an element, or as much as fits on the screen."""

_TOKEN = "shown-nowhere"
ADDRESS = f"https://coordinator.example/#token={_TOKEN}"
_KEYWORD = b"weightsync\0"


def chromium() -> str | None:
    """Return the path of an installed Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def stamp() -> str:
    """Return what a current screenshot ends with."""
    return f"{hashlib.sha256(DATA.read_bytes()).hexdigest()} {hashlib.sha256(HTML.encode()).hexdigest()}"


def stamp_of(png: bytes) -> str:
    """Return the stamp of a screenshot; empty if it has none."""
    _, keyword, rest = png.rpartition(_KEYWORD)
    return rest[: len(stamp())].decode("latin-1") if keyword else ""


def _stamped(png: bytes) -> bytes:
    """Insert the stamp as a text chunk before the last one."""
    content = b"tEXt" + _KEYWORD + stamp().encode()
    chunk = (len(content) - 4).to_bytes(4, "big") + content + zlib.crc32(content).to_bytes(4, "big")
    return png[:-12] + chunk + png[-12:]


@contextmanager
def _browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def answers(data: dict[str, Any]) -> Callable[[Any], None]:
    """Return what answers the page's requests. The stream of events stays open without an event."""

    challenger = Challenger(Secret(_TOKEN))

    def answer(route: Any) -> None:
        url = urlsplit(route.request.url)
        proof = challenger.admits(route.request.headers.get("authorization", ""), f"GET {url.path}{url.query and '?'}{url.query}")
        if url.path == "/":
            route.fulfill(body=HTML, content_type="text/html; charset=utf-8")
        elif url.path == CHALLENGE_PATH:
            route.fulfill(json=msgspec.to_builtins(challenger.challenge(parse_qs(url.query)["nonce"][0])))
        elif url.path in data:
            route.fulfill(json=data[url.path], headers={ANSWER_HEADER: proof[0] if proof else ""})
        elif url.path != "/v1/events":
            route.abort()

    return answer


def _take(browser: Any, name: str, data: dict[str, Any]) -> bytes:
    settings, element = SCREENSHOTS[name]
    with browser.new_context(**settings, device_scale_factor=1, locale="en-GB", timezone_id="UTC") as context:
        page = context.new_page()
        page.route("**/*", answers(data))
        page.goto(ADDRESS)
        page.locator("#waterfall .bar").first.wait_for()
        page.locator("#chart canvas").wait_for()
        page.evaluate("document.fonts.ready")
        return bytes(page.locator(element).screenshot() if element else page.screenshot())


def main() -> int:
    """Take those that are not current."""
    files = {name: FOLDER / f"{name}.png" for name in SCREENSHOTS}
    old = [name for name, file in files.items() if not file.is_file() or stamp_of(file.read_bytes()) != stamp()]
    if not old:
        return 0
    try:
        if chromium() is None:
            raise ImportError("no Chromium on the PATH (Debian's package: chromium)")
        data = json.loads(DATA.read_text())
        with _browser() as browser:
            for name in old:
                files[name].write_bytes(_stamped(_take(browser, name, data)))
    except ImportError as error:
        print(f"screenshots of the status page stay as they are: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
