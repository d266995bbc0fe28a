"""A framework tells its engine "now" while the trainer publishes: both run at once, and both must agree on the version."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from weightsync import __version__
from weightsync.errors import ConfigurationError, DeadlineExceeded, RoundFailed, VerificationError, VersionError
from weightsync.integrations import engine_calls
from weightsync.integrations.engine_calls import Answers, EngineCalls, plugin_release
from weightsync.model import Version
from weightsync.protocol.messages import RoundResult

SECONDS = 20.0
VERSION = Version("run", 7, "0" * 32, "d" * 16, 2)


def result() -> RoundResult:
    return RoundResult(1, VERSION, True, 0, 0.0, {}, ())


def answer(**changed: object) -> dict[str, Any]:
    return {"rank": 1, "replica": "r", "version": "run@7", "epoch": 2, "number": 7, "digest": "d" * 16, **changed}


class Workers:
    """Answers after the publication has begun."""

    def __init__(self, answers: Answers = None, error: Exception | None = None) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers, self.error = answers, error
        self.publishing = threading.Event()

    def __call__(self, method: str, arguments: dict[str, Any]) -> Answers:
        self.asked.append((method, arguments))
        if method == "weightsync_update":
            assert self.publishing.wait(SECONDS)
        if self.error is not None:
            raise self.error
        return self.answers

    def publish(self, error: Exception | None = None) -> Callable[[], RoundResult]:
        def run() -> RoundResult:
            self.publishing.set()
            if error is not None:
                raise error
            return result()

        return run


@pytest.mark.parametrize("answers", [None, [None, {}], [answer(), answer(rank=0)]], ids=["dropped", "another raised", "answered"])
def test_the_engine_is_called_while_the_trainer_publishes(answers: Answers) -> None:
    workers = Workers(answers)
    assert EngineCalls(workers).publish(workers.publish(), 7, 2, SECONDS).version == VERSION
    [(method, arguments)] = workers.asked
    assert method == "weightsync_update" and arguments.pop("call") > 0
    assert arguments == {"number": 7, "epoch": 2, "timeout": SECONDS}


@pytest.mark.parametrize("changed", [{"number": 6}, {"epoch": 1}, {"digest": "e" * 16}])
def test_another_version_in_a_worker_is_an_error(changed: dict[str, object]) -> None:
    workers = Workers([answer(), answer(**changed)])
    with pytest.raises(VerificationError, match=r"rank 1 of replica r installed run@7 instead of .*: do not resume the engine"):
        EngineCalls(workers).publish(workers.publish(), 7)


def test_an_error_of_the_call_is_raised_after_the_publication() -> None:
    workers = Workers(error=RoundFailed("the framework's own error"))
    with pytest.raises(RoundFailed, match="own error"):
        EngineCalls(workers).publish(workers.publish(), 7)


def test_an_error_of_the_publication_has_the_calls_error_as_a_note() -> None:
    workers = Workers(error=RoundFailed("the load raised"))
    with pytest.raises(VersionError) as caught:
        EngineCalls(workers).publish(workers.publish(VersionError("not above the last one")), 7)
    assert caught.value.__notes__ == ["the engine's call raised RoundFailed: the load raised"]


@pytest.mark.parametrize("error", [None, VersionError("not above the last one")], ids=["published", "failed"])
def test_a_call_that_does_not_return_is_not_waited_for_without_limit(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    monkeypatch.setattr(engine_calls, "_SETTLE", 0.1)
    workers, release = Workers(), threading.Event()
    calls = EngineCalls(lambda method, arguments: [{}] if release.wait(SECONDS) else None)
    with pytest.raises(DeadlineExceeded if error is None else VersionError) as caught:
        calls.publish(workers.publish(error), 7)
    release.set()
    notes = getattr(caught.value, "__notes__", [])
    assert ("did not return" in str(caught.value)) if error is None else ("still in its call" in notes[0])


def test_joining_and_leaving_are_calls_of_the_workers() -> None:
    workers = Workers([])
    calls = EngineCalls(workers)
    calls.ready(delivery="streamed")
    calls.join("http://head:7400", "r", token_file="/run/token")
    calls.leave()
    assert workers.asked == [
        ("weightsync_ready", {"delivery": "streamed"}),
        ("weightsync_join", {"coordinator": "http://head:7400", "replica": "r", "token_file": "/run/token"}),
        ("weightsync_leave", {}),
    ]


@pytest.mark.parametrize(("allowed", "loads"), [(None, True), ("other,weightsync", True), ("other", False), ("", False)])
def test_whether_vllm_loads_the_plugin_is_known_without_a_call(
    monkeypatch: pytest.MonkeyPatch, allowed: str | None, loads: bool
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    if loads:
        assert plugin_release() == __version__
    else:
        with pytest.raises(ConfigurationError, match="leaves weightsync out"):
            plugin_release()
    monkeypatch.setattr(engine_calls, "entry_points", lambda group: ())
    with pytest.raises(ConfigurationError, match="no plugin of weightsync"):
        plugin_release()
