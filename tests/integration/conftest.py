"""Fixtures of the tests of the service: a coordinator of a test's own, and how to reach it."""

from tests.integration.server.service_support import runtime, server, settings

__all__ = ["runtime", "server", "settings"]
