"""Direct delivery into traced shards with the project's own plan, copies and digests; real checkpoints of tiny random models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from weightsync.model import Box, Manifest
from weightsync.planning.coverage import coverage_of
from weightsync.planning.plan import SourceRank, TargetRank, plan_transfer
from weightsync.protocol.messages import Host
from weightsync.tensors.copies import check_tiles, copy_and_digest
from weightsync.tensors.copy_table import tiles_of
from weightsync.tensors.digest import digest_rows
from weightsync.tensors.memory_layout import layout_in_place
from weightsync.tensors.shards import Shard

HERE = Host("here", "here")


def scramble(shards: Sequence[Shard], generator: torch.Generator) -> None:
    """What was right before must not help."""
    for shard in shards:
        shard.tensor.copy_(torch.randn(shard.tensor.shape, generator=generator))


def deliver(manifest: Manifest, checkpoint: Mapping[str, torch.Tensor], ranks: Sequence[Sequence[Shard]]) -> int:
    """Every rank's shards from one source that holds ``checkpoint`` whole; verified as a round verifies. Returns the bytes."""
    whole = [Shard(spec.name, spec.shape, Box.whole(spec.shape), checkpoint[spec.name]) for spec in manifest]
    source, source_addresses = layout_in_place(manifest, whole)
    targets = {f"engine-{rank}": layout_in_place(manifest, shards) for rank, shards in enumerate(ranks)}
    held = coverage_of(manifest, {member: layout for member, (layout, _) in targets.items()}, "the engine")
    plan = plan_transfer(
        manifest,
        [SourceRank("trainer", HERE, source)],
        [TargetRank(member, HERE, layout) for member, (layout, _) in targets.items()],
    )
    digests, nbytes = {}, 0
    for member, (layout, addresses) in targets.items():
        ((tiles,),) = tiles_of(manifest, plan.pieces(member), layout, addresses, [(0, len(layout))])
        check_tiles(tiles, source.regions)
        digests[member] = np.zeros(len(layout), np.uint64)
        nbytes += copy_and_digest(tiles, source_addresses, digests[member])
        installed = np.zeros_like(digests[member])
        digest_rows(manifest, layout, addresses, 0, len(layout), installed)
        assert np.array_equal(installed, digests[member])
    rows = np.zeros(len(source), np.uint64)
    digest_rows(manifest, source, source_addresses, 0, len(source), rows)
    published = coverage_of(manifest, {"trainer": source}, "the trainer").total({"trainer": rows})
    held.check(digests, published)
    return nbytes


def saved(model: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint that Transformers writes, under the names that it has on disk."""
    model.save_pretrained(folder, safe_serialization=True)  # type: ignore[operator]
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
