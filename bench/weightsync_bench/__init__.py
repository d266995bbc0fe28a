"""Measurements beside the copies that cannot be avoided, and forecasts: ``weightsync bench`` and ``weightsync plan``."""
