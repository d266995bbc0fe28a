"""Environment variables: read in one module, and the same in its tables, on the settings page and in ``--help``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import typer.main
from tests.unit.test_house import FILES, ROOT, SOURCE, _name, _package, _where, parsed

from weightsync import config
from weightsync.cli.main import app
from weightsync.errors import ConfigurationError

ENVIRONMENT_SET = {
    "agent.py": "log levels of NIXL and UCX, unless the user set them",
}
"""Where variables are set for a library. They are read in ``config.py`` alone."""


def _environment_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and kind (``reads`` or ``sets``) of each use of this process's environment."""
    setters = {
        id(node.value): node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "setdefault"
    } | {id(node.value): "=" for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from ((node.lineno, "reads") for alias in node.names if alias.name in ("environ", "environb", "getenv"))
        elif isinstance(node, ast.Attribute) and _name(node) in ("os.environ", "os.environb", "os.getenv"):
            yield node.lineno, "sets" if id(node) in setters else "reads"


@pytest.mark.parametrize("path", FILES, ids=_where)
def test_the_environment_is_read_in_config_alone(path: Path) -> None:
    inside = path.relative_to(_package(path)).as_posix()
    uses = [(line, kind) for line, kind in _environment_uses(parsed(path)) if kind == "reads" or inside not in ENVIRONMENT_SET]
    assert not uses or path == SOURCE / "config.py", (
        f"{_where(path)}:{uses[0][0]}: {uses[0][1]} the environment: see config.VARIABLES"
    )


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        ("os.environ.get('A')", ["reads"]),
        ("os.getenv('A')", ["reads"]),
        ("os.environ['A']", ["reads"]),
        ("run(env={**os.environ})", ["reads"]),
        ("from os import environ", ["reads"]),
        ("os.environ['A'] = 'b'", ["sets"]),
        ("os.environ.setdefault('A', 'b')", ["sets"]),
        ("os.getpid()", []),
    ],
)
def test_the_search_for_reads_of_the_environment_finds_them(code: str, kinds: list[str]) -> None:
    assert [kind for _, kind in _environment_uses(ast.parse(code))] == kinds


def test_the_settings_page_names_the_variables_of_the_code_and_no_others() -> None:
    documented = set(re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE))
    named = {name for path in SOURCE.rglob("*.py") for name in re.findall(r"WEIGHTSYNC_[A-Z_]*[A-Z]", path.read_text())}
    settings = {
        config.variable_of(kind, field.name): field.default
        for kind in (config.ServerSettings, config.Limits, config.ClientSettings, config.Timeouts)
        for field in msgspec.structs.fields(kind)
        if field.name not in ("limits", "timeouts")
    }
    assert named <= documented
    assert documented == {*settings, *config.VARIABLES}


def _options() -> list[tuple[str, str]]:
    """Command with option, and help, of each option of each command that names a variable."""
    commands = typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    return [
        (f"{name} {option.opts[0]}", option.help)
        for name, command in commands
        for option in command.params
        if "[env:" in (getattr(option, "help", None) or "")
    ]


@pytest.mark.parametrize(("option", "text"), _options(), ids=[option for option, _ in _options()])
def test_help_names_variables_and_their_defaults(option: str, text: str) -> None:
    """``[env: NAME; default VALUE]``: the name is one of the table, and the value is that of the field, unless it is words."""
    described = re.search(r"\[env: ([^];]*)(?:; default:? ([^]]*))?\]", text)
    assert described
    names = re.findall(r"[A-Z][A-Z_]+[A-Z]", described[1])
    fields = {
        config.variable_of(kind, field.name): field.default
        for kind in (config.ServerSettings, config.ClientSettings)
        for field in msgspec.structs.fields(kind)
    }
    assert names
    assert set(names) <= {*fields, *config.VARIABLES}
    default = fields.get(names[0])
    shown = described[2]
    if default in (None, "", ()):  # a new run, all replicas, the user's state folder
        assert shown is None or not re.fullmatch(r"[\d.]+", shown)
    else:
        assert shown is not None
        assert shown in (str(default), f"{default:g}" if isinstance(default, float) else str(default))


def test_a_variable_that_is_in_no_table_cannot_be_read() -> None:
    with pytest.raises(ConfigurationError, match="reads no environment variable WEIGHTSYNC_NONSENSE"):
        config.variable("WEIGHTSYNC_NONSENSE")
