"""Broadcasts from one GPU to others, beside the flat one of the same run and group: ``python -m benchmarks.gpu_broadcast``."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from weightsync.errors import ConfigurationError, RoundFailed
from weightsync.transports.broadcast.nccl import DEFAULT_BUFFER, PROGRAMS
from weightsync_bench.gpu_job import manifest_for
from weightsync_bench.peer import Peer, together
from weightsync_bench.report import gpu_machine, print_json

__all__ = ["BroadcastCase", "Variant", "main", "run_broadcast", "variants_of"]

_SECONDS = 180.0


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One way to broadcast, with its settings where it has any."""

    kind: str
    """``flat``, ``by_tensor``, ``concatenated`` or ``packed``."""
    buffer_bytes: int = 0
    num_buffers: int = 0
    programs: int = 0
    priority: bool = False


class BroadcastCase(msgspec.Struct, frozen=True, kw_only=True):
    """One model, one number of readers, one way. Milliseconds from the first rank's start to the last one's end."""

    model: str
    tensors: int
    readers: int
    bytes: int
    variant: Variant
    ms: float
    """The median of the rounds."""
    of_flat: float
    """``ms`` by the flat broadcast's."""
    rounds_ms: list[float]
    setup_ms: float
    """Making buffers and tables, once."""
    extra_bytes: int
    """GPU memory of buffers and tables, the most of any rank."""


def variants_of(buffer_bytes: int = DEFAULT_BUFFER, buffers: int = 2, sweep: bool = False) -> list[Variant]:
    """What is measured: the floor, both baselines, and ours with these settings; with ``sweep``, with many more."""
    found = [Variant(kind=kind) for kind in ("flat", "by_tensor", "concatenated")]
    found.append(Variant(kind="packed", buffer_bytes=buffer_bytes, num_buffers=buffers, programs=PROGRAMS, priority=True))
    if sweep:
        found += [
            Variant(kind="packed", buffer_bytes=mib << 20, num_buffers=number, programs=programs, priority=priority)
            for mib, number, programs, priority in (
                (1024, 2, 0, False), (1024, 2, 0, True), (1024, 2, 64, False), (1024, 2, 32, True), (1024, 2, 128, True),
                (1024, 3, 64, True), (2048, 2, 64, True), (512, 3, 64, True), (256, 3, 64, True),
            )
        ]  # fmt: skip
    return found


def run_broadcast(
    model: str, readers: int, variants: Sequence[Variant], rounds: int, note: Callable[[str], None]
) -> list[BroadcastCase]:
    """Measure ``variants`` (the first is the flat one) between processes, a GPU each; every way's bytes are checked by digest.

    Raises :class:`~weightsync.errors.RoundFailed` for a rank that failed or that holds other bytes than rank 0.
    """
    manifest = manifest_for(model)
    cases: list[BroadcastCase] = []
    with ExitStack() as owned:
        settings = {"role": "broadcast", "model": model, "size": readers + 1}
        peers = [
            owned.enter_context(Peer("benchmarks.gpu_broadcast_rank", settings | {"rank": rank})) for rank in range(readers + 1)
        ]
        for peer in peers:
            peer.hear(_SECONDS)
        for name in ("plain", "priority"):
            port = peers[0].ask(_SECONDS, do="open", name=name)
            together(peers, _SECONDS, do="join", name=name, port=port, priority=name == "priority")
        for number, variant in enumerate(variants):
            group = "priority" if variant.priority else "plain"
            together(peers, _SECONDS, do="change", seed=number)
            made = [{"seconds": 0.0, "bytes": 0}]
            if variant.kind == "packed":
                made = together(
                    peers, _SECONDS, do="prepare", group=group, buffer_bytes=variant.buffer_bytes, num_buffers=variant.num_buffers,
                    programs=variant.programs,
                )  # fmt: skip
            times = together(peers, _SECONDS, do="measure", kind=variant.kind, group=group, rounds=rounds)
            each = [1000 * (max(one[turn][1] for one in times) - min(one[turn][0] for one in times)) for turn in range(rounds)]
            if variant.kind != "flat" and len(set(together(peers, _SECONDS, do="digest"))) != 1:
                raise RoundFailed(f"{variant}: the readers hold other bytes than the sender")
            ms = statistics.median(each)
            cases.append(
                BroadcastCase(
                    model=model, tensors=len(manifest), readers=readers, bytes=manifest.nbytes, variant=variant, ms=round(ms, 2),
                    of_flat=round(ms / (cases[0].ms if cases else ms), 3), rounds_ms=[round(one, 2) for one in each],
                    setup_ms=round(1000 * max(one["seconds"] for one in made), 1),
                    extra_bytes=int(max(one["bytes"] for one in made)),
                )
            )  # fmt: skip
            note(f"{model} to {readers}: {msgspec.to_builtins(variant)}: {ms:.1f} ms, {cases[-1].of_flat:.2f} x flat")
    return cases


def main(arguments: Sequence[str]) -> int:
    """Run it; a table goes to standard error, the JSON (if asked for) is standard output's last line.

    Raises :class:`~weightsync.errors.ConfigurationError` where there are too few GPUs, and what :func:`run_broadcast` raises.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_broadcast", description=__doc__)
    parser.add_argument("--model", default="qwen3-8b", help="qwen3-8b, qwen3-30b-a3b, or a path to a config.json")
    parser.add_argument("--readers", type=int, default=1, help="GPUs that receive, besides the one that sends")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--buffer-bytes", type=int, default=DEFAULT_BUFFER)
    parser.add_argument("--buffers", type=int, default=2)
    parser.add_argument("--sweep", action="store_true", help="with many other settings, too")
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args(arguments)
    gpus = torch.cuda.device_count()
    if gpus <= wanted.readers:
        raise ConfigurationError(f"a broadcast to {wanted.readers} readers needs {wanted.readers + 1} GPUs; here are {gpus}")
    console = Console(stderr=True, width=160)
    cases = run_broadcast(
        wanted.model, wanted.readers, variants_of(wanted.buffer_bytes, wanted.buffers, wanted.sweep), wanted.rounds,
        lambda text: console.print(text, style="dim", highlight=False),
    )  # fmt: skip
    table = Table(title=f"{wanted.model}, 1 to {wanted.readers}: {cases[0].bytes / 1e9:.2f} GB in {cases[0].tensors:,} tensors")
    for heading in ("way", "ms", "x flat", "GB/s", "extra GPU memory"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for case in cases:
        one = case.variant
        how = f" {one.num_buffers} x {one.buffer_bytes >> 20} MiB, {one.programs} programs, priority {one.priority}"
        way = one.kind + (how if one.kind == "packed" else "")
        table.add_row(way, f"{case.ms:.1f}", f"{case.of_flat:.2f}", f"{case.bytes / case.ms / 1e6:.0f}", f"{case.extra_bytes:,}")
    console.print(table)
    if wanted.json:
        print_json(cases, gpu_machine())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
