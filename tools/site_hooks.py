"""Hooks of MkDocs: pages from the repository's root, and links that mean the same on GitHub and on the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["on_files", "on_page_markdown"]

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
BOOSTED = ("tutorial.md", "guides/operations.md", "reference/errors.md")
"""Pages that answer what people search for. GitHub shows front matter as a table, so it is not in the pages."""
_UNTESTED = re.compile(r"^```python notest$", re.MULTILINE)
"""What tests leave out. Markdown's parser takes no such word."""
_CODE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)\s]+)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that GitHub wants in the repository's root."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave ``docs``: to a page of the root, or to the path as text. Drop the mark of code that no test runs.

    Mark pages that the search ranks higher.
    """
    if page.file.src_uri in BOOSTED:
        page.meta["search"] = {"boost": 2}
    if page.file.src_uri == "README.md":  # its list of pages is for GitHub; the site has a navigation
        markdown = re.sub(r"^## Pages$.*?^<!-- end -->$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    here = posixpath.dirname(page.file.src_uri)
    folder = here if page.file.src_uri in ROOT_PAGES else posixpath.join("docs", here)

    def link(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        uri = path.removeprefix("docs/")
        if uri != path or uri in ROOT_PAGES:
            return f"{mark}[{text}]({posixpath.relpath(uri, here)}{anchor or ''})"
        return f"{text} (`{path}` in the repository)"

    parts = _CODE.split(_UNTESTED.sub("```python", markdown))
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)
