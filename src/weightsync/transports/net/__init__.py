"""Sockets: bounded channels, authentication, encryption, listeners."""
