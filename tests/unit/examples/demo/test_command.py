"""The demo's command line: what it refuses before it starts anything."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from examples.demo.__main__ import app
from typer.testing import CliRunner

from weightsync.cli.commands import EXIT_CONFIGURATION


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_a_wrong_coordinator_ends_it_before_it_says_anything() -> None:
    done = run("--coordinator", "foo")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (EXIT_CONFIGURATION, "", 1)
    assert "'foo' is not a coordinator URL" in done.stderr


def test_bad_options_of_the_demo_are_one_line() -> None:
    done = run("--engine-tp", "2")
    assert (done.exit_code, done.stderr.count("\n")) == (EXIT_CONFIGURATION, 1)
    assert "vllm" in done.stderr


def test_the_demo_says_at_once_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("examples.demo.__main__.find_spec", lambda name: None if name == "transformers" else find(name))
    done = run()
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (EXIT_CONFIGURATION, "", 1)
    assert "'transformers'" in done.stderr
    assert "pip install '.[demo]'" in done.stderr
