"""Rounds as OpenTelemetry traces: a span for the round, one for each process below it, and one for each phase. Extra ``[otel]``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightsync.daemon_threads import in_daemon_thread
from weightsync.errors import ConfigurationError
from weightsync.model import RoundTrace, Track

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_CLOSE_SECONDS = 5.0


class OtelExport:
    """Exports traces of rounds that have ended, on the SDK's own thread.

    ``exporter`` defaults to OTLP over HTTP, which reads the standard variables (``OTEL_EXPORTER_OTLP_ENDPOINT``).

    Raises:
        ConfigurationError: The extra is not installed.
    """

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter()
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"WEIGHTSYNC_OTEL=on needs {error.name!r}, which is not installed: pip install 'weightsync[otel]'"
            ) from None

        class Ids(RandomIdGenerator):
            """Gives a round's own span the ids that its calls carried."""

            given: RoundTrace | None = None

            def generate_trace_id(self) -> int:
                """See :class:`RandomIdGenerator`."""
                return super().generate_trace_id() if self.given is None else int(self.given.trace_id, 16)

            def generate_span_id(self) -> int:
                """See :class:`RandomIdGenerator`."""
                given, self.given = self.given, None
                return super().generate_span_id() if given is None else int(given.span_id, 16)

        self._ids = Ids()
        self._provider = TracerProvider(
            id_generator=self._ids, resource=Resource.create({"service.name": "weightsync"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("weightsync")

    def export(self, trace: RoundTrace) -> None:
        """Queue the spans of a round. Never blocks; the SDK drops spans beyond its queue."""
        from opentelemetry.context import Context
        from opentelemetry.trace import StatusCode, set_span_in_context

        def at(seconds: float) -> int:
            return int(1e9 * (trace.started + seconds))

        self._ids.given = trace
        round_span = self._tracer.start_span(
            f"weightsync {'seed' if trace.seeding else 'publish'}",
            Context(),
            attributes={
                "weightsync.run": trace.run, "weightsync.round": trace.round, "weightsync.version": trace.number,
                "weightsync.epoch": trace.epoch,
            },
            start_time=at(0.0),
        )  # fmt: skip
        if trace.error is not None:
            round_span.set_status(StatusCode.ERROR, trace.error)
        context = set_span_in_context(round_span, Context())
        for track in trace.tracks:
            if not track.spans:
                continue
            ends = max(span.start + span.seconds for span in track.spans)
            member = self._tracer.start_span(track.member, context, attributes=_clock(track), start_time=at(track.spans[0].start))
            below = set_span_in_context(member, context)
            for span in track.spans:
                attributes: dict[str, str | float] = {"weightsync.member": track.member, "weightsync.busy_seconds": span.busy}
                if span.source:
                    attributes["weightsync.source"] = span.source
                if span.transport:
                    attributes |= {"weightsync.transport": span.transport, "weightsync.bytes": span.nbytes}
                phase = self._tracer.start_span(span.name, below, attributes=attributes, start_time=at(span.start))
                phase.end(at(span.start + span.seconds))
            member.end(at(ends))
        round_span.end(at(trace.seconds))

    async def aclose(self) -> None:
        """Export what is queued, for a few seconds at most."""
        shut = in_daemon_thread(self._provider.shutdown, "weightsync-otel")
        await asyncio.wait([asyncio.wrap_future(shut)], timeout=_CLOSE_SECONDS)


def _clock(track: Track) -> dict[str, str | float]:
    return {
        "weightsync.party": track.party,
        "weightsync.clock_offset_seconds": track.clock_offset,
        "weightsync.clock_error_seconds": track.clock_error,
    }
