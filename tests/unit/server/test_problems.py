"""Errors as HTTP: each of weightsync's errors has a status of its own choice, and comes back as what it was."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
import pytest

from weightsync import errors
from weightsync.errors import WeightSyncError, from_wire
from weightsync.server.problems import STATUS, Problem, problem, problem_of, status_of

ERRORS = [getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)]


def test_no_error_is_left_out_of_the_table() -> None:
    assert set(ERRORS) == set(STATUS), "choose a status for each error of errors.py in server/problems.py"


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: str(kind.__name__))
def test_an_error_survives_http(kind: type[WeightSyncError]) -> None:
    answer = problem_of(kind("what, to whom, what to do"))
    assert answer.status_code == STATUS[kind] >= 400
    said = msgspec.json.decode(bytes(answer.body), type=Problem)
    back = from_wire(said.kind, said.message)
    assert (type(back), str(back)) == (kind, "what, to whom, what to do")


def test_foreign_errors_are_the_servers_fault() -> None:
    assert status_of(KeyError("x")) == HTTPStatus.INTERNAL_SERVER_ERROR
    assert status_of(TimeoutError()) == HTTPStatus.INTERNAL_SERVER_ERROR


def test_an_error_of_a_third_party_has_the_status_of_its_base() -> None:
    class NoRdma(errors.TransportUnavailable):
        pass

    try:
        assert status_of(NoRdma("x")) == STATUS[errors.TransportUnavailable]
    finally:
        del NoRdma


def test_401_says_how_to_authenticate() -> None:
    assert problem(401, "AuthenticationError", "no").headers["www-authenticate"] == 'Bearer realm="weightsync"'
    assert "www-authenticate" not in problem(404, "NotFound", "no").headers
