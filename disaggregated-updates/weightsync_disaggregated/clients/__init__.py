"""Clients of the HTTP routes of running engines, one file per engine."""
