"""Under vLLM, this package's lines go where vLLM's go, unless somebody configured logging otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from weightsync.adapters.vllm.plugin import log_as_vllm_does

NAMES = (None, "vllm", "weightsync")


@pytest.fixture(autouse=True)
def bare() -> Iterator[None]:
    """Loggers as in a new process."""
    loggers = [logging.getLogger(name) for name in NAMES]
    kept = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers[:] = []
    logging.getLogger("weightsync").setLevel(logging.NOTSET)
    yield
    for logger, handlers, level in kept:
        logger.handlers[:] = handlers
        logger.setLevel(level)


def bare_root() -> None:
    """Without pytest's own handlers, which come back by themselves."""
    logging.getLogger().handlers[:] = []


def test_lines_go_to_vllms_handlers_at_its_level() -> None:
    bare_root()
    handler = logging.StreamHandler()
    logging.getLogger("vllm").addHandler(handler)
    logging.getLogger("vllm").setLevel(logging.INFO)
    log_as_vllm_does()
    log_as_vllm_does()  # the plugin is loaded several times in a process
    assert logging.getLogger("weightsync").handlers == [handler]
    assert logging.getLogger("weightsync.agents").isEnabledFor(logging.INFO)
    assert not logging.getLogger("weightsync.agents").isEnabledFor(logging.DEBUG)


@pytest.mark.parametrize("name", [None, "weightsync"])
def test_what_somebody_else_configured_is_left_alone(name: str | None) -> None:
    bare_root()
    logging.getLogger("vllm").addHandler(logging.StreamHandler())
    own = logging.StreamHandler()
    logging.getLogger(name).addHandler(own)
    log_as_vllm_does()
    assert logging.getLogger("weightsync").handlers == ([own] if name else [])


def test_a_vllm_that_configures_no_logging_is_left_alone() -> None:
    bare_root()
    log_as_vllm_does()
    assert logging.getLogger("weightsync").handlers == []
