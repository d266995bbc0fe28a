"""Rounds as OpenTelemetry traces, through the real SDK."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import weightsync
from weightsync.config import ServerSettings
from weightsync.errors import ConfigurationError
from weightsync.server import app
from weightsync.server.otel import OtelExport
from weightsync.server.server import BackgroundServer


class Observed(weightsync.ModuleAdapter):
    """An engine whose own code uses OpenTelemetry."""

    trace_id = 0

    def flush(self) -> bool:
        from opentelemetry import trace

        self.trace_id = trace.get_current_span().get_span_context().trace_id
        return super().flush()


def test_a_round_is_a_trace(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs the extra [otel]")
    exporter = export.InMemorySpanExporter()
    monkeypatch.setattr(app, "OtelExport", lambda: OtelExport(exporter))
    adapter = Observed(torch.nn.Linear(64, 64))
    with BackgroundServer(ServerSettings(port=0, run="run", otel="on")) as server:
        options: dict[str, Any] = {"coordinator": server.url, "token": server.token}
        with weightsync.Trainer(torch.nn.Linear(64, 64), **options) as trainer, weightsync.Engine(adapter, "r", **options):
            trainer.publish()
        [traced] = server.coordinator.past.traces
        trace = traced.trace
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert {"weightsync publish", "trainer/0", "r/0", "copy", "pause", "read", "flush", "resume", "verify"} <= set(spans)
    assert {format(span.context.trace_id, "032x") for span in spans.values()} == {trace.trace_id}
    root = spans["weightsync publish"]
    assert (root.parent, format(root.context.span_id, "016x")) == (None, trace.span_id)
    assert adapter.trace_id == root.context.trace_id, "what the engine's own code records belongs to the round"
    for name, above in (("r/0", root), ("trainer/0", root), ("flush", spans["r/0"]), ("copy", spans["trainer/0"])):
        assert spans[name].parent.span_id == above.context.span_id
        assert above.start_time <= spans[name].start_time + 1e6
        assert spans[name].end_time <= above.end_time + 1e6
    assert (spans["read"].attributes["weightsync.transport"], spans["read"].attributes["weightsync.bytes"]) == ("inproc", 16640)
    assert spans["r/0"].attributes["weightsync.clock_error_seconds"] > 0


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigurationError, match=r"weightsync\[otel\]"):
        OtelExport()
