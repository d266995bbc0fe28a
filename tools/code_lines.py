"""Code lines of the main distribution's packages and of those beside it, and their ceilings: python -m tools.code_lines."""

from __future__ import annotations

import ast
import io
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

__all__ = ["BESIDE", "TOP", "ceilings", "code_lines", "measured", "over"]

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "weightsync"
TOP = "top-level"
"""The row of the modules that are in no package."""
_FOLDERS = {name: name for name in ("bench", "callbacks", "relay", "rollouts", "testing")}
_FOLDERS |= {"disaggregated": "disaggregated-updates", "nixl": "transport-nixl", "ray": "ray-manager"}
BESIDE = {f"weightsync-{name}": ROOT / folder / f"weightsync_{name}" for name, folder in _FOLDERS.items()}
"""The distributions beside the main one. They have rows of their own, and are not in the sum that has a goal."""

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines of a module that hold code: no blank lines, comments or docstrings (those of attributes included)."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def measured() -> dict[str, int]:
    """Code lines per package, and per distribution beside."""
    count: Counter[str] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.relative_to(SOURCE).parts[0] if path.parent != SOURCE else TOP
        count[package] += code_lines(path.read_text())
    for name, folder in BESIDE.items():
        count[name] = sum(code_lines(path.read_text()) for path in folder.rglob("*.py"))
    return dict(count)


def ceilings() -> dict[str, int]:
    """The most code lines that each package may have, from ``pyproject.toml``."""
    table: dict[str, int] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["weightsync"]["ceiling"]
    return table


def over(lines: dict[str, int], allowed: dict[str, int]) -> list[str]:
    """One message for each package above its ceiling, each package without a ceiling, and each ceiling without a package."""
    missing = [f"{name}: {lines[name]} code lines and no ceiling; add a row" for name in lines if name not in allowed]
    stale = [f"{name}: a ceiling of {allowed[name]} and no such package; remove the row" for name in allowed if name not in lines]
    above = [
        f"{name}: {lines[name]} code lines, {lines[name] - allowed[name]} above its ceiling of {allowed[name]}"
        for name in lines
        if name in allowed and lines[name] > allowed[name]
    ]
    return [*missing, *stale, *above]


def main() -> None:
    """Print code lines, ceiling and the difference for each package, for all of them, and for what is beside."""
    lines, allowed = measured(), ceilings()
    rows = [(name, lines[name], allowed.get(name, 0)) for name in sorted(lines, key=lambda name: (name in BESIDE, -lines[name]))]
    main, beside = rows[: -len(BESIDE)], rows[-len(BESIDE) :]
    total = ("total", sum(count for _, count, _ in main), sum(ceiling for *_, ceiling in main))
    for name, count, ceiling in [*main, total, *beside]:
        print(f"{name:20} {count:7,} {ceiling:7,} {ceiling - count:6,}")


if __name__ == "__main__":
    main()
