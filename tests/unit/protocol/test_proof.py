"""Holds that a proof of the token is good once, for one request, from and to those who have the token, and soon expires."""

from __future__ import annotations

import msgspec
import pytest

from weightsync.config import Address, Secret
from weightsync.errors import AuthenticationError, ConfigurationError, ProtocolError
from weightsync.protocol import proof
from weightsync.protocol.proof import SCHEME, Challenge, Challenger, Claimant, limited, limits_of

TOKEN = Secret("the-token-of-this-run")
WHERE = Address("http", "127.0.0.1", 7400)
REQUEST = "GET /v1/agents"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def answer(challenger: Challenger, claimant: Claimant) -> bytes:
    return msgspec.json.encode(challenger.challenge(claimant.target.rpartition("=")[2]))


def claimed(challenger: Challenger, request: str = REQUEST) -> str:
    claimant = Claimant(TOKEN, WHERE)
    claimant.accept(answer(challenger, claimant))
    return claimant.authorization(request)[0]


def test_a_proof_is_taken_once_and_holds_no_token() -> None:
    challenger = Challenger(TOKEN)
    header = claimed(challenger)
    assert TOKEN.reveal() not in header
    assert challenger.admits(header, REQUEST)
    assert not challenger.admits(header, REQUEST), "a recorded header was taken again"
    assert challenger.admits(claimed(challenger), REQUEST)


def test_a_proof_is_for_one_request_of_one_process_of_the_coordinator() -> None:
    challenger, restarted = Challenger(TOKEN), Challenger(TOKEN)
    assert not challenger.admits(claimed(challenger, "GET /v1/agents"), "POST /v1/rounds")
    assert not restarted.admits(claimed(challenger), REQUEST)
    assert not Challenger(Secret("another")).admits(claimed(challenger), REQUEST)


def test_a_challenge_is_good_for_several_requests_each_once_and_each_answer_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_MOST_REQUESTS", 5)
    challenger, claimant = Challenger(TOKEN), Claimant(TOKEN, WHERE)
    claimant.accept(answer(challenger, claimant))
    given = [claimant.authorization(REQUEST) for _ in range(6)]
    assert claimant.spent
    for header, expected in reversed(given[:5]):
        assert challenger.admits(header, REQUEST) == (expected, "")
    assert len({expected for _, expected in given}) == 6, "an answer proves one request"
    for header, _ in given:
        assert challenger.admits(header, REQUEST) is None
    assert len(challenger._used) == 1


def test_a_coordinator_without_the_token_gets_nothing() -> None:
    claimant = Claimant(TOKEN, WHERE)
    for fake in (
        Challenger(Secret("another")).challenge(claimant.target.rpartition("=")[2]),
        Challenge("0" * 96, "0" * 64),
        Challenge("ü\n", "ü\udcff"),
    ):
        body = msgspec.json.encode({"nonce": fake.nonce, "proof": fake.proof.encode("utf-8", "replace").decode()})
        with pytest.raises(AuthenticationError, match=r"127\.0\.0\.1:7400 could not prove that it has the token.*something else"):
            claimant.accept(body)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"<html>", b"[" * 5000, b'{"nonce":1,"proof":2}', b"\xff"])
