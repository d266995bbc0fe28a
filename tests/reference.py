"""Writes what the code knows into the docs: settings with their defaults, transports with their traits, and metrics.

``python -m tests.reference`` rewrites every block between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
``tests/unit/test_reference.py`` fails if a block is not current.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from weightsync import config
from weightsync.server.agent_metrics import AGENT_METRICS
from weightsync.server.metrics import COORDINATOR_METRICS, Declared
from weightsync.transports.registry import BUILT_IN, transport

__all__ = ["BLOCKS", "PAGES", "current", "exposed_names"]

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def _descriptions(kind: type) -> dict[str, str]:
    """The docstring under each field of a class."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    fields: dict[str, str] = {}
    if isinstance(definition, ast.ClassDef):
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                fields[field.target.id] = inspect.cleandoc(str(ast.literal_eval(text.value))).replace("\n", " ")
    return fields


def _plain(text: str) -> str:
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")


def _default(value: Any) -> str:
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, config.Address):
        return f"`{value.url}`"
    if isinstance(value, int) and value >= 1 << 20 and not value % (1 << 20):
        return f"{value >> 20} MiB"
    if isinstance(value, int) and value >= 1 << 10 and not value % (1 << 10) and value > 1 << 15:
        return f"{value >> 10} KiB"
    return f"`{value}`" if isinstance(value, str) else f"{value:g}"


def _settings(kind: type[msgspec.Struct]) -> str:
    described = _descriptions(kind)
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        if field.name in ("limits", "timeouts"):
            continue
        default = _default(None if field.default is msgspec.NODEFAULT else field.default)
        rows.append(f"| `{config.variable_of(kind, field.name)}` | {default} | {_plain(described[field.name])} |")
    return "\n".join(rows)


def _transports() -> str:
    rows = ["| name | reads | writes | reach | encrypted | digests | source | opt-in |", "|---|---|---|---|---|---|---|---|"]
    for name in BUILT_IN:
        traits = transport(name).traits
        cells = (
            f"`{name}`",
            ", ".join(traits.reads),
            ", ".join(traits.writes),
            traits.reach,
            "can be" if traits.encrypted else "no",
            traits.digests,
            "live" if traits.live_source else "streams",
            "yes" if traits.shared_fate else "no",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _metrics(declared: Sequence[Declared]) -> str:
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in declared:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `weightsync_{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows)


def exposed_names() -> set[str]:
    """Return the names of all samples of all metrics, as queries use them."""
    names = set()
    for metric in (*COORDINATOR_METRICS, *AGENT_METRICS):
        suffixes = ("", "_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",)
        names |= {f"weightsync_{metric.name}{suffix}" for suffix in suffixes}
    return names


BLOCKS: dict[str, Callable[[], str]] = {
    "agent settings": lambda: _settings(config.ClientSettings),
    "timeouts": lambda: _settings(config.Timeouts),
    "coordinator settings": lambda: _settings(config.ServerSettings),
    "coordinator limits": lambda: _settings(config.Limits),
    "transports": _transports,
    "coordinator metrics": lambda: _metrics(COORDINATOR_METRICS),
    "agent metrics": lambda: _metrics(AGENT_METRICS),
}


def current(text: str) -> str:
    """Return a page with every generated block as it should be."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- generated: {match[1]} -->\n\n{BLOCKS[match[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- generated: ([\w ]+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text()
        if (after := current(before)) != before:
            page.write_text(after)
            print(f"wrote {page.relative_to(ROOT)}")
