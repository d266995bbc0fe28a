"""Requests to the HTTP routes of running engines."""
