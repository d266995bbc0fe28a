"""The parts of the docs that repeat what the code knows: generated blocks, the map of folders, and files that pages name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from tools import reference

from weightsync.protocol import lora_messages, messages, store_messages, update_messages

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "weightsync"
ARCHITECTURE = ROOT / "docs" / "architecture.md"


@pytest.mark.parametrize("page", reference.PAGES, ids=lambda page: page.name)
def test_generated_blocks_are_current(page: Path) -> None:
    text = page.read_text()
    assert reference.current(text) == text, f"{page.name} is not current: run python -m tools.reference"


def test_each_generated_block_is_in_a_page() -> None:
    pages = "".join(page.read_text() for page in reference.PAGES)
    assert set(re.findall(r"<!-- generated: ([\w ]+) -->", pages)) == set(reference.BLOCKS)


def test_a_block_that_is_not_current_is_rewritten() -> None:
    text = "before\n<!-- generated: transports -->\nwrong\n<!-- end -->\nafter\n"
    assert "`tcp`" in reference.current(text)
    assert "wrong" not in reference.current(text)


def _map() -> set[str]:
    table = ARCHITECTURE.read_text().partition("## Map of the folders")[2].partition("\n## ")[0]
    rows = [row.split("|")[2] for row in table.splitlines() if re.match(r"\| \d", row)]
    return {name for row in rows for name in re.findall(r"`([\w./]+)`", row)}


def test_the_map_names_every_folder_and_module_at_the_top() -> None:
    expected = {f"{path.name}/" for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    expected |= {path.name for path in SOURCE.glob("[a-z]*.py")}
    assert _map() == expected


def test_the_layers_of_the_map_are_those_that_import_linter_checks() -> None:
    layers = re.search(r'type = "layers"\nlayers = \[\n(.*?)\]', (ROOT / "pyproject.toml").read_text(), re.DOTALL)
    assert layers
    checked = [sorted(re.findall(r"weightsync\.(\w+)", line)) for line in layers[1].splitlines()]
    table = ARCHITECTURE.read_text().partition("## Map of the folders")[2].partition("\n## ")[0]
    mapped: dict[int, list[str]] = {}
    for number, cell in re.findall(r"^\| (\d+) \| ([^|]*) \|", table, re.MULTILINE):
        mapped.setdefault(int(number), []).extend(name.removesuffix(".py") for name in re.findall(r"`(\w+(?:\.py)?)/?`", cell))
    assert [sorted(names) for _, names in sorted(mapped.items())] == checked


def test_architecture_names_files_that_exist() -> None:
    names = re.findall(r"`((?:[\w]+/)+\w+\.py)`", ARCHITECTURE.read_text())
    assert len(names) > 20
    assert not [name for name in names if not ((SOURCE / name).exists() or (ROOT / name).exists())]


def test_pages_name_tests_that_exist() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {(page.name, path) for page in pages for path in re.findall(r"`(tests/[\w/.*]+)`", page.read_text())}
    assert len(named) > 50
    assert not [(page, path) for page, path in named if not any(ROOT.glob(path))]


MESSAGES = (messages, store_messages, update_messages, lora_messages)


def test_the_protocol_page_names_every_message_and_only_its_fields() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    wrong = []
    for name, fields in re.findall(r"\b([A-Z]\w+)\(([a-z_, ]*)\)", page):
        known = getattr(next((found for kinds in MESSAGES if (found := getattr(kinds, name, None))), None), "__struct_fields__", ())
        if not set(filter(None, fields.split(", "))) <= set(known):
            wrong.append(f"{name}({fields})")
    assert not wrong
    kinds = {kind.__name__ for kind in (*get_args(messages.Frame), *get_args(messages.Body))}
    assert kinds <= set(re.findall(r"\b[A-Z]\w+", page))
