"""Tracing of an engine's weight loader: records what it does as copies of memory."""
