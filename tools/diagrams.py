"""Diagrams of the docs as SVG text, for light and dark pages alike: boxes, arrows, bars, and the style that they share.

Each diagram is a function of one data file; :mod:`tools.pictures` lists and stamps them. Texts are large, because phones show
a diagram at half of its width.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

__all__ = ["architecture", "delivery", "kill", "peers", "states", "timeline", "torn", "training"]

_STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1c2733}
.page{fill:#fff}.soft{fill:#51606f}.line{stroke:#7b8794;fill:none}.tip{fill:#7b8794}
.panel{fill:#eef1f4}.box{fill:#dbe2e9}.ours{fill:#3f51b5}.good{fill:#1b7f5c}.bad{fill:#c0392b}.warn{fill:#b26a00}
.peer{fill:#9aa5b1}.floor{fill:#c8b560}.range{opacity:.45}.on{fill:#fff}
.ours-line{stroke:#3f51b5;fill:none}.bad-line{stroke:#c0392b;fill:none}
@media(prefers-color-scheme:dark){
text{fill:#e4e9ee}.page{fill:#14181d}.soft{fill:#a3b0bd}.line{stroke:#8d99a6}.tip{fill:#8d99a6}.panel{fill:#1d242c}.box{fill:#323d49}.ours{fill:#7c8cf0}
.good{fill:#3fae86}.bad{fill:#e57368}.warn{fill:#e0a040}.peer{fill:#76828f}.on{fill:#fff}.ours-line{stroke:#7c8cf0}.bad-line{stroke:#e57368}
}
""".replace("\n", "")


