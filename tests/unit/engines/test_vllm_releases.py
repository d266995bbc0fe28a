"""Holds what decides that a vLLM can be used: its interface, not its number; an untried one is said once."""

from __future__ import annotations

import logging

import pytest

from weightsync.engines.vllm import releases
from weightsync.errors import ConfigurationError


def test_releases_are_told_by_their_first_two_numbers() -> None:
    assert all(releases.was_tried(release) for release in ("0.25.0", "0.25.1+cu130", "0.32.0+cpu"))
    assert not any(releases.was_tried(release) for release in ("0.24.0", "0.26.0", "0.33.0", "1.25.0", "dev", ""))


def test_a_release_without_a_needed_method_is_refused_and_the_method_is_named() -> None:
    class Worker:
        def start_weight_update(self) -> None: ...

    releases.require("0.99.0", "a replica", Worker, ["start_weight_update"])
    with pytest.raises(
        ConfigurationError, match=r"vLLM 0\.99\.0 cannot be used for a replica: Worker has no update_weights, finish"
    ):
        releases.require("0.99.0", "a replica", Worker, ["start_weight_update", "update_weights", "finish_weight_update"])


def test_an_untried_release_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    releases.warn_if_untried.cache_clear()
    with caplog.at_level(logging.WARNING):
        for release in ("0.32.1", "0.77.0", "0.77.0"):
            releases.warn_if_untried(release)
    (record,) = caplog.records
    assert "and this is 0.77.0" in record.getMessage()
