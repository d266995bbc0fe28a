"""Measurements against the copies that cannot be avoided."""
