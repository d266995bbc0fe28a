"""Engines, as weightsync sees them: one file each, imported by nobody but their users."""
