"""Under vLLM, this package's lines go where vLLM's go, unless somebody configured logging otherwise."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from weightsync.engines.vllm.plugin import log_as_vllm_does

NAMES = (None, "vllm", "weightsync")


@pytest.fixture(autouse=True)
def bare() -> Iterator[None]:
    """Loggers as in a new process."""
    loggers = [logging.getLogger(name) for name in NAMES]
    kept = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers[:] = []
    logging.getLogger("weightsync").setLevel(logging.NOTSET)
    yield
    for logger, handlers, level, propagate in kept:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


def bare_root() -> None:
    """Without pytest's own handlers, which come back by themselves."""
    logging.getLogger().handlers[:] = []


def test_lines_go_to_the_handlers_that_vllm_has_when_they_are_written_at_its_level() -> None:
    bare_root()
    log_as_vllm_does()
    log_as_vllm_does()  # the plugin is loaded several times in a process
    written = io.StringIO()
    logging.getLogger("vllm").addHandler(logging.StreamHandler(written))  # vLLM configures its logger after it loaded plugins
    log = logging.getLogger("weightsync.rounds")
    for level, words in ((logging.INFO, "one\n"), (logging.WARNING, "")):
        logging.getLogger("vllm").setLevel(level)
        log.info("one")
        log.debug("two")
        assert written.getvalue() == words
        written.truncate(0)
        written.seek(0)


def test_lines_are_not_written_twice_where_the_root_logger_is_configured_later() -> None:
    bare_root()
    log_as_vllm_does()
    written = io.StringIO()
    for name in (None, "vllm"):
        logging.getLogger(name).addHandler(logging.StreamHandler(written))
    logging.getLogger("weightsync").info("one")
    assert written.getvalue() == "one\n"


@pytest.mark.parametrize("before", [True, False])
def test_a_root_handler_that_logging_installs_by_itself_takes_no_lines(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU build calls ``logging.debug()``: our lines lost vLLM's format, or were not written."""
    bare_root()
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    implicit, written = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", implicit)
    if before:
        logging.debug("")
    log_as_vllm_does()
    logging.debug("")
    assert len(logging.getLogger().handlers) == 1
    theirs = logging.getLogger("vllm")
    theirs.addHandler(logging.StreamHandler(written))
    theirs.setLevel(logging.INFO)
    theirs.propagate = False  # as vLLM sets it
    logging.getLogger("weightsync.rounds").info("one")
    assert (implicit.getvalue(), written.getvalue()) == ("", "one\n")
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    logging.getLogger("weightsync.rounds").info("two")
    assert (implicit.getvalue(), written.getvalue()) == ("two\n", "one\n")


@pytest.mark.parametrize("name", [None, "weightsync"])
def test_what_somebody_else_configured_is_left_alone(name: str | None) -> None:
    bare_root()
    own = logging.StreamHandler()
    logging.getLogger(name).addHandler(own)
    log_as_vllm_does()
    assert logging.getLogger("weightsync").handlers == ([own] if name else [])
    assert logging.getLogger("weightsync").level == logging.NOTSET
