"""Basic value types: manifest, box, layout, version, results. Plain data without torch and I/O."""

from weightsync.model.box import Box
from weightsync.model.dtypes import ITEMSIZE, itemsize
from weightsync.model.layout import Layout
from weightsync.model.manifest import Manifest, TensorSpec
from weightsync.model.pause import PauseMode
from weightsync.model.result import GUARANTEES, SERVICE, ReplicaResult, RoundResult, in_words
from weightsync.model.trace import RoundTrace, SlowestSpan, Track, milliseconds
from weightsync.model.version import FIRST_EPOCH, Version, fold, label_of, parse_label

__all__ = [
    "FIRST_EPOCH",
    "GUARANTEES",
    "ITEMSIZE",
    "SERVICE",
    "Box",
    "Layout",
    "Manifest",
    "PauseMode",
    "ReplicaResult",
    "RoundResult",
    "RoundTrace",
    "SlowestSpan",
    "TensorSpec",
    "Track",
    "Version",
    "fold",
    "in_words",
    "itemsize",
    "label_of",
    "milliseconds",
    "parse_label",
]
