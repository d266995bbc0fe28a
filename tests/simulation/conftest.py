"""Schedules run quietly: what their processes log about faults that were injected is nobody's business."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before, threads = logging.root.manager.disable, torch.get_num_threads()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    logging.disable(before)
