"""Writes what the code knows into the docs: settings with their defaults, commands, errors, transports with their traits, metrics.

``python -m tools.reference`` rewrites every block between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
``tests/unit/test_reference.py`` fails if a block is not current.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import typer.main
import yaml

from weightsync import config, errors
from weightsync.cli.commands import choices_of
from weightsync.cli.main import app as cli
from weightsync.server import problems
from weightsync.server.agent_metrics import AGENT_METRICS
from weightsync.server.metrics import COORDINATOR_METRICS, Declared
from weightsync.transports.registry import BUILT_IN, transport
from weightsync_bench.forecast.figures import calibration_of, figures, predictions
from weightsync_bench.forecast.forecast import RefitForecast, Scenario, forecast_refit
from weightsync_bench.forecast.mesh import Mesh
from weightsync_bench.shapes import read_configuration

__all__ = ["BLOCKS", "PAGES", "current", "exposed_names", "navigation"]

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


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


def _variables() -> str:
    rows = ["| variable | read by | default | meaning |", "|---|---|---|---|"]
    for name, (readers, meaning, default) in config.VARIABLES.items():
        rows.append(_plain(f"| `{name}` | {readers} | {default} | {meaning} |"))
    return "\n".join(rows)


def _transports() -> str:
    rows = ["| name | reads | writes | reach | encrypted | digests | source | opt-in |", "|---|---|---|---|---|---|---|---|"]
    for name in (*BUILT_IN, "nixl"):
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


def forecast_of(model: str, source: str, target: str, **given: Any) -> RefitForecast:
    """Return the forecast of a named model between two meshes."""
    scenario = Scenario(model=read_configuration(model), source=Mesh.parse(source), target=Mesh.parse(target), **given)
    return forecast_refit(scenario)


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value >= 0.001 else f"{value:.2g}"


def _published() -> str:
    rows = ["| row | update | scheme | floor, s | forecast, s | published, s | error | use |", "|---|---|---|---|---|---|---|---|"]
    for one in predictions():
        row, (low, high) = one.row, one.row.seconds
        published = _seconds(low) if low == high else f"{_seconds(low)} to {_seconds(high)}"
        assumed = f" (assumed: {row.assumed})" if row.assumed else ""
        error = f"{one.error:+.0%}" if one.calibrates else f"**{one.error:+.0%}**"
        cells = (
            str(row.number), f"{row.what}, {row.source} to {row.target}{assumed}; {row.citation}", row.scheme, _seconds(one.floor),
            _seconds(one.seconds), published, error, "calibrates" if one.calibrates else "tests",
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _published_summary() -> str:
    tested = sorted(abs(one.error) for one in predictions() if not one.calibrates)
    close = sum(error <= 0.5 for error in tested)
    rows = [
        f"Of {len(tested)} rows that test, the median error is **{tested[len(tested) // 2]:.0%}**, {close} are within 50 %, and "
        f"the worst is {tested[-1]:.0%}.",
        "",
        "| scheme | rows that calibrate | factor over the floor | microseconds a tensor | scatter of all rows |",
        "|---|---|---|---|---|",
    ]
    for scheme in ("sharded", "gathered", "broadcast", "direct"):
        fit = calibration_of(scheme)
        rows.append(f"| {scheme} | {fit.rows} | {fit.factor:.2f} | {fit.tensor * 1e6:.0f} | x {fit.spread:.2f} |")
    return "\n".join(rows)


def _left_out() -> str:
    return "\n".join(
        f"- Row {row.number}, {row.what} ({row.citation}): {row.left_out}." for row in figures().published if row.left_out
    )


def _own_rounds() -> str:
    rows = [
        "| round | transport | read: forecast / measured, ms | error | pause to resume: forecast / measured, ms | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in figures().round:
        forecast = forecast_of(row.model, row.source, row.target, placement=row.placement)
        best = next(one for one in forecast.transports if one.transport == row.transport)
        read, pause = best.stages["transfer"], best.pause
        cells = (
            f"{row.model}, {row.source} to {row.target}, {row.placement}", f"`{row.transport}`",
            f"{read * 1e3:.1f} / {row.read * 1e3:.1f}", f"{read / row.read - 1:+.0%}",
            f"{pause * 1e3:.1f} / {row.pause * 1e3:.1f}", f"{pause / row.pause - 1:+.0%}",
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _kimi() -> str:
    rows = [
        "| trainer | transport | pause, s | busiest link, s | metadata once, s | pieces of a plan | change first, then |",
        "|---|---|---|---|---|---|---|",
    ]
    for source in ("pp=8,ep=32", "fsdp=256,ep=64", "fsdp=256"):
        forecast = forecast_of("kimi-k2", source, "tp=16,replicas=16", nic=400.0)
        best = next(one for one in forecast.transports if one.transport == forecast.best)
        changes = "; ".join(
            f"{change.what} ({change.pause:.1f} s, metadata {change.metadata:.0f} s)" for change in forecast.changes
        )
        pieces = f"{forecast.refit.plan_pieces:,}{': **refused**' if forecast.refused else ''}"
        rows.append(
            f"| `{source}` | `{best.transport}` | {best.pause:.1f} | {best.bottleneck.seconds:.1f} ({best.bottleneck.name}) | "
            f"{best.metadata:,.0f} | {pieces} | {changes} |"
        )
    return "\n".join(rows)


def _parameter(parameter: Any) -> str:
    value = parameter.metavar or parameter.name.upper()
    if choices := choices_of(parameter):
        value = "\\|".join(choices)
    if parameter.param_type_name == "argument":
        name = value if parameter.required else f"[{value}{'...' if parameter.nargs == -1 else ''}]"
    else:
        name = ", ".join((*parameter.opts, *parameter.secondary_opts)) + ("" if parameter.is_flag else f" {value}")
    default = getattr(parameter.default, "value", parameter.default)
    shown = not (getattr(parameter, "is_flag", False) or default in (None, "", 0) or "default" in parameter.help)
    needed = " Required." if parameter.required and name.startswith("-") else ""
    return f"| `{name}` | {parameter.help}{needed}{f' Default: `{default}`.' if shown else ''} |"


def _command(name: str, command: Any) -> str:
    rows = [_parameter(parameter) for parameter in command.params if not parameter.hidden and parameter.help]
    table = ["", "| argument or option | meaning |", "|---|---|", *rows] if rows else []
    return "\n".join([f"## {name}", "", inspect.cleandoc(command.help), *table])


def _commands() -> str:
    group = typer.main.get_command(cli)
    return "\n\n".join(_command(*each) for each in _with_commands("weightsync", group))


def _with_commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for below, each in getattr(command, "commands", {}).items():
        if not each.hidden:
            yield from _with_commands(f"{name} {below}", each)


def _errors() -> str:
    rows = ["| class | derives from | HTTP status | meaning |", "|---|---|---|---|"]
    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type):
            bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
            status = problems.status_of(kind())
            rows.append(f"| `{name}` | {bases} | {status.value} | {inspect.cleandoc(kind.__doc__ or '')} |")
    return "\n".join(rows)


def _side_by_side() -> str:
    rows = ["| way | move | pause to resume, verified |", "|---|---|---|"]
    for row in json.loads((ROOT / "docs" / "data" / "peers.json").read_text())["rows"]:
        cells = [
            " to ".join(f"{figure:,}" for figure in dict.fromkeys(row.get(column, ()))) for column in ("move", "pause_to_resume")
        ]
        if "error" in row:
            cells[0] = f"failed: {row['error']}"
        name = f"**{row['way']}**" if row["of"] == "weightsync" else row["way"]
        rows.append(f"| {name} ({row['detail']}) | {' | '.join(cells)} |")
    return "\n".join(rows)


def _pages(entries: list[dict[str, Any]], depth: int) -> list[str]:
    lines = []
    for title, value in (item for entry in entries for item in entry.items()):
        if isinstance(value, str):
            target = f"../{value}" if (ROOT / value).exists() else value
            lines.append(f"{'    ' * depth}- [{title}]({target})")
        else:
            lines += [f"{'    ' * depth}- {title}", *_pages(value, depth + 1)]
    return lines


def navigation() -> list[dict[str, Any]]:
    """Return the site's navigation, as ``mkdocs.yml`` has it."""
    text = (ROOT / "mkdocs.yml").read_text()
    entries: list[dict[str, Any]] = yaml.safe_load(text.partition("\nnav:\n")[2].partition("\n\n")[0])
    return entries


