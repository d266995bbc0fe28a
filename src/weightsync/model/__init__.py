"""The vocabulary: manifest, box, layout, version. Plain data, no torch, no I/O."""

from weightsync.model.box import Box
from weightsync.model.dtypes import ITEMSIZE, itemsize
from weightsync.model.layout import Layout
from weightsync.model.manifest import Manifest, TensorSpec
from weightsync.model.version import Version, fold

__all__ = ["ITEMSIZE", "Box", "Layout", "Manifest", "TensorSpec", "Version", "fold", "itemsize"]
