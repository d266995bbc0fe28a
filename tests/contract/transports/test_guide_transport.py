"""The transport of the guide "write a transport", taken from the page, passes the contract: so a stranger's can."""

from __future__ import annotations

from weightsync.transports.contract_suite import TransportContract, nothing_left

__all__ = ["nothing_left"]


class TestGuide(TransportContract):
    where = "tests.contract.transports.guide_unix:Unix"
    carries = True