def exposed_names() -> set[str]:
    """Return the names of all samples of all metrics, as queries use them."""
    names = set()
    for metric in (*COORDINATOR_METRICS, *AGENT_METRICS):
        suffixes = ("", "_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",)
        names |= {f"weightsync_{metric.name}{suffix}" for suffix in suffixes}
    return names


def _tested() -> list[dict[str, str]]:
    """What was tested on which machines: the one source of README's table, of the support page and of the frameworks' pages."""
    rows: list[dict[str, str]] = json.loads((ROOT / "docs" / "data" / "tested.json").read_text())
    return rows


def _frameworks() -> str:
    rows = ["| you use | do this | tested on |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| [{row['use']}](docs/{row['page']}) | {row['do']} | {row['tested_on']} |" for row in _tested())])


def _support() -> str:
    rows = ["| you use | tested on | what ran |", "|---|---|---|"]
    return "\n".join(
        [*rows, *(f"| [{row['use']}](../{row['page']}) | {row['tested_on']} | {row['detail']} |" for row in _tested())]
    )


def _tested_on(name: str) -> str:
    (row,) = (row for row in _tested() if row["id"] == name)
    return f"**Tested on: {row['tested_on']}.** {row['use']}: {row['detail']}."


def _spread(milliseconds: list[float]) -> str:
    low, median, high = milliseconds
    return f"{median:g} ({low:g} to {high:g})"