def test_something_else_than_a_coordinator_is_said_to_be_that(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a weightsync coordinator"):
        Claimant(TOKEN, WHERE).accept(body)


def test_an_answer_to_another_nonce_proves_nothing() -> None:
    challenger = Challenger(TOKEN)
    recorded = answer(challenger, Claimant(TOKEN, WHERE))
    with pytest.raises(AuthenticationError):
        Claimant(TOKEN, WHERE).accept(recorded)


def test_a_coordinators_proof_is_no_agents_proof() -> None:
    challenger = Challenger(TOKEN)
    nonce = "0" * 32
    challenge = challenger.challenge(nonce)
    assert not challenger.admits(f"{SCHEME} {nonce} {challenge.nonce} 0 {challenge.proof}", REQUEST)


@pytest.mark.parametrize("change", [0, 40, 60, 120, 135, 141, 200])
def test_a_changed_character_spoils_it(change: int) -> None:
    challenger = Challenger(TOKEN)
    header = claimed(challenger)
    other = "1" if header[change] == "0" else "0"
    assert not challenger.admits(header[:change] + other + header[change + 1 :], REQUEST)
    assert challenger.admits(header, REQUEST), "the attempt used it up"


@pytest.mark.parametrize(
    "header", ["", SCHEME, f"{SCHEME} a b 0 c", f"{SCHEME} {'0' * 32} {'0' * 96} 0 ", f"{SCHEME} {'0' * 32} {'0' * 96} -1 \udcff"]
)
def test_rubbish_is_refused(header: str) -> None:
    assert not Challenger(TOKEN).admits(header, REQUEST)


@pytest.mark.parametrize("nonce", ["", "0" * 31, "0" * 33, "G" * 32, "0" * 32 + "\n", "ü" * 32])
def test_a_malformed_nonce_is_refused(nonce: str) -> None:
    with pytest.raises(ConfigurationError, match="32 hexadecimal"):
        Challenger(TOKEN).challenge(nonce)


def test_challenges_expire_and_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    challenger = Challenger(TOKEN, clock)
    late = claimed(challenger)
    clock.now += 31
    assert not challenger.admits(late, REQUEST)
    monkeypatch.setattr(proof, "_MOST_USED", 3)
    assert [challenger.admits(claimed(challenger), REQUEST) is not None for _ in range(5)] == [True, True, True, False, False]
    clock.now += 31
    assert challenger.admits(claimed(challenger), REQUEST)
    assert len(challenger._used) == 1


def test_guessing_a_weak_token_costs_something_and_a_process_pays_once() -> None:
    proof._stretched.cache_clear()
    challenger = Challenger(TOKEN)
    for _ in range(10):
        assert challenger.admits(claimed(challenger), REQUEST)
    assert proof._stretched.cache_info().misses == 1


def proved(challenger: Challenger, token: Secret, adapters: str) -> tuple[str, str]:
    """The header with which a holder of ``token`` answers to a challenge for ``adapters``, and the answer that it expects."""
    claimant = Claimant(token, WHERE)
    claimant.accept(msgspec.json.encode(challenger.challenge(claimant._nonce, adapters)))
    return claimant.authorization(REQUEST)


@pytest.mark.parametrize("adapters", ["alice/*", "alice/math", "alice/*,bob/math-2.x,*/eval"])
def test_a_limited_token_proves_what_it_is_limited_to(adapters: str) -> None:
    challenger, token = Challenger(TOKEN), limited(TOKEN, adapters)
    assert limits_of(token) == adapters
    assert TOKEN.reveal() not in token.reveal()
    header, expected = proved(challenger, token, adapters)
    assert challenger.admits(header, REQUEST) == (expected, adapters)
    assert challenger.admits(header, REQUEST) is None, "a recorded header was taken again"


def test_its_holder_cannot_make_more_of_it() -> None:
    challenger, token = Challenger(TOKEN), limited(TOKEN, "alice/*")
    header, _ = proved(challenger, token, "alice/*")
    for other in ("", " bob/*", " */*", " alice/math", " alice/*,bob/*", " alice/* ", " alice/*  ", " alice"):
        assert challenger.admits(header.removesuffix(" alice/*") + other, REQUEST) is None, other
    mac = token.reveal().rpartition(":")[2]
    with pytest.raises(AuthenticationError):
        proved(challenger, Secret(f"adapters:bob/*:{mac}"), "bob/*")
    with pytest.raises(AuthenticationError):
        proved(challenger, Secret(mac), "")
    with pytest.raises(AuthenticationError):
        proved(Challenger(Secret("of-another-coordinator")), token, "alice/*")
    assert challenger.admits(header, REQUEST), "none of these used it up"


@pytest.mark.parametrize(
    "adapters",
    ["alice", "/x", "alice/", "a/b/c", "alice/*,", "alice/* bob/*", "ü/x", "a/" + "b" * 65, ",".join(["a/b"] * 9)],
)
def test_what_is_no_list_of_names_is_refused(adapters: str) -> None:
    with pytest.raises(ConfigurationError, match="1 to 8 names of adapters"):
        limited(TOKEN, adapters)
    with pytest.raises(ConfigurationError, match="1 to 8 names of adapters"):
        Challenger(TOKEN).challenge("0" * 32, adapters)


def test_each_limited_token_uses_up_its_own_challenges_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_MOST_USED_LIMITED", 3)
    now = 0.0
    challenger = Challenger(TOKEN, lambda: now)
    alice, bob = (limited(TOKEN, f"{name}/*") for name in ("alice", "bob"))
    for _ in range(3):
        assert challenger.admits(proved(challenger, alice, "alice/*")[0], REQUEST)
    assert challenger.admits(proved(challenger, alice, "alice/*")[0], REQUEST) is None
    assert challenger.admits(proved(challenger, bob, "bob/*")[0], REQUEST)
    assert challenger.admits(proved(challenger, TOKEN, "")[0], REQUEST)
    now = 31.0
    assert challenger.admits(proved(challenger, alice, "alice/*")[0], REQUEST), "until they expire"


def test_what_is_limited_itself_admits_nobody_by_further_limits() -> None:
    token = limited(TOKEN, "alice/*")
    header, _ = proved(Challenger(TOKEN), token, "alice/*")
    assert Challenger(token).admits(header, REQUEST) is None


def test_a_limited_token_is_not_limited_further() -> None:
    with pytest.raises(ConfigurationError, match="is limited itself"):
        limited(limited(TOKEN, "alice/*"), "alice/math")


def test_strangers_who_name_many_limits_let_nothing_be_stretched_again() -> None:
    proof._stretched.cache_clear()
    challenger = Challenger(TOKEN)
    for number in range(100):
        challenger.challenge("0" * 32, f"alice/x{number}")
        challenger.admits(f"{SCHEME} {'0' * 32} {'0' * 96} 0 {'0' * 64} bob/x{number}", REQUEST)
    challenger.challenge("0" * 32)
    assert proof._stretched.cache_info().misses == 1
