"""Holds that every call of ``publish()`` counts, and that background work goes on when no thread can be started."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from weightsync.errors import VersionError
from weightsync.trainer.background import Background
from weightsync.trainer.requests import PublishRequests


def test_a_call_with_an_invalid_number_counts() -> None:
    requests = PublishRequests(None)
    with pytest.raises(VersionError):
        requests.make(-1, None, None)
    assert requests.make(None, None, None).count == 2


def test_background_work_is_done_when_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Background("background")) as background:
        start, refused = threading.Thread.start, list[str]()

        def start_later(thread: threading.Thread) -> None:
            if thread.name == "background" and not refused:
                refused.append(thread.name)
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_later)
        done = [threading.Event() for _ in range(2)]
        for event in done:
            background.submit(event.set)
        assert [event.wait(10) for event in done] == [True, True]
        assert refused