def _doors() -> str:
    rows = [
        "| through | whole call ms | `weightsync.Trainer`, same run | ratio | paused ms | its own way | result | setup |",
        "|---" * 8 + "|",
    ]
    for row in json.loads((ROOT / "docs" / "data" / "doors.json").read_text())["rows"]:
        call, library, own = ("" if row[name] is None else _spread(row[name]) for name in ("call_ms", "library_ms", "own_ms"))
        ratio = f"{row['call_ms'][1] / row['library_ms'][1]:.2f}"
        if "library" in row:
            library, ratio = f"{library}, {row['library']}", ""
        setup = f"{row['model']}; {row['machine']}; {row['versions']}; {row['date']}"
        own = f"{own}, {row['own']}" if own else row["own"]
        cells = (
            row["door"],
            call,
            library,
            ratio,
            f"{row['paused_ms']:g}",
            own,
            f"{row['delivery']}, `{row['verified']}`",
            setup,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "through each framework": _doors,
    "frameworks": _frameworks,
    "support": _support,
    **{
        f"tested on {row['id']}": partial(_tested_on, row["id"])
        for row in _tested()
        if row["page"] not in ("guides/trainer.md", "guides/engine.md", "guides/streams.md")
    },
    "agent settings": lambda: _settings(config.ClientSettings),
    "timeouts": lambda: _settings(config.Timeouts),
    "other variables": _variables,
    "coordinator settings": lambda: _settings(config.ServerSettings),
    "coordinator limits": lambda: _settings(config.Limits),
    "commands": _commands,
    "errors": _errors,
    "side by side": _side_by_side,
    "pages": lambda: "\n".join(_pages(navigation()[1:], 0)),
    "transports": _transports,
    "coordinator metrics": lambda: _metrics(COORDINATOR_METRICS),
    "agent metrics": lambda: _metrics(AGENT_METRICS),
    "forecast of published refits": _published,
    "forecast errors": _published_summary,
    "forecast rows left out": _left_out,
    "forecast of own rounds": _own_rounds,
    "forecast of one trillion": _kimi,
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
