"""Effect of a pause on running requests."""

from __future__ import annotations

from typing import Literal

PauseMode = Literal["abort", "wait", "keep"]
"""``abort`` ends running requests with partial output, ``wait`` lets them finish, ``keep`` suspends and later continues them."""
