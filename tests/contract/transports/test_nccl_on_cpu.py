"""Scheme ``nccl`` passes the transports' contract, faults included, over sockets and host memory; between GPUs: ``tests/gpu``."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from weightsync.errors import ProtocolError
from weightsync.testing.copy_cases import keyed, odd_shapes
from weightsync.testing.transport_contract import SMALL, TransportContract, nothing_left

__all__ = ["nothing_left"]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real one")


class TestNccl(TransportContract):
    warm_up = "tests.contract.transports.test_transports:open_a_store"
    where = "tests.contract.transports.nccl_on_cpu:NcclOnCpu"
    arguments: ClassVar[dict[str, Any]] = {"buffer_bytes": 2 << 20, "gather_seconds": 0.2}
    carries = True

    @pytest.mark.parametrize("seed", [0])
    def test_digests_are_those_of_the_bytes_in_place(self, seed: int) -> None:
        """A GPU takes them in a launch of its own."""
        wanted = keyed(odd_shapes(SMALL, seed), seed)
        with self.owner() as owner:
            owner.place(1)
            with self.prepared(owner, wanted) as source, pytest.raises(ProtocolError, match="takes no digests"):
                self.transfer(source, wanted, 1, np.zeros(100, np.uint64))

    def test_digests_need_keys(self) -> None:
        pytest.skip("it takes none")

    @pytest.mark.rare  # a launch for each of a thousand groups, which a GPU never has
    def test_twenty_thousand_tiles_in_a_thousand_groups(self) -> None:
        super().test_twenty_thousand_tiles_in_a_thousand_groups()
