"""The coordinator's metrics for Prometheus. No label is a process id or a version: their values would never end."""

from __future__ import annotations

import re
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from prometheus_client import Counter, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily

from weightsync import __version__, errors
from weightsync.coordinator.events import Audited, RoundEnded
from weightsync.coordinator.round_trace import RoundTracer
from weightsync.coordinator.status import Gauges
from weightsync.model import SERVICE, ReplicaResult
from weightsync.protocol.messages import PROTOCOL

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("registered", "loaded", "updating", "dirty", "lost", "left", "refused")
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds, from 1 ms to 5 minutes."""
_MOST_ADAPTERS = 1000
_KIND = re.compile(r"(?:^|: )([A-Z][A-Za-z]+)(?=: )")


class Declared(NamedTuple):
    """One metric, as Prometheus and the documentation show it."""

    name: str
    """Without the prefix ``weightsync_``."""
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    help: str


BUILD_INFO = Declared("build_info", "gauge", ("version", "protocol"), "1; the labels say which release runs.")
COORDINATOR_METRICS = (
    BUILD_INFO,
    Declared("run_info", "gauge", ("run",), "1; the label is the id of the run."),
    Declared("published_version", "gauge", (), "Highest published version number of the latest epoch; -1 before the first."),
    Declared("stored_version", "gauge", (), "Number of the newest version in the store; -1 if none is known."),
    Declared("relay_failing", "gauge", (), "1 while a relay cannot read a newer version from its store, or publish it."),
    Declared("published_epoch", "gauge", (), "Latest epoch in which a version was published."),
    Declared("trainer_ranks", "gauge", (), "Connected trainer ranks."),
    Declared("replicas", "gauge", ("state", "service"), "Known replicas by state. Tensors of refused ones differ."),
    Declared("replicas_late", "gauge", (), "Connected replicas that do not serve the version that the trainer holds."),
    Declared("replicas_not_updated", "gauge", (), "Known replicas that the last round did not update: failed, refused or lost."),
    Declared("replica_state", "gauge", ("replica", "state", "service"), "1 for the replica's current state; others are absent."),
    Declared("replica_state_since_timestamp_seconds", "gauge", ("replica",), "Time of the replica's last state change."),
    Declared("replica_version", "gauge", ("replica",), "Version number that the replica serves; absent while it serves none."),
    Declared(
        "replica_staleness", "gauge", ("replica",),
        "Publications that are newer than the served version; all known ones while none is served.",
    ),
    Declared("adapters", "gauge", (), "Names of LoRA adapters of which a replica serves a version."),
    Declared("adapter_version", "gauge", ("adapter",), "Newest version number that a replica serves; of 1,000 adapters at most."),
    Declared("adapter_replicas", "gauge", ("adapter",), "Replicas that serve this version; of 1,000 adapters at most."),
    Declared("round_running", "gauge", (), "1 while a round runs."),
    Declared("rounds_queued", "gauge", (), "Rounds that wait for the running one."),
    Declared("round_seconds", "histogram", ("kind",), "Duration of a round; kind is publish or seed."),
    Declared("round_queue_seconds", "histogram", ("kind",), "Time that a round waited for earlier ones."),
    Declared("pause_seconds", "histogram", (), "Time for which a round paused a replica."),
    Declared("changed_share", "gauge", (), "Part of all words that the last version changed; absent where they are not listed."),
    Declared(
        "phase_seconds", "histogram", ("party", "phase"),
        "Duration of a phase of a round, of the replica or the rank that took longest for it.",
    ),
    Declared("slowest_rank_seconds", "gauge", ("phase", "rank"), "The rank that took longest for a phase of the last round."),
    Declared(
        "rounds_total", "counter", ("kind", "outcome", "reason"), "Ended rounds; reason is the class of the error, or empty."
    ),
    Declared(
        "replica_updates_total", "counter", ("outcome", "reason"),
        "Results of replicas in rounds: updated, failed, refused, lost or registered.",
    ),
    Declared("verification_failures_total", "counter", (), "Updates of replicas whose bytes differed from the published ones."),
    Declared("audit_seconds", "histogram", (), "Time in which a replica that serves read its weights again."),
    Declared("audit_failures_total", "counter", (), "Replicas whose weights were not what they had installed any more."),
    Declared(
        "received_bytes_total", "counter", ("transport",),
        "Bytes that engine ranks received; the transport is empty for rounds that were not traced.",
    ),
    Declared("transport_bytes_per_second", "gauge", ("transport",), "Bytes of the last round by the time that they took."),
    Declared("router_settled", "gauge", ("router",), "1 while the router knows which replicas serve now, otherwise 0."),
    Declared("last_success_timestamp_seconds", "gauge", (), "End of the last successful round; absent before the first."),
)  # fmt: skip


class Registry:
    """The metrics of one process, or of one coordinator in it, by the names that they are declared with.

    One of them is :data:`BUILD_INFO`, which is the same in all.
    """

    def __init__(self, declared: Iterable[Declared]) -> None:
        self._declared = tuple(declared)
        self._gauges: dict[str, list[tuple[dict[str, str], float]]] = {m.name: [] for m in self._declared if m.kind == "gauge"}
        self._counters, self._histograms = dict[str, Counter](), dict[str, Histogram]()
        for name, kind, labels, text in self._declared:
            if kind == "counter":
                self._counters[name] = Counter(f"weightsync_{name}", text, labels, registry=None)
            elif kind == "histogram":
                self._histograms[name] = Histogram(f"weightsync_{name}", text, labels, buckets=_BUCKETS, registry=None)
        self.replace("build_info", [({"version": __version__, "protocol": str(PROTOCOL)}, 1.0)])

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Add an observation to a histogram."""
        histogram = self._histograms[name]
        (histogram.labels(**labels) if labels else histogram).observe(seconds)

    def set(self, name: str, value: float) -> None:
        """Set a gauge without labels."""
        self.replace(name, [({}, value)])

    def replace(self, name: str, values: Iterable[tuple[dict[str, str], float]]) -> None:
        """Set a gauge to these values by labels, and to no others."""
        self._gauges[name][:] = values

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Iterate over all metrics as they are now, see :class:`prometheus_client.registry.Collector`."""
        for name, kind, labels, text in self._declared:
            if kind == "gauge":
                family = GaugeMetricFamily(f"weightsync_{name}", text, labels=labels)
                for given, value in list(self._gauges[name]):
                    family.add_metric([given[label] for label in labels], value)
                yield family
                continue
            for metric in (self._counters[name] if kind == "counter" else self._histograms[name]).collect():
                # Without the times at which counters were created: rates do not need them, and they are as many lines again.
                metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
                yield metric


class CoordinatorMetrics:
    """Metrics of one coordinator: what its rounds added up to, and its state at the moment of a scrape."""

    def __init__(self) -> None:
        self._registry = Registry(COORDINATOR_METRICS)

    def count(self, event: RoundEnded, traced: RoundTracer | None) -> None:
        """Add a round that has ended, and what is known of where its time went."""
        registry, result = self._registry, event.result
        kind = "seed" if event.seeding else "publish"
        succeeded = result is not None and result.ok
        reason = "" if succeeded else _reason(event.error) if result is None else "RoundFailed"
        registry.add("rounds_total", kind=kind, outcome="ok" if succeeded else "failed", reason=reason)
        registry.observe("round_seconds", event.seconds, kind=kind)
        registry.observe("round_queue_seconds", event.queued, kind=kind)
        if traced is not None:
            self._count_traced(traced)
        if result is None:
            return
        if result.ok:
            registry.set("last_success_timestamp_seconds", result.ended)
        registry.replace("changed_share", [] if result.changed is None else [({}, result.changed)])
        if "place" in result.phases and not event.seeding:
            registry.observe("phase_seconds", result.phases["place"], party="coordinator", phase="place")
        for transport, nbytes in (result.transports or {"": result.nbytes}).items():
            registry.add("received_bytes_total", nbytes, transport=transport)
        self._count_replicas(result.replicas)

    def count_audit(self, event: Audited) -> None:
        """Add a look at what a replica serves."""
        self._registry.observe("audit_seconds", event.seconds)
        self._registry.add("audit_failures_total", float(event.error is not None))

    def _count_replicas(self, replicas: Iterable[ReplicaResult]) -> None:
        registry, longest, outcomes = self._registry, dict[str, float](), Counts[tuple[str, str]]()
        for replica in replicas:
            absent = replica.state if replica.state in ("refused", "lost", "registered") else "failed"
            outcomes["updated" if replica.error is None else absent, _reason(replica.error)] += 1
            for phase, seconds in replica.phases.items():
                longest[phase] = max(longest.get(phase, 0.0), seconds)
            if "pause" in replica.phases:
                registry.observe("pause_seconds", replica.paused_seconds)
        for phase, seconds in longest.items():
            registry.observe("phase_seconds", seconds, party="replica", phase=phase)
        for (outcome, reason), count in outcomes.items():
            registry.add("replica_updates_total", count, outcome=outcome, reason=reason)
            if reason == "VerificationError":
                registry.add("verification_failures_total", count)

    def _count_traced(self, traced: RoundTracer) -> None:
        for (party, phase), slowest in traced.slowest.items():
            if " " not in phase:  # a call without an answer has no duration of its own
                self._registry.observe("phase_seconds", slowest.seconds, party=party, phase=phase)
        rates = [({"transport": name}, nbytes / seconds) for name, (nbytes, seconds) in traced.reads.items() if seconds > 0]
        self._registry.replace("transport_bytes_per_second", rates)

    def text(self, state: Gauges, routers: Mapping[str, bool] = {}) -> bytes:
        """Return all metrics in Prometheus' text format."""
        registry, replicas = self._registry, state.replicas
        adapters = list({adapter.name: adapter for adapter in state.adapters}.values())  # the newest is the last of its name
        for name, value in (
            ("published_version", state.last), ("published_epoch", state.epoch), ("trainer_ranks", len(state.trainer)),
            ("replicas_late", state.late), ("replicas_not_updated", state.missed), ("round_running", state.busy),
            ("rounds_queued", state.queued), ("stored_version", state.stored), ("adapters", len(adapters)),
            ("relay_failing", state.relay_failing),
        ):  # fmt: skip
            registry.set(name, float(value))
        registry.replace("router_settled", [({"router": name}, float(settled)) for name, settled in routers.items()])
        registry.replace("run_info", [({"run": state.run}, 1.0)])
        counts = Counts(replica.state for replica in replicas)
        registry.replace("replicas", [(_state(name), float(counts[name])) for name in _STATES])
        registry.replace("replica_state", [({"replica": r.name, **_state(r.state)}, 1.0) for r in replicas])
        registry.replace("replica_state_since_timestamp_seconds", [({"replica": r.name}, r.since) for r in replicas])
        registry.replace("replica_version", [({"replica": r.name}, r.version) for r in replicas if r.version is not None])
        registry.replace("replica_staleness", [({"replica": r.name}, r.staleness) for r in replicas if r.state != "left"])
        shown = [({"adapter": adapter.name}, adapter) for adapter in adapters[:_MOST_ADAPTERS]]
        registry.replace("adapter_version", [(labels, adapter.version) for labels, adapter in shown])
        registry.replace("adapter_replicas", [(labels, len(adapter.replicas)) for labels, adapter in shown])
        registry.replace(
            "slowest_rank_seconds",
            [({"phase": phase, "rank": slowest.rank}, slowest.seconds) for phase, slowest in state.slowest.items()],
        )
        return registry.text()


def _state(name: str) -> dict[str, str]:
    return {"state": name, "service": SERVICE.get(name, name)}


def _reason(error: str | None) -> str:
    """Return the class of an error by its text; "other" for one that is not weightsync's, so that labels have an end."""
    if error is None:
        return ""
    return next((name for name in _KIND.findall(error) if name in errors.__all__), "other")