class _Canvas:
    """An SVG drawing of ``width`` by ``height`` units."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-16 -8 {width + 32} {height + 16}" '
            f'width="{width}" height="{height}" '
            f'role="img" aria-labelledby="title description">\n<title id="title">{escape(title)}</title>\n'
            f'<desc id="description">{escape(description)}</desc>\n<style>{_STYLE}</style>\n'
            f'<rect class="page" x="-16" y="-8" width="{width + 32}" height="{height + 16}"/>'
        )
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box", radius: float = 8) -> None:
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{min(radius, height / 2):g}"/>'
        )

    def text(
        self, x: float, y: float, text: str, size: float = 20, kind: str = "", anchor: str = "start", bold: bool = False
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        named = f' class="{kind}"' if kind else ""
        self._parts.append(
            f'<text{named} x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def label(self, x: float, y: float, width: float, height: float, text: str, kind: str = "box", size: float = 20) -> None:
        """A box with a line of text in its middle."""
        self.box(x, y, width, height, kind)
        self.text(x + width / 2, y + height / 2 + size * 0.35, text, size, "" if kind in ("box", "panel") else "on", "middle")

    def arrow(self, x1: float, y1: float, x2: float, y2: float, kind: str = "line", width: float = 2.5) -> None:
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        tip, half = 12, 6
        bx, by = x2 - tip * dx, y2 - tip * dy
        fill = {"line": "tip", "ours-line": "ours", "bad-line": "bad"}[kind]
        self._parts.append(
            f'<path class="{kind}" stroke-width="{width:g}" d="M{x1:g} {y1:g}L{bx:.1f} {by:.1f}"/>'
            f'<path class="{fill}" d="M{x2:g} {y2:g}L{bx - half * dy:.1f} {by + half * dx:.1f}'
            f'L{bx + half * dy:.1f} {by - half * dx:.1f}Z"/>'
        )

    def path(self, points: list[tuple[float, float]], kind: str, width: float) -> None:
        """A line through ``points``."""
        steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self._parts.append(f'<path class="{kind}" stroke-width="{width:g}" stroke-linejoin="round" d="M{steps}"/>')

    def svg(self) -> str:
        return "\n".join([self._head, *self._parts, "</svg>"])


def peers(data: Any) -> str:
    """Draw how long systems take to move the same tensors to another GPU: a bar for each."""
    rows = [(_bar(row), row) for row in data["rows"] if row.get("chart")]
    ours = next(bar for bar, row in rows if row["of"] == "weightsync")
    others = [bar for bar, row in rows if row["of"] == "other"]
    least, most = min(low for low, _ in others) / ours[1], max(high for _, high in others) / ours[0]
    finding = f"61 GB to another GPU in {ours[0]} ms, verified:"
    rest = f"{least:.1f} to {most:.1f} times as fast as the others' transfer alone"
    canvas = _Canvas(720, 96 + 62 * len(rows) + 16, finding + " " + rest, f"{data['what']}, {data['date']}; milliseconds")
    canvas.text(0, 28, finding, 26, bold=True)
    canvas.text(0, 60, rest, 23, bold=True)
    scale = 555 / max(high for (_, high), _ in rows)
    for index, ((low, high), row) in enumerate(rows):
        y = 80 + 62 * index
        kind = {"weightsync": "ours", "other": "peer", "floor": "floor"}[row["of"]]
        canvas.text(0, y + 20, row["chart"], 21, bold=row["of"] == "weightsync")
        canvas.box(0, y + 28, high * scale, 24, f"{kind} range", 3)
        canvas.box(0, y + 28, low * scale, 24, kind, 3)
        numbers = " to ".join(f"{value:,}" for value in dict.fromkeys((low, high)))
        canvas.text(high * scale + 8, y + 47, f"{numbers} ms", 21)
    return canvas.svg()


def _bar(row: Any) -> tuple[int, int]:
    low, high = row["pause_to_resume" if row["of"] == "weightsync" else "move"]
    return low, high


def architecture(data: Any) -> str:
    """Draw who sends what to whom, in the order of an update."""
    canvas = _Canvas(900, 560, data["title"], data["description"])
    canvas.box(290, 0, 320, 90, "panel")
    for line, text in enumerate(data["coordinator"]):
        canvas.text(450, 36 + 32 * line, text, 22 if line == 0 else 19, anchor="middle", bold=line == 0)
    for x, side in ((0, "trainer"), (620, "engine")):
        canvas.box(x, 140, 280, 360, "panel")
        canvas.text(x + 140, 172, data[side]["title"], 22, anchor="middle", bold=True)
    for rank in range(4):
        canvas.label(20, 188 + 76 * rank, 240, 62, data["trainer"]["rank"].format(rank), "ours")
    for replica in range(2):
        canvas.box(632, 184 + 156 * replica, 256, 148)
        canvas.text(646, 208 + 156 * replica, data["engine"]["replica"].format(replica), 19)
        for rank in range(2):
            canvas.label(646, 218 + 156 * replica + 56 * rank, 228, 48, data["engine"]["rank"].format(rank), "good")
            for source in (rank, rank + 2):
                canvas.arrow(264, 219 + 76 * source, 642, 242 + 156 * replica + 56 * rank, "ours-line")
    canvas.arrow(140, 136, 286, 60)
    canvas.arrow(614, 60, 760, 136)
    for line, text in enumerate(data["publish"]):
        canvas.text(190, 44 + 26 * line, text, 20, anchor="end")
    for line, text in enumerate(data["commands"]):
        canvas.text(716, 44 + 26 * line, text, 20)
    for line, text in enumerate(data["bytes"]):
        canvas.text(450, 146 + 26 * line, text, 20, anchor="middle")
    canvas.text(0, 540, data["note"], 20, "soft")
    return canvas.svg()


def delivery(data: Any) -> str:
    """Draw a broadcast of everything beside each rank reading its shard."""
    canvas = _Canvas(900, 560, data["title"], data["description"])
    for column, side in enumerate((data["broadcast"], data["shards"])):
        x = 460 * column
        kind = "bad-line" if column == 0 else "ours-line"
        canvas.text(x, 30, side["title"], 24, bold=True)
        canvas.text(x, 60, side["bytes"], 20, "soft")
        for rank in range(4):
            canvas.label(x, 90 + 100 * rank, 130, 70, f"trainer {rank}")
            canvas.label(x + 300, 90 + 100 * rank, 130, 70, f"engine {rank}", "good")
        if column == 0:
            for rank in range(1, 4):
                canvas.arrow(x + 65, 90 + 100 * rank, x + 65, 162 + 100 * (rank - 1), "line")
            for rank in range(4):
                canvas.arrow(x + 132, 125, x + 296, 125 + 100 * rank, kind, 9)
        else:
            for rank in range(4):
                for source in (rank, rank ^ 1):
                    canvas.arrow(x + 132, 125 + 100 * source, x + 296, 125 + 100 * rank, kind, 2.5)
        for line, text in enumerate(side["notes"]):
            canvas.text(x, 510 + 28 * line, text, 20, "soft")
    return canvas.svg()


def timeline(data: Any) -> str:
    """Draw one update both ways on one time line, to scale."""
    canvas = _Canvas(900, 150 + 120 * len(data["ways"]), data["title"], data["description"])
    canvas.text(0, 28, data["title"], 24, bold=True)
    end = max(sum(part["ms"] for part in way["parts"]) for way in data["ways"])
    scale = 880 / end
    for index, way in enumerate(data["ways"]):
        y = 50 + 120 * index
        canvas.text(0, y + 24, way["name"], 21, bold=True)
        x = 0.0
        for part in way["parts"]:
            width = part["ms"] * scale
            canvas.box(x, y + 36, max(width, 2), 34, part["kind"], 3)
            text = f"{part['name']}, {part['ms']:,} ms"
            if part["name"] and width > 11 * len(text):
                canvas.text(x + 8, y + 60, text, 19, "on")
            x += width
        canvas.text(0, y + 96, way["note"], 19, "soft")
    y = 60 + 120 * len(data["ways"])
    step = data["tick_ms"]
    for tick in range(0, int(end) + 1, step):
        canvas.box(tick * scale, y, 2, 10, "peer", 0)
        canvas.text(tick * scale, y + 34, f"{tick:,} ms", 19, "soft", "start" if tick == 0 else "middle")
    canvas.text(0, y + 66, data["source"], 18, "soft")
    return canvas.svg()


def states(data: Any) -> str:
    """Draw the states of a replica, and what leads from one to another."""
    canvas = _Canvas(900, 430, data["title"], data["description"])
    places = {
        "joining": (0, 60),
        "ready": (250, 60),
        "updating": (500, 60),
        "serving": (740, 60),
        "out": (500, 290),
        "lost": (0, 290),
    }
    kinds = {"serving": "good", "out": "bad", "updating": "warn"}
    for name, (x, y) in places.items():
        canvas.label(x, y, 160, 60, data["states"][name], kinds.get(name, "box"), 22)
    arrows = data["arrows"]
    canvas.arrow(162, 90, 246, 90)
    canvas.text(204, 40, arrows["join"], 18, "soft", "middle")
    canvas.arrow(412, 90, 496, 90)
    canvas.text(454, 40, arrows["update"], 18, "soft", "middle")
    canvas.arrow(662, 80, 736, 80)
    canvas.text(700, 40, arrows["verified"], 18, "soft", "middle")
    canvas.arrow(736, 104, 662, 104)
    canvas.text(700, 146, arrows["next"], 18, "soft", "middle")
    canvas.arrow(560, 122, 560, 286)
    canvas.text(552, 200, arrows["failed"], 18, "soft", "end")
    canvas.arrow(600, 286, 600, 122)
    canvas.text(610, 200, arrows["again"], 18, "soft")
    canvas.arrow(496, 320, 162, 320)
    canvas.text(330, 308, arrows["gone"], 18, "soft", "middle")
    canvas.arrow(60, 286, 60, 122)
    canvas.text(70, 210, arrows["back"], 18, "soft")
    canvas.text(0, 400, data["note"], 19, "soft")
    return canvas.svg()


def torn(data: Any) -> str:
    """Draw what a torn and a mislabelled replica are, beside a right one."""
    canvas = _Canvas(900, 330, data["title"], data["description"])
    for column, case in enumerate(data["cases"]):
        x = 310 * column
        canvas.text(x, 28, case["title"], 23, bold=True)
        canvas.box(x, 46, 270, 170, "panel")
        canvas.text(x + 135, 78, f"label: {case['label']}", 20, anchor="middle")
        for layer, version in enumerate(case["layers"]):
            kind = "ours" if version == data["new"] else "peer"
            canvas.label(x + 20, 92 + 30 * layer, 230, 26, f"layer {layer}: {version}", kind, 17)
        for line, text in enumerate(case["notes"]):
            canvas.text(x, 246 + 26 * line, text, 19, "soft")
    return canvas.svg()


def kill(data: Any) -> str:
    """Draw the recording of the demo with kills on a time line: who was killed when, and what each replica served."""
    lines = [(line["seconds"], line["text"]) for line in data["lines"]]
    start, end = (
        next(seconds for seconds, text in lines if text.startswith(mark)) for mark in ("training, publishing", "checking")
    )
    (verdict,) = (match[0] for _, text in lines if (match := re.search(r"\d+ responses checked|$", text)) and match[0])
    (outcome,) = (match[0] for _, text in lines if (match := re.search(r"\d+ torn, \d+ mislabelled", text)))
    verdict = f"{verdict}: {outcome}"
    title = f"Three processes killed in the middle of updates: {verdict}"
    names = ["coordinator", "trainer-1", "replica-0", "replica-1"]
    canvas = _Canvas(900, 116 + 66 * len(names), title, f"Recording of {data['command']}, on 2 shared cores")
    canvas.text(0, 26, "Three processes killed in the middle of updates:", 22, bold=True)
    canvas.text(0, 54, verdict, 20, "soft")
    left, scale = 130, 760 / (end - start)
    for index, name in enumerate(names):
        y = 72 + 66 * index
        canvas.text(0, y + 28, name, 20)
        spans, killed = _served(name, lines, start, end)
        for since, until, label, kind in spans:
            x, width = left + (since - start) * scale, (until - since) * scale
            canvas.box(x, y + 4, max(width - 1.5, 1), 36, kind, 3)
            if 11 * len(label) < width:
                canvas.text(x + width / 2, y + 28, label, 18, "on", "middle")
        for moment in killed:
            x = left + (moment - start) * scale
            canvas.box(x - 2, y - 2, 4, 48, "bad", 0)
            canvas.text(x - 6, y + 60, "kill -9", 17, "soft", "end")
    y = 82 + 66 * len(names)
    for tick in range(0, int(end - start) + 1, 20):
        canvas.text(left + tick * scale, y + 16, f"{tick} s", 18, "soft", "middle")
    return canvas.svg()


def _served(
    name: str, lines: list[tuple[float, str]], start: float, end: float
) -> tuple[list[tuple[float, float, str, str]], list[float]]:
    """Spans of what ``name`` did, as (from, to, label, style), and the moments when it was killed."""
    replica = name.startswith("replica")
    label, kind, since = ("starts", "peer", start) if replica else ("runs", "ours", start)
    spans, killed = [], []
    for seconds, text in lines:
        now = None
        if text.startswith(f"killing {name} "):
            killed.append(seconds)
            now = ("restarts", "bad")
        elif text.startswith(f"{name} is back") and not replica:
            now = ("runs", "ours")
        elif replica and (match := re.match(rf"  round \d+  {name}  serving .*  version (\S+)", text)):
            now = (f"serves {match[1]}", "good")
        elif replica and re.match(rf"  round \d+  {name}  (lost|dirty|out of service)", text):
            now = ("out of service", "bad") if label != "restarts" else None
        if now and start <= seconds <= end:
            spans.append((since, seconds, label, kind))
            (label, kind), since = now, seconds
    return [*spans, (since, end, label, kind)], killed


def training(data: Any) -> str:
    """Draw the rewards of whole training runs, each seed by two ways."""
    rows = data["rows"]
    title = "The same rewards at every step, for every seed" if _equal(rows) else "Rewards by seed and way"
    canvas = _Canvas(900, 430, title, f"{data['what']}, {data['date']}")
    canvas.text(0, 28, title, 24, bold=True)
    left, top, width, height, steps = 60, 60, 830, 290, max(row["steps"] for row in rows)
    for tick in (0.4, 0.6, 0.8, 1.0):
        y = top + height * (1.0 - tick) / 0.6
        canvas.box(left, y, width, 1, "peer range", 0)
        canvas.text(left - 8, y + 6, f"{tick:g}", 18, "soft", "end")
    for row in sorted(rows, key=lambda row: row["way"] == "weightsync"):
        points = [
            (left + width * step / (steps - 1), top + height * (1.0 - reward) / 0.6) for step, reward in enumerate(row["rewards"])
        ]
        ours = row["way"] == "weightsync"
        canvas.path(points, "ours-line" if ours else "line", 2.5 if ours else 7)
    canvas.text(left, top + height + 30, f"training step 1 to {steps}; reward between 0 and 1", 18, "soft")
    for place, way, label in ((0, "weightsync", "weightsync"), (410, "own", "TRL's own sync")):
        ours = way == "weightsync"
        canvas.path(
            [(left + place, top + height + 60), (left + place + 40, top + height + 60)],
            "ours-line" if ours else "line",
            2.5 if ours else 7,
        )
        ends = [end for row in rows if row["way"] == way for end in row["finished"].items()]
        cut = sum(count for reason, count in ends if reason not in {"length", "stop"})
        step = sorted(row["step_ms"] for row in rows if row["way"] == way)
        canvas.text(left + place + 50, top + height + 66, f"{label}: {step[len(step) // 2]:.0f} ms per step, {cut} cut", 18)
    return canvas.svg()


def _equal(rows: Any) -> bool:
    by_seed: dict[int, set[tuple[float, ...]]] = {}
    for row in rows:
        by_seed.setdefault(row["seed"], set()).add(tuple(row["rewards"]))
    return all(len(curves) == 1 for curves in by_seed.values())
