"""The site builds strictly, its reference is whole, and its pictures show the data that is in the repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools import pictures, reference, screenshots

import weightsync
from weightsync import errors

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def _build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]  # --quiet would pass over warnings
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=55)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    done = _build(ROOT, built)
    assert done.returncode == 0, done.stderr
    return built


def test_every_page_is_built(site: Path) -> None:
    pages = {page.relative_to(DOCS).with_suffix(".html").as_posix().replace("README", "index") for page in DOCS.rglob("*.md")}
    assert pages | {"CHANGELOG.html", "CONTRIBUTING.html", "SECURITY.html"} <= {
        page.relative_to(site).as_posix() for page in site.rglob("*.html")
    }


def test_the_site_makes_no_request_to_another_host(site: Path) -> None:
    loaded = re.compile(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["']?(https?:)?//[^>]*>""")
    assert not [
        match[0]
        for page in site.rglob("*.html")
        for match in loaded.finditer(page.read_text())
        if 'rel="canonical"' not in match[0]
    ]


def test_links_that_leave_docs_lead_to_a_page_or_become_text(site: Path) -> None:
    text = (site / "benchmarks" / "security.html").read_text()
    assert 'href="../CHANGELOG.html"' in text
    assert "examples/grpo</code> in the repository" in (site / "benchmarks" / "grpo.html").read_text()
    assert 'href="architecture.html#one-sided-reads"' in (site / "CHANGELOG.html").read_text()


def test_the_first_page_does_not_repeat_the_navigation(site: Path) -> None:
    assert "## Pages" in (DOCS / "README.md").read_text()
    assert not re.search(r"<h2[^>]*>Pages<", (site / "index.html").read_text())


def test_the_search_ranks_the_pages_that_people_look_for_higher(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    boosted = {entry["location"].partition("#")[0] for entry in entries if entry.get("boost") == 2}
    assert boosted == {"tutorial.html", "guides/operations.html", "reference/errors.html"}


def test_a_wrong_link_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("src", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "mkdocs.yml").write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\nnav: [README.md]\n")
    (tmp_path / "docs" / "README.md").write_text("# A page\n\n[a](nowhere.md) [b](README.md#nowhere)\n")
    (tmp_path / "docs" / "lonely.md").write_text("# A page that the navigation lacks\n")
    done = _build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for complaint in ("'nowhere.md'", "'README.md#nowhere'", "lonely.md"):
        assert complaint in done.stderr


def test_the_api_pages_have_every_public_name() -> None:
    pages = "".join(page.read_text() for page in (DOCS / "reference" / "api").glob("*.md"))
    shown = set(re.findall(r"^::: weightsync\.(\w+)$", pages, re.MULTILINE))
    assert shown == set(weightsync.__all__) - set(errors.__all__) - {"__version__"}


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_shows_the_data_that_is_here(name: str) -> None:
    assert (DOCS / "pictures" / f"{name}.svg").read_text().endswith(pictures.stamp(name)), "run `make docs`"


def test_every_picture_is_drawn_and_shown() -> None:
    names = {f"{name}.svg" for name in pictures.PICTURES} | {f"{name}.png" for name in screenshots.SCREENSHOTS}
    assert {path.name for path in (DOCS / "pictures").iterdir()} == names
    pages = "".join(page.read_text() for page in (*reference.PAGES, ROOT / "README.md"))
    assert set(re.findall(r"!\[[^\]]+\]\([^)]*?(\w+\.(?:svg|png))\)", pages)) == names


def test_screenshots_show_the_data_that_is_here_and_are_small() -> None:
    taken = {name: (DOCS / "pictures" / f"{name}.png").read_bytes() for name in screenshots.SCREENSHOTS}
    data, _, page = screenshots.stamp().partition(" ")
    assert {screenshots.stamp_of(png).partition(" ")[0] for png in taken.values()} == {data}, "run `make docs`"
    assert len(page) == len(data) == 64
    assert sum(map(len, taken.values())) < 400_000


def test_without_chromium_screenshots_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screenshots, "FOLDER", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "page.png").write_bytes(b"an older one")
    assert screenshots.main() == 0
    assert "stay as they are: no Chromium on the PATH" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["page.png"]
    assert (tmp_path / "page.png").read_bytes() == b"an older one"


def test_a_picture_is_drawn_twice_alike() -> None:
    assert pictures.drawn("waterfall") == pictures.drawn("waterfall")


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_asks_no_other_host_and_runs_nothing(name: str) -> None:
    text = (DOCS / "pictures" / f"{name}.svg").read_text()
    assert not re.search(r"""<script|@import|@font-face|(?:href|src)=["']https?:|url\(["']?https?:""", text)
