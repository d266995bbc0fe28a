"""Transfer planning and coverage checks: pure arithmetic over layouts, in NumPy. Uses no tensors and no I/O."""

from weightsync.planning.buckets import staging_layout
from weightsync.planning.coverage import Coverage, coverage_of
from weightsync.planning.pieces import Pieces
from weightsync.planning.plan import Plan, SourceRank, TargetRank, plan_transfer
from weightsync.planning.split import split_rows

__all__ = [
    "Coverage",
    "Pieces",
    "Plan",
    "SourceRank",
    "TargetRank",
    "coverage_of",
    "plan_transfer",
    "split_rows",
    "staging_layout",
]
