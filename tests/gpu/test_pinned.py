"""Host memory that a GPU reads and writes: registered once for all its users, and a refusal that harms nothing after it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weightsync.errors import TransportUnavailable
from weightsync.transports.cuda.pinned import Pinned

pytestmark = [pytest.mark.gpu]
DEVICE = torch.device("cuda", 0)


def pinned(memory: np.ndarray) -> bool:
    return torch.from_numpy(memory).is_pinned()


def test_memory_stays_pinned_until_its_last_user_lets_go() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    first, second = Pinned(memory, DEVICE), Pinned(memory, DEVICE)
    first.close()
    first.close()
    assert pinned(memory)
    second.close()
    assert not pinned(memory)
    third = Pinned(memory, DEVICE)
    assert pinned(memory)
    third.close()


def test_a_refusal_is_not_raised_again_by_what_is_launched_next() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    assert not int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    try:
        with pytest.raises(TransportUnavailable, match="cannot be read by cuda:0"):
            Pinned(memory, DEVICE)
        assert torch.ones(3, device=DEVICE).sum().item() == 3
    finally:
        runtime.cudaHostUnregister(memory.ctypes.data)
