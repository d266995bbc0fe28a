"""Holds the staleness bound: the formula exactly, its invariants under any history, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ConfigurationError, VersionError
from weightsync_rollouts.staleness import Admission, capacity

COUNT = st.integers(0, 1000)


@pytest.mark.parametrize(
    ("eta", "version", "accepted", "running", "expected"),
    [
        (0, 0, 0, 0, 8),  # on-policy: one batch
        (0, 0, 0, 8, 0),
        (0, 0, 8, 0, 0),  # the batch is there: nothing before the next version
        (0, 1, 8, 0, 8),
        (1, 0, 0, 0, 12),  # a batch ahead, but for the concurrency
        (1, 0, 8, 4, 4),
        (4, 0, 0, 12, 0),
        (16, 3, 100, 10, 2),
        (0, 0, 10, 10, -12),  # a bound that was lowered, or samples that came back: negative, nothing starts
    ],
)
def test_formula(eta: int, version: int, accepted: int, running: int, expected: int) -> None:
    assert capacity(max_concurrent=12, eta=eta, version=version, batch=8, accepted=accepted, running=running) == expected


@given(COUNT, COUNT, COUNT, COUNT, COUNT, COUNT)
def test_never_more_than_either_bound(most: int, eta: int, version: int, batch: int, accepted: int, running: int) -> None:
    free = capacity(max_concurrent=most, eta=eta, version=version, batch=batch, accepted=accepted, running=running)
    assert running + free <= most
    assert accepted + running + free <= (eta + version + 1) * batch
    assert running + free == most or accepted + running + free == (eta + version + 1) * batch


@given(
    st.integers(1, 5), st.sampled_from([0, 1, 4, 16]), st.integers(1, 9), st.integers(0, 1000),
    st.lists(st.sampled_from(["start", "accept", "reject", "publish"]), max_size=200),
)  # fmt: skip
def test_no_sample_is_staler_than_the_bound(batch: int, eta: int, most: int, first: int, acts: list[str]) -> None:
    """Batches are consumed in order of acceptance, one a version; whatever happened, no sample waits longer than eta versions."""
    admission = Admission(batch, eta, most)
    assert admission.capacity == 0  # nothing before a version is known
    version = first
    admission.publish(version)
    running: list[int] = []
    accepted: list[int] = []
    for act in acts:
        if act == "start" and admission.capacity > 0:
            admission.start()
            running.append(version)
        elif act == "accept" and running:
            accepted.append(running.pop(0))
            admission.end(True)
        elif act == "reject" and running:
            running.pop(0)
            admission.end(False)
        elif act == "publish" and len(accepted) >= (version - first + 1) * batch:  # it consumed a batch
            version += 1
            admission.publish(version)
        assert len(running) == admission.running <= most
        assert len(accepted) == admission.accepted
    for place, born in enumerate(accepted):
        assert first + place // batch - born <= eta


def test_refusals() -> None:
    for batch, eta, most in [(0, 0, 1), (1, -1, 1), (1, 0, 0)]:
        with pytest.raises(ConfigurationError):
            Admission(batch, eta, most)
    admission = Admission(1, 0, 4)
    with pytest.raises(VersionError):
        admission.start()
    admission.publish(7)
    admission.start()
    with pytest.raises(VersionError):
        admission.start()
    with pytest.raises(VersionError, match="decreased from 7 to 6"):
        admission.publish(6)
    admission.end(True)
    admission.drop(1)
    assert admission.capacity == 1
