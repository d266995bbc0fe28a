"""Transfer planning and coverage checks: pure arithmetic over layouts, in NumPy. Uses no tensors and no I/O."""

from weightsync.planning.buckets import ring_bytes, staging_layout
from weightsync.planning.coverage import Cover, cover
from weightsync.planning.pieces import Pieces
from weightsync.planning.plan import Plan, SourceRank, TargetRank, plan_transfer
from weightsync.planning.split import split_rows

__all__ = [
    "Cover",
    "Pieces",
    "Plan",
    "SourceRank",
    "TargetRank",
    "cover",
    "plan_transfer",
    "ring_bytes",
    "split_rows",
    "staging_layout",
]
