"""The fault campaign: real processes killed, stopped and lied to at every named point of a round. ``make faults`` runs it."""

from __future__ import annotations

__all__: list[str] = []
