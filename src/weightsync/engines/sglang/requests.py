"""Control requests that rank 0 adds to those that SGLang broadcasts to all ranks, and SGLang's own classes for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class WakeUp:
    """Request that every rank takes released memory again, in the same pass, because SGLang waits at a barrier meanwhile.

    SGLang's own request of this kind would send a response that no client expects.
    """

    tags: tuple[str, ...]


@dataclass(frozen=True)
class ControlRequests:
    """Makers of SGLang's requests. None of them has a response."""

    retract: Callable[[], object]
    """Pause, and return running requests to the queue without their keys and values, which are computed again later."""
    abort_all: Callable[[], object]
    """Abort every request."""
    proceed: Callable[[], object]
    """Generate again."""
    wake: Callable[[tuple[str, ...]], object]
    """The argument of ``resume_memory_occupation`` for these tags."""
    label: Callable[[str], object]
    """A new label for the tokenizer's process."""
    is_work: Callable[[object], bool]
    """Whether a request asks for tokens or an embedding."""
    is_abort: Callable[[object], bool]
    """Whether a request aborts others."""
    is_switch: Callable[[object], bool]
    """Whether a request pauses or continues generation."""
    is_write: Callable[[object], bool]
    """Whether a request writes weights or releases their memory."""


def requests_of_sglang() -> ControlRequests:
    """Return the makers of the installed SGLang's requests."""
    from sglang.srt.managers import io_struct as io

    work = (
        io.TokenizedGenerateReqInput,
        io.TokenizedEmbeddingReqInput,
        io.BatchTokenizedGenerateReqInput,
        io.BatchTokenizedEmbeddingReqInput,
    )
    writes = (
        io.UpdateWeightFromDiskReqInput,
        io.UpdateWeightsFromDistributedReqInput,
        io.UpdateWeightsFromTensorReqInput,
        io.UpdateWeightsFromIPCReqInput,
        io.ReleaseMemoryOccupationReqInput,
    )
    return ControlRequests(
        retract=lambda: io.PauseGenerationReqInput(mode="retract"),
        abort_all=lambda: io.AbortReq(abort_all=True),
        proceed=lambda: io.ContinueGenerationReqInput(torch_empty_cache=False),
        wake=lambda tags: io.ResumeMemoryOccupationReqInput(tags=list(tags)),
        label=lambda version: io.UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False),
        is_work=lambda request: isinstance(request, work),
        is_abort=lambda request: isinstance(request, io.AbortReq),
        is_switch=lambda request: isinstance(request, (io.PauseGenerationReqInput, io.ContinueGenerationReqInput)),
        is_write=lambda request: isinstance(request, writes),
    )
