"""Which filler serves a plan."""

from __future__ import annotations

import torch

from weightsync.engine.fill.direct import DeviceDirect, HostDirect
from weightsync.engine.fill.filler import FillContext, PlanFiller
from weightsync.engine.fill.streamed import DeviceStreamed, HostStreamed
from weightsync.errors import PlanMismatch
from weightsync.model import Layout
from weightsync.protocol.messages import PlanSlice


def filler_for(
    context: FillContext, plan: PlanSlice, own: Layout | None, addresses: tuple[int, ...], device: torch.device | None
) -> PlanFiller:
    """The filler for ``plan``, yet to be prepared.

    Buckets are staged on the engine's CUDA device if all bytes of the plan can come straight to it, else in host memory.

    Args:
        context: What every filler of this engine rank needs.
        plan: What this rank is to receive, from where, and how it is delivered.
        own: The layout of the engine's own parameters, ``None`` if they cannot be written directly.
        addresses: Where each region of ``own`` begins.
        device: The CUDA device that holds them, ``None`` for host memory.

    Raises:
        PlanMismatch: The plan is for another layout, or not the one that the coordinator computed.
        LayoutError: The plan asks for larger staging buckets than this engine rank allows.
    """
    layout = Layout.from_columns(context.manifest, plan.layout)
    if plan.delivery == "streamed":
        staging_device = context.staging_for(plan.sources)
        if staging_device is not None:
            return DeviceStreamed(context, plan, layout, staging_device)
        return HostStreamed(context, plan, layout)
    if own is None or own.digest != layout.digest:
        raise PlanMismatch(
            "the plan was made for another layout than this engine rank's: its parameters were rebuilt; register again"
        )
    if device is None:
        return HostDirect(context, plan, layout, addresses)
    return DeviceDirect(context, plan, layout, addresses, device)
