"""Box of a DTensor that this rank holds, computed from its placements without communication."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weightsync.errors import LayoutError
from weightsync.model import Box


def local_box(name: str, tensor: DTensor) -> Box | None:
    """Return the box of ``tensor`` that this rank holds; ``None`` if the rank is not in its mesh.

    Frameworks that cut tensors in other places than torch attach the chunk that torch's distributed checkpoints ask for, and that
    chunk counts: Megatron-FSDP cuts a flat buffer of many parameters at rows, evenly in bytes.

    Raises:
        LayoutError: The placements, or the attached chunks, do not describe one box.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        check_placements(name, tensor.placements)
        return None
    if hasattr(tensor._local_tensor, "__create_chunk_list__"):
        return _chunk_box(name, tensor)
    return box_of(name, tuple(tensor.shape), tuple(mesh.shape), tensor.placements, coordinate)


def _chunk_box(name: str, tensor: DTensor) -> Box:
    check_placements(name, tensor.placements)
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    ranks = {len(tensor.shape), *(len(part) for chunk in chunks for part in (chunk.offsets, chunk.sizes))}
    boxes = [Box(tuple(chunk.offsets), tuple(map(sum, zip(chunk.offsets, chunk.sizes, strict=False)))) for chunk in chunks]
    if len(ranks) != 1 or len(boxes) != 1 or not boxes[0].within(tuple(tensor.shape)):
        raise LayoutError(f"{name} declares {chunks} of {list(tensor.shape)} on this rank, which is not one box of it")
    return boxes[0]


def check_placements(name: str, placements: Sequence[Placement]) -> None:
    """Reject placements for which no rank holds final elements.

    Raises:
        LayoutError: A placement is a pending reduction.
    """
    for placement in placements:
        if placement.is_partial():
            raise LayoutError(
                f"{name} is a pending sum over ranks ({placement}): no rank holds its elements. Reduce it before publishing, for "
                "example tensor.redistribute(placements=[Replicate()]), which is a collective that all ranks must call"
            )


def box_of(
    name: str,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> Box:
    """Return the box of a tensor of global ``shape`` at ``coordinate`` in a mesh of ``mesh_shape``.

    There is one placement for each mesh dimension. Sharding follows torch: along a dimension of ``n`` elements over ``k`` ranks
    each rank gets ``ceil(n / k)`` until nothing is left, so the last ranks may hold fewer or none. Several mesh dimensions may
    shard one tensor dimension. A ``_StridedShard`` (FSDP over tensor parallel) is applied after the placements to its right.
    """
    check_placements(name, placements)
    starts, stops = [0] * len(shape), list(shape)
    for axis in _order(name, mesh_shape, placements):
        placement = placements[axis]
        dim = placement.dim % max(len(shape), 1)  # type: ignore[attr-defined]
        start, extent = starts[dim], stops[dim] - starts[dim]
        each = -(-extent // mesh_shape[axis])
        starts[dim] = start + min(each * coordinate[axis], extent)
        stops[dim] = start + min(each * (coordinate[axis] + 1), extent)
    return Box(tuple(starts), tuple(stops))


def _order(name: str, mesh_shape: tuple[int, ...], placements: Sequence[Placement]) -> list[int]:
    """Mesh dimensions that shard, in the order in which they cut."""
    plain: list[int] = []
    strided: list[int] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        # By name, because _StridedShard is private and derives from Shard only in some releases of torch.
        if type(placement).__name__ == "_StridedShard":
            later = 1
            for other in range(axis + 1, len(placements)):
                if getattr(placements[other], "dim", None) == placement.dim:  # type: ignore[attr-defined]
                    later *= mesh_shape[other]
            if placement.split_factor == 1 or mesh_shape[axis] == 1:  # type: ignore[attr-defined]
                plain.append(axis)
            elif placement.split_factor == later:  # type: ignore[attr-defined]
                strided.append(axis)
            else:
                raise LayoutError(
                    f"{name} is interleaved over the mesh ({placement}): a rank holds many pieces of it, not one box. "
                    "Redistribute it to plain Shard placements before publishing"
                )
        elif isinstance(placement, Shard):
            plain.append(axis)
        else:
            raise LayoutError(f"{name} has a placement that weightsync does not support: {placement}")
    # A strided axis cuts what the axes to its right leave, so of several the rightmost cuts first.
    return plain + strided[::-1]
