"""Modules and their names that a text mentions (a logger, ``import_module``, ``python -m``, a docstring, a guide) exist."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from tools import code_lines

ROOT = Path(__file__).resolve().parents[2]
ROOTS = {
    name.name: name
    for name in (
        code_lines.SOURCE,
        *code_lines.BESIDE.values(),
        ROOT / "tests",
        ROOT / "tools",
        ROOT / "benchmarks",
        ROOT / "examples",
    )
}
DOTTED = re.compile(rf"(?<![\w./\-@]){'(' + '|'.join(ROOTS) + ')'}((?:\.[A-Za-z_]\w*)+)(?![\w\-/])(:[A-Za-z_]\w*)?")
OTHERS = {  # what else may follow "weightsync."
    *("rounds", "websocket", "websocket.server"),  # loggers
    *("bytes", "busy_seconds", "clock_error_seconds", "clock_offset_seconds", "epoch", "member", "party"),  # of OpenTelemetry spans
    *("round", "run", "source", "transport", "version"),  # the same
    *("holder", "limits", "transport"),  # keys of an ASGI scope
    "mounts",  # a group of entry points
    "token_versions",  # a field of a server's answer
    *("begin", "commit", "end", "update"),  # methods of an object that is called weightsync
    "txt",  # a file in a store
    *("__file__", "NAME", "Nonsense", "rollouts.Nonsense", "testing.Nonsense", "x"),
}


def _tracked() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    texts = (".py", ".md", ".toml", ".yml", ".yaml", ".sh")
    return [ROOT / line for line in listed if line.endswith(texts) or line.endswith("Makefile")]


@cache
def _names(module: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(module.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.ImportFrom(module=str(source), names=[ast.alias("*")]) if source.startswith("weightsync."):
                names |= _names(ROOTS["weightsync"].joinpath(*source.split(".")[1:]).with_suffix(".py"))
            case ast.Import() | ast.ImportFrom():
                names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            case ast.Call(func=ast.Name("exec")):
                names.add("*")
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Constant(value=str(text)) if module.name == "__init__.py":  # names that it imports when they are used
                names.add(text)
    return names


def _missing(root: str, dotted: str) -> str | None:
    """First part of a dotted name that does not exist; what follows a name in a module is not looked at."""
    place = ROOTS[root]
    for name in dotted.split(".")[1:]:
        if (place / name).is_dir():
            place /= name
        elif (module := place / f"{name}.py").is_file():
            place = module
        elif place.suffix == ".py" or (place := place / "__init__.py").is_file():
            return None if _names(place) & {name, "*"} else name
        else:
            return name
    return None


def test_modules_that_are_mentioned_exist() -> None:
    wrong = []
    for path in _tracked():
        if path.name == "CHANGELOG.md" or not path.is_file():
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for root, dotted, name in DOTTED.findall(line):
                missing = _missing(root, dotted + name.replace(":", "."))
                if missing is not None and dotted[1:] not in OTHERS:
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: {root}{dotted}{name}: no {missing!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("dotted", "missing"),
    [(".engine.agent", "agent"), (".agents", "agents"), (".Trainer", None), (".engine.engine.Engine", None), (".tensors", None)],
)
def test_the_search_finds_what_does_not_exist(dotted: str, missing: str | None) -> None:
    assert _missing("weightsync", dotted) == missing
