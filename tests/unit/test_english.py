"""Holds what a pattern can find of plain English, short lines and a short changelog: in docs, help texts and messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import code_lines

import weightsync

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PACKAGES = (code_lines.SOURCE, *code_lines.BESIDE.values())
SOURCES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
HELP = ("cli", "commands.py", "config.py")
"""Folders and files whose docstrings are help texts, or rows of the table of settings."""
CODE_COLUMNS = 84
CHANGELOG_LINES = 25
CELL_WORDS = 40

_THING = "(?:copy|call|launch|line|row|process|broadcast|reshard|allocation|region)"
_UNIT = "(?:rank|tensor|round|replica|GPU|batch|bucket|window|column|launch)"
PATTERNS = {
    r"\ban? (?:[\w`*-]+ ){1,3}of (?:its|their) own\b(?! \w)": "a separate ...; its own ...",
    r"\b(?:processes|pages|versions|GPUs|hosts|ports|norms|tensors|weights) of (?:its|their) own\b": "separate ...",
    r"\b(?:nobody|everybody|somebody|whoever|in vain|goodbye)\b": "the actor's name, or the passive",
    r"\bmeanwhile\b": "while ...",
    r"\b(?:tried (?:with|on|in|by) (?!vain)|untried\b|not tried\b)": "tested",
    r", else (?!:)|\belse from\b": "otherwise; by default",
    r"\bfigures?\b(?!\.)": "results, numbers",
    rf"\b(?:one|an?|two|\d+) (?:NCCL )?{_THING} an? {_UNIT}\b": "per ...",
    r"\bthe \w+ that (?:it|they) (?:has|have)(?= *[.,;:)|]|$)": "its ...",
    r"\b(?:memory|weights|tensors|elements?|bytes) (?:lies?|is placed)\b": "is stored in, is in",
}  # fmt: skip


INTERNAL = re.compile(r"\b(?<![-`])(?:refits?|dirty|quarantin\w+|re-?seed\w*|seeded)\b(?!`)", re.IGNORECASE)
"""The code's own words for what users know as an update, and as out of service."""


def dialect(text: str) -> Iterator[str]:
    """What a pattern finds in a text, with what to write instead."""
    for pattern, better in PATTERNS.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            yield f"{match[0]!r}: {better}"


def prose(page: str) -> str:
    """A page without its code, line by line."""
    return re.sub(
        r"```.*?```|`[^`\n]*`|<!--.*?-->|\]\([^)\s]*\)", lambda code: re.sub(r"[^\n]", "~", code[0]), page, flags=re.DOTALL
    )


def code(page: str) -> Iterator[tuple[int, str]]:
    """Numbers and texts of the lines in blocks of code."""
    language: str | None = None
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            language = line.strip("` ") if language is None else None
        elif language not in (None, "diff") and " " in line.strip(" \\"):  # a patch, and a single name, cannot be cut
            yield number, line


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers and texts of the strings of a module that people read: messages, help texts, and the descriptions of settings."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    helps = any(part in HELP for part in path.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (helps or id(node) not in docs):
            yield node.lineno, node.value


def where(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_docs_are_plain_english() -> None:
    found = [
        f"{where(page)}:{number}: {what}"
        for page in PAGES
        for number, line in enumerate(prose(page.read_text()).splitlines(), 1)
        for what in dialect(line)
    ]
    assert not found, "\n".join(found)


def test_guides_use_the_words_of_users() -> None:
    """One word for one thing: an update, out of service, tested. Pages about the code's own parts may name its states."""
    inside = {"architecture.md", "protocol.md", "simulation.md", "CONTRIBUTING.md"}
    found = [
        f"{where(page)}:{number}: {match[0]}"
        for page in PAGES
        if page.name not in inside
        for number, line in enumerate(prose(page.read_text()).splitlines(), 1)
        for match in INTERNAL.finditer(line)
    ]
    assert not found, "\n".join(found)


def public_docstrings() -> Iterator[tuple[str, str]]:
    """Names and docstrings of the public classes and functions, and of their public members. Nothing of them is imported."""
    for public, module in weightsync._WHERE.items():
        tree = ast.parse((ROOT / "src" / "weightsync" / f"{module.replace('.', '/')}.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == public:
                yield public, ast.get_docstring(node) or ""
                for part in node.body:
                    if isinstance(part, ast.FunctionDef) and part.name[0] != "_":
                        yield f"{public}.{part.name}", ast.get_docstring(part) or ""


def test_docstrings_of_the_api_are_plain_english() -> None:
    texts = dict(public_docstrings())
    assert "Trainer.publish" in texts
    found = [f"{name}: {what}" for name, text in texts.items() for what in dialect(text)]
    found += [f"{name}: {match[0]}" for name, text in texts.items() for match in INTERNAL.finditer(text)]
    assert not found, "\n".join(found)


def test_messages_and_help_are_plain_english() -> None:
    found = [f"{where(path)}:{line}: {what}" for path in SOURCES for line, text in messages(path) for what in dialect(text)]
    assert not found, "\n".join(found)


def test_code_in_docs_is_not_cut_at_the_width_of_a_page() -> None:
    pages = [page for page in PAGES if page.name != "CONTRIBUTING.md"]
    lines = ((page, number, len(line)) for page in pages for number, line in code(page.read_text()))
    wide = [f"{where(page)}:{number}: {width} columns" for page, number, width in lines if width > CODE_COLUMNS]
    assert not wide, "\n".join(wide)


def test_tables_have_heads() -> None:
    """A column without a head says nothing to a screen reader."""
    heads = re.compile(r"^(\|.*\|)\n\|(?:-+\|)+$", re.MULTILINE)
    found = [
        f"{where(page)}: {match[1]}"
        for page in PAGES
        for match in heads.finditer(page.read_text())
        if not all(cell.strip() for cell in match[1].strip("|").split("|"))
    ]
    assert not found, "\n".join(found)


def test_tables_have_short_cells() -> None:
    """A long cell is a wall on a phone: details go into a list or a paragraph below the table. A link counts by its text."""
    long = [
        f"{where(page)}:{number}: {len(words)} words: {' '.join(words[:6])} ..."
        for page in PAGES
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if line.startswith("|")
        for cell in re.split(r"(?<!\\)\|", re.sub(r"\]\([^)]*\)", "]", line))
        if len(words := cell.split()) > CELL_WORDS
    ]
    assert not long, "\n".join(long)


def test_the_changelog_is_short() -> None:
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    lines = {release.split("\n")[0]: [line for line in release.split("\n")[1:] if line and line[0] != "#"] for release in releases}
    assert not [name for name, entries in lines.items() if len(entries) > CHANGELOG_LINES], "keep what users must know"
    assert not [line for entries in lines.values() for line in entries if "test_" in line]


@pytest.mark.parametrize(
    "text",
    [
        "It runs in a process of its own.",
        "three processes of their own",
        "Nobody reads it.",
        "They wait in vain.",
        "engines serve meanwhile",
        "tried with TRL 1.16",
        "Untried: GPUs",
        "from the trainer, else from a replica",
        "raw figures",
        "one copy a rank",
        "an NCCL broadcast a tensor",
        "keeps the version that it has.",
        "where the memory lies",
    ],
)
def test_the_search_for_dialect_finds_it(text: str) -> None:
    assert list(dialect(text))
    assert not list(dialect(prose(f"`{text}`")))


def test_the_search_for_dialect_leaves_plain_english_alone() -> None:
    assert not list(
        dialect("the chunks of its own boxes; it tried for 3 s; x if y else z; one call per rank; proves that it has the token")
    )
