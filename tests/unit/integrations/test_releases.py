"""A framework whose release was never tried is used, and named once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError

import pytest

from weightsync.integrations import releases


@pytest.fixture(autouse=True)
def nothing_said() -> Iterator[None]:
    releases.warn_if_untried.cache_clear()
    yield
    releases.warn_if_untried.cache_clear()


@pytest.mark.parametrize("package", releases.SERIES)
def test_another_release_is_said_once(package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(releases, "version", lambda _: "9.99.0")
    with caplog.at_level(logging.WARNING):
        releases.warn_if_untried(package)
        releases.warn_if_untried(package)
    title, tried = releases.SERIES[package]
    assert [record.getMessage() for record in caplog.records] == [
        f"weightsync was tried with {title} {tried}, and this is 9.99.0: its interface fits, its behaviour is untried"
    ]


@pytest.mark.parametrize("package", releases.SERIES)
def test_nothing_is_said_of_a_tried_release_or_a_source_tree(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    for version in (lambda _: f"{releases.SERIES[package].tried}.3", absent):
        monkeypatch.setattr(releases, "version", version)
        releases.warn_if_untried.cache_clear()
        releases.warn_if_untried(package)
    assert not caplog.records


def test_a_series_is_told_by_both_numbers() -> None:
    assert not releases.SERIES["skyrl"].has("0.41.0")
    assert releases.SERIES["skyrl"].has("0.4.dev3")
