"""Bytes over TCP."""
