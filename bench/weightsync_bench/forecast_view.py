"""A forecast as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.text import Text

from weightsync.cli.tables import notes, plain_text, titled_table
from weightsync.protocol.round_log import size
from weightsync_bench.forecast.forecast import Forecast, RefitForecast

_WHOLE_SECONDS, _BAR_WIDTH = 100, 24
_SCHEMES = {"gathered": "gather whole tensors first", "broadcast": "broadcast everything to all ranks"}


def forecast_view(forecast: RefitForecast, *, details: bool) -> RenderableType:
    """The answer, what crosses, and what to change first; with details stages, memory and links."""
    refit, usable = forecast.refit, [transport for transport in forecast.transports if not transport.unusable]
    best = next((transport for transport in usable if transport.transport == forecast.best), None)
    views: list[RenderableType] = [
        _answer(best),
        Text(
            f"{refit.tensors:,} tensors, {size(refit.nbytes)}; hosts with trainer GPUs: {refit.trainer_hosts}, with "
            f"engine GPUs: {refit.engine_hosts}. An engine GPU receives {size(refit.received)} in {refit.pieces:,} pieces, "
            f"half of the bytes in runs of at most {size(refit.run)}. A trainer GPU sends {size(refit.sent)}."
        ),
    ]
    if forecast.refused:
        views.append(plain_text(f"{forecast.refused}.", "red"))
    names, stages, memory = (usable[0].stages if usable else ()), list[list[Text]](), list[list[Text]]()
    for transport in usable:
        style = "bold" if transport.transport == forecast.best else ""
        seconds = map(_seconds, (*transport.stages.values(), transport.pause))
        stages.append([plain_text(cell, style) for cell in (transport.transport, *seconds)])
        cells = (transport.transport, *map(size, transport.memory.values()), transport.bottleneck.name)
        memory.append([plain_text(cell, style) for cell in cells])
    tables: list[RenderableType] = [
        titled_table(
            "seconds by stage (metadata: once, while training goes on; place: before the pause)",
            ("transport", *(f">{name}" for name in names), ">pause"), stages,
        ),
        titled_table(
            "extra memory, and what limits the transfer",
            ("~transport", ">trainer rank", ">engine rank", ">coordinator", "~bottleneck"), memory,
        ),
    ]  # fmt: skip
    tables += notes(
        (transport.transport, plain_text(f"not usable: {transport.unusable}", "dim"))
        for transport in forecast.transports
        if transport.unusable
    )
    if best is not None:
        tables += [links_view([best]), _basis(best, forecast.others)]
    if details or best is None:
        views += tables
    if forecast.changes:
        rows = ((change.what, change.transport, _seconds(change.metadata), _seconds(change.pause)) for change in forecast.changes)
        views.append(titled_table("what to change first", ("~change", "~transport", ">metadata", ">pause"), rows))
    return Group(*views)


def links_view(transports: Sequence[Forecast]) -> RenderableType:
    """Bars: how long each link of some transports is busy in one round."""
    longest = max((link.seconds for transport in transports for link in transport.links), default=1.0)
    rows = list[tuple[object, ...]]()
    for transport in transports:
        for number, link in enumerate(transport.links):
            color = "red" if link.seconds == transport.bottleneck.seconds else "blue"
            count = "" if link.name.endswith("posted") else size(link.nbytes)
            bar = Bar(longest, 0, link.seconds, width=_BAR_WIDTH, color=color)
            rows.append((transport.transport if number == 0 else "", link.name, count, _seconds(link.seconds), bar))
    return titled_table("seconds by link at its rate", ("transport", "link", ">bytes", ">seconds", ""), rows)


def _answer(best: Forecast | None) -> Text:
    if best is None:
        return plain_text("No transport can do this update.\n", "bold red")
    memory = ", ".join(f"{size(nbytes)} at {party}" for party, nbytes in best.memory.items())
    return plain_text(
        f"About {_seconds(best.pause)} s of pause per update over {best.transport} ({_seconds(best.bottleneck.seconds)} s at the "
        f"rate of its busiest link). Extra memory: {memory}.\n", "bold",
    )  # fmt: skip


def _basis(best: Forecast, others: Mapping[str, float]) -> Text:
    lines = [
        f"\nBasis of the transfer: {best.basis}"
        + (f", which scatter by a factor of {best.spread:.1f}." if best.spread > 1 else "."),
        *(f"Systems that {_SCHEMES[name]}: {_seconds(value)} s for the transfer." for name, value in others.items()),
    ]
    return plain_text("\n".join(lines))


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= _WHOLE_SECONDS else f"{value:.3f}" if value < 1 else f"{value:.2f}"
