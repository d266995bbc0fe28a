"""What an engine's own weight loader does, recorded as copies of memory."""
