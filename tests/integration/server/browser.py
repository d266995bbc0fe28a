"""A page in headless Chromium, driven by Playwright. Its tests are skipped where one of the two is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed here: pip install '.[browser]'")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright
from playwright.sync_api import TimeoutError as PageTimeout
from tools.screenshots import ARGUMENTS, chromium

__all__ = ["Page", "PageTimeout", "browser", "check_accessibility", "check_width", "page", "replica_rows"]

_BROWSER = chromium()
if _BROWSER is None:
    pytest.skip("no Chromium here (Debian's package: chromium)", allow_module_level=True)

_MILLISECONDS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of a module."""
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=_BROWSER, args=ARGUMENTS)
        try:
            yield opened
        finally:
            opened.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty page, in a profile that no other test has used."""
    with browser.new_context() as context:
        context.set_default_timeout(_MILLISECONDS)
        yield context.new_page()


def check_accessibility(page: Page) -> None:
    """Check the page with axe, in both colour schemes."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = Axe().run(page).response["violations"]
        listed = [(one["id"], one["help"], [(node["html"], node["failureSummary"]) for node in one["nodes"]]) for one in found]
        assert not listed, f"{scheme}: {listed}"


def check_width(page: Page) -> None:
    """Check that the page needs no horizontal scrolling on a phone, on a laptop and in 4K."""
    for width in (320, 360, 768, 1280, 1440, 3840):
        page.set_viewport_size({"width": width, "height": 900})
        wide = page.evaluate(
            "width => document.documentElement.scrollWidth <= width ? [] : [...document.querySelectorAll('body *')]"
            ".filter((e) => e.getBoundingClientRect().right > width && !e.closest('.scroll'))"
            ".map((e) => e.outerHTML.slice(0, 200))",
            width,
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= width, wide
    page.set_viewport_size({"width": 1280, "height": 900})


def replica_rows(status: Mapping[str, Any]) -> list[list[str]]:
    """What the page's table of replicas must show for ``/v1/status``, by name, without ages, pauses and places."""
    return sorted(
        [
            replica["name"], replica["service"].replace("_", " "), version_text(replica), text_of(replica["staleness"]),
            replica["verified"] or ("" if replica["version"] is None else "-"), f"{len(replica['ranks'])}/{replica['world_size']}",
        ]
        for replica in status["replicas"]
    )  # fmt: skip


def text_of(value: object) -> str:
    """A cell's text; empty for ``None``."""
    return "" if value is None else str(value)


def version_text(replica: Mapping[str, Any]) -> str:
    """A version's number, with its epoch before it after the first."""
    return text_of(replica["version"]) if replica["epoch"] in (None, 1) else f"{replica['epoch']}@{replica['version']}"
