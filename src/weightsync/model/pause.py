"""What a pause does to the requests that an engine is answering."""

from __future__ import annotations

from typing import Literal

__all__ = ["PauseMode"]

PauseMode = Literal["abort", "wait", "keep"]
"""``abort`` ends running requests with what they have, ``wait`` lets them finish, ``keep`` holds them and goes on afterwards."""
