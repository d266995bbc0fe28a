"""Draws the pictures of the docs from data in the repository: ``python -m tools.pictures`` (``make docs``).

Each picture is a function of one data file. The SVG ends with a stamp, a hash of the data, which ``tests/unit/test_site.py``
compares. Matplotlib is imported where it draws, so comparing needs none of it.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools import diagrams

__all__ = ["PICTURES", "drawn", "stamp"]

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data"
FOLDER = ROOT / "docs" / "pictures"
FAULTS = {"late, lazy": "too late,\nor nothing\nloaded", "read replicas": "source\nreplica fails"}
"""Plain heads for two columns of the fault campaign."""
OURS, PEER, DARK, LIGHT = "#3f51b5", "#9e9e9e", "#263238", "#eceff1"


_DARK = "@media(prefers-color-scheme:dark){#figure_1{filter:invert(.9) hue-rotate(180deg)}}"
"""Style of Matplotlib's pictures on dark pages: light and dark change places, hues stay."""


def _figure(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcdefaults()
    mpl.rcParams.update({"svg.hashsalt": "weightsync", "svg.fonttype": "none", "font.size": 10, "font.family": "sans-serif"})
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _svg(figure: Any, title: str) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    drawing = text.getvalue().replace("</style>", f"{_DARK}</style>", 1)
    return "\n".join(line.rstrip() for line in drawing.splitlines())


def waterfall(data: Any) -> str:
    """Draw the phases of a round, a row for each rank."""
    figure, axes = _figure(9.6, 3.6)
    spans = [event for event in data["traceEvents"] if event["ph"] == "X" and event["cat"] != "replica"]
    started = min(event["ts"] for event in spans)
    order = {"trainer": 0, "coordinator": 1}
    rows = sorted({event["args"]["member"] for event in spans}, key=lambda member: (order.get(member.split("/")[0], 2), member))
    colours = {
        "copy": "#7986cb", "digest": "#9fa8da", "plan": "#b0bec5", "sum": "#78909c", "verify": "#37474f", "pause": "#ef9a9a",
        "read": "#26a69a", "load": "#80cbc4", "finish": "#ffb74d", "flush": "#ffb74d", "resume": "#ffb74d", "connect": "#ce93d8",
    }  # fmt: skip
    for event in sorted(spans, key=lambda event: event["ts"]):
        kind, _, source = event["name"].partition(" ")
        row, start, length = rows.index(event["args"]["member"]), (event["ts"] - started) / 1e3, event["dur"] / 1e3
        if kind not in colours or length < 0.02:
            continue
        lane = 0.2 if source.endswith("/1") else -0.2 if source.startswith("trainer/") else 0.0
        height = 0.36 if lane else 0.74
        axes.barh(row + lane, max(length, 0.5), left=start, height=height, color=colours[kind])
        label = f"{kind}{f' from {source}' if source else ''}, {length:.{0 if length >= 1 else 1}f} ms"
        if length > 8:
            axes.text(start + 1, row + lane, label, size=7.5, va="center", color="white")
        elif kind in ("sum", "verify"):
            axes.text(start - 0.5, row, label.replace(f" from {source}", ""), size=7.5, va="center", ha="right", color=DARK)
    phases = {event["name"]: event for event in data["traceEvents"] if event.get("cat") == "replica"}
    paused, resumed = phases["move"]["ts"] - started, phases["commit"]["ts"] + phases["commit"]["dur"] - started
    axes.axvspan(paused / 1e3, resumed / 1e3, color="#fff3e0", zorder=0)
    axes.text(
        (resumed - 800) / 1e3, -0.3, f"the engine is paused, {(resumed - paused) / 1e3:.0f} ms", size=8, ha="right", va="center"
    )
    other = data["otherData"]
    axes.set_xlim(0, resumed / 1e3)
    axes.set_yticks(range(len(rows)), [row.replace("bench/", "engine rank ").replace("trainer/", "trainer rank ") for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"milliseconds. Clocks of ranks are aligned to {other['clock_error_us'] / 1e3:.1f} ms")
    nbytes = sum(event["args"].get("bytes", 0) for event in spans)
    title = (
        f"The engine is paused for {(resumed - paused) / 1e3:.0f} ms of a round of {1e3 * other['seconds']:.0f} ms: "
        f"{nbytes / 1e6:.0f} MB through shared memory, on 2 cores"
    )
    axes.set_title(title, loc="left", size=10.5)
    _plain(axes)
    return _svg(figure, "A round by rank and phase")


def grpo(data: Any) -> str:
    """Draw reward and staleness of two runs."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcdefaults()
    mpl.rcParams.update({"svg.hashsalt": "weightsync", "svg.fonttype": "none", "font.size": 10, "font.family": "sans-serif"})
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for index, (run, colour) in enumerate(zip(data, (PEER, OURS), strict=True)):
        name = f"{run['mode']}, bound {run['staleness_bound']}"
        steps = [(number + 1) * run["steps"] // len(run["rewards"]) for number in range(len(run["rewards"]))]
        left.plot(steps, run["rewards"], color=colour, marker="o", markersize=3, label=name)
        ages = range(run["staleness_bound"] + 1)
        shares = [run["staleness"].get(str(age), 0) / run["samples"] for age in ages]
        right.bar([age + 0.4 * index - 0.2 for age in ages], shares, width=0.38, color=colour, label=name)
    left.set(xlabel="training step", ylabel="reward, mean of 10 steps", ylim=(0, 0.8))
    left.legend(frameon=False, fontsize=9)
    right.set(xlabel="age of the oldest token, in versions", ylabel="share of samples")
    right.set_xticks(range(4))
    for axes in (left, right):
        _plain(axes)
    rewards = " and ".join(f"{run['reward_last']:.2f} {run['mode'].replace('-', ' ')}" for run in reversed(data))
    figure.suptitle(f"Reward of the last 20 steps: {rewards}", x=0.01, ha="left", size=11, weight="bold")
    return _svg(figure, "Reward and staleness of GRPO on vLLM")


def faults(data: Any) -> str:
    """Draw how many cases of each fault ran over each transport, and how they ended."""
    figure, axes = _figure(9.6, 3.9)
    rows, columns = list(data["cases"]), [FAULTS.get(fault, fault) for fault in data["faults"]]
    for row, name in enumerate(rows):
        for column, count in enumerate(data["cases"][name]):
            axes.barh(row, 0.94, left=column - 0.47, height=0.86, color=LIGHT if count is None else "#66bb6a")
            axes.text(column, row, count or "", ha="center", va="center", size=10, color=DARK)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(range(len(columns)), columns, size=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.invert_yaxis()
    for spine in axes.spines.values():
        spine.set_visible(False)
    cases, answers = (sum(run[key] for run in data["runs"]) for key in ("cases", "requests"))
    wrong = data["torn_responses"] + data["mislabelled_responses"]
    axes.set_title(
        f"{cases:,} cases of injected faults, {answers:,} answers, {wrong} wrong", loc="left", size=11, weight="bold", pad=12
    )
    axes.set_xlabel(
        f"Number of cases. Grey: not in the campaign.\n{data['torn_responses']} half-updated answers, "
        f"{data['mislabelled_responses']} with a wrong version, {data['hangs']} hangs, {data['leaks']} leaks"
    )
    return _svg(figure, "Cases of the fault campaign")


def demo(data: Any) -> str:
    """Draw a terminal with the demo's output: all of it at once, without the columns that say little of so small a model."""
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.text import Text

    texts = [part for line in data["lines"] for part in re.split(r"(?<=:) (?=0 torn)|(?<=;) (?=direct)", line["text"])]
    head = next(text for text in texts if text.split()[:2] == ["version", "replica"])
    start = head.index("commit") + len("commit")
    paused, digest, last = (head.index(name) for name in (" paused", "digest", "tokens"))
    row = re.compile(r" (?:version|─|\d+ +replica)")
    texts = [text[:start] + text[paused:digest] + text[last:] if row.match(text) else text for text in texts]
    console = Console(
        record=True, width=2 + max(map(len, texts)), file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text.assemble(("$ ", "bold green"), (data["command"], "bold")), soft_wrap=True)
    for text in texts:
        console.print(Text(text, style="bold green" if text.startswith("ok:") else ""), soft_wrap=True)
    template = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # no request to another host
    return "\n".join(
        line.rstrip() for line in console.export_svg(title="weightsync", unique_id="demo", code_format=template).splitlines()
    )


PICTURES: dict[str, tuple[Callable[[Any], str], str]] = {
    "architecture": (diagrams.architecture, "architecture.json"),
    "waterfall": (waterfall, "round.json"),
    "peers": (diagrams.peers, "peers.json"),
    "delivery": (diagrams.delivery, "delivery.json"),
    "timeline": (diagrams.timeline, "timeline.json"),
    "states": (diagrams.states, "states.json"),
    "torn": (diagrams.torn, "torn.json"),
    "training": (diagrams.training, "trl_training.json"),
    "training_async": (diagrams.training, "trl_training_async.json"),
    "grpo": (grpo, "grpo.json"),
    "faults": (faults, "faults.json"),
    "demo": (demo, "demo.json"),
    "kill": (diagrams.kill, "kill.json"),
}
"""Function and data file of each picture."""


def stamp(name: str) -> str:
    """Return the comment that says from what a picture was drawn."""
    file = PICTURES[name][1]
    digest = hashlib.sha256((DATA / file).read_bytes()).hexdigest()
    return f"<!-- drawn by tools/pictures.py from docs/data/{file}: {digest} -->\n"


def drawn(name: str) -> str:
    """Draw a picture."""
    function, file = PICTURES[name]
    return f"{function(json.loads((DATA / file).read_text())).rstrip()}\n{stamp(name)}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for picture in PICTURES:
        (FOLDER / f"{picture}.svg").write_text(drawn(picture))
