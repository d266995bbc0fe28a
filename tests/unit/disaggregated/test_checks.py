"""Holds the checks of requests to what they must refuse."""

from __future__ import annotations

import numpy as np
import pytest

from weightsync.errors import ConfigurationError, VerificationError
from weightsync.model import Manifest, TensorSpec, fold
from weightsync_disaggregated.checks import check_digests


def test_digests_are_of_exactly_what_was_received() -> None:
    manifest = Manifest(
        [TensorSpec("a", (1,), "float32"), TensorSpec("b", (1,), "float32", ("tied",)), TensorSpec("c", (1,), "int8")]
    )
    held, known = np.array([1, 2, 3], np.uint64), np.array([True, True, False])
    good = {"a": f"{1:016x}", "tied": f"{2:016x}"}
    check_digests(manifest, held, known, fold(held[known]), good)
    with pytest.raises(VerificationError, match="b"):
        check_digests(manifest, held, known, None, {"a": f"{1:016x}", "b": f"{3:016x}"})
    with pytest.raises(VerificationError, match="fold"):
        check_digests(manifest, held, known, fold(held), None)
    with pytest.raises(ConfigurationError, match="no digest for 1"):
        check_digests(manifest, held, known, None, {"a": f"{1:016x}"})
    with pytest.raises(ConfigurationError, match="'c'"):
        check_digests(manifest, held, known, None, good | {"c": f"{3:016x}"})
