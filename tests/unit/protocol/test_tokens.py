"""Tokens: comparing them, leaving one for local clients, and believing no file that somebody else could have written."""

from __future__ import annotations

import os
import secrets
import uuid
from pathlib import Path
from typing import Any

import pytest

from weightsync.config import Address, ClientSettings, Secret, ServerSettings
from weightsync.errors import AuthenticationError, ConfigurationError
from weightsync.protocol.tokens import (
    TokenFile,
    bearer,
    check_bind,
    find_token,
    generate,
    is_loopback,
    matches,
    plausible_bits,
    secret_of,
)

HERE = Address("http", "127.0.0.1", 7400)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_generated_tokens_differ_and_match_only_themselves() -> None:
    one, other = generate(), generate()
    assert one != other
    assert matches(bearer(one)["Authorization"], one)
    assert not matches(bearer(other)["Authorization"], one)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "sesame", "Basic sesame", "Bearer sesam", "Bearer sesame2", "Bearer s\u00e9same"]
)
def test_other_headers_do_not_match(header: str | None) -> None:
    assert not matches(header, Secret("sesame"))


def test_the_scheme_is_not_case_sensitive() -> None:
    assert matches("bearer sesame", Secret("sesame"))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("LOCALHOST", True),
        ("0.0.0.0", False),
        ("::", False),
        ("head", False),
        ("10.0.0.1", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    settings = ServerSettings(host=host)
    if loopback:
        check_bind(settings)
    else:
        with pytest.raises(ConfigurationError, match="WEIGHTSYNC_TOKEN"):
            check_bind(settings)
    check_bind(ServerSettings(host=host, token=generate()))


WEAK = ["changeme", "hunter2", "t" * 64, "ab" * 40, "correct-horse-battery", "0" * 32, "0123456789" * 3]


def test_plausible_bits_are_never_less_than_those_of_a_random_token() -> None:
    for _ in range(200):
        assert plausible_bits(Secret(secrets.token_urlsafe(16))) >= 128
        assert plausible_bits(Secret(secrets.token_hex(16))) == 128
        assert plausible_bits(Secret(str(uuid.uuid4()))) >= 128
        assert plausible_bits(generate()) >= 256


@pytest.mark.parametrize("weak", WEAK)
def test_a_secret_that_can_be_guessed_is_refused_beyond_loopback(weak: str, caplog: pytest.LogCaptureFixture) -> None:
    """One challenge, which everybody may ask for, is enough to guess it offline."""
    both: list[dict[str, Any]] = [{"token": Secret(weak)}, {"token": generate(), "operator_token": Secret(weak)}]
    for given in both:
        with pytest.raises(ConfigurationError, match=r"at most \d+ random bits.*token_urlsafe") as caught:
            check_bind(ServerSettings(host="0.0.0.0", **given))
        assert weak not in str(caught.value)
        check_bind(ServerSettings(**given))
        assert "random bits" in caplog.text
        assert weak not in caplog.text
        caplog.clear()


def test_a_token_is_found_by_port_and_gone_afterwards(directory: Path) -> None:
    token = generate()
    file = TokenFile(7400, token, directory)
    assert find_token(HERE, directory) == token
    assert find_token(Address("http", "::1", 7400), directory) == token
    assert find_token(Address("http", "localhost", 7401), directory) is None
    assert find_token(Address("http", "head", 7400), directory) is None, "a token of this machine must not go to another"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert file.path.stat().st_mode & 0o777 == 0o600
    file.remove()
    file.remove()
    assert find_token(HERE, directory) is None
    assert list(directory.iterdir()) == []


def test_a_file_left_by_a_killed_coordinator_is_replaced_and_a_successors_is_kept(directory: Path) -> None:
    old = TokenFile(7400, generate(), directory)
    token = generate()
    TokenFile(7400, token, directory)
    old.remove()
    assert find_token(HERE, directory) == token


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_token_that_others_can_read_or_write_is_not_believed(directory: Path, mode: int) -> None:
    file = TokenFile(7400, generate(), directory)
    file.path.chmod(mode)
    with pytest.raises(AuthenticationError, match="open to other users"):
        find_token(HERE, directory)


def test_an_open_directory_is_neither_read_nor_written(directory: Path) -> None:
    TokenFile(7400, generate(), directory)
    directory.chmod(0o777)
    with pytest.raises(AuthenticationError, match="open to other users"):
        find_token(HERE, directory)
    with pytest.raises(ConfigurationError, match="open to other users"):
        TokenFile(7401, generate(), directory)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_not_believed(directory: Path) -> None:
    file = TokenFile(7400, generate(), directory)
    os.chown(file.path, 12345, 12345)
    with pytest.raises(AuthenticationError, match="12345"):
        find_token(HERE, directory)


def test_links_are_not_followed(directory: Path, tmp_path: Path) -> None:
    token = TokenFile(7400, generate(), directory)
    (directory / "7401.token").symlink_to(token.path)
    with pytest.raises(AuthenticationError, match=r"7401\.token"):
        find_token(Address("http", "127.0.0.1", 7401), directory)
    (tmp_path / "link").symlink_to(directory)
    with pytest.raises(AuthenticationError, match="link"):
        find_token(HERE, tmp_path / "link")


def test_a_pipe_in_the_place_of_a_token_does_not_hang(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    os.mkfifo(directory / "7400.token", 0o600)
    with pytest.raises(AuthenticationError):
        find_token(HERE, directory)


@pytest.mark.parametrize("content", [b"", b"two words", b"\xff", b"x" * 5000])
def test_a_file_without_a_token_is_an_error(directory: Path, content: bytes) -> None:
    file = TokenFile(7400, generate(), directory)
    file.path.write_bytes(content)
    with pytest.raises(AuthenticationError, match="WEIGHTSYNC_TOKEN"):
        find_token(HERE, directory)


def test_a_configured_token_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    left, given = generate(), generate()
    TokenFile(7400, left)
    assert secret_of(ClientSettings(coordinator=HERE)) == left
    assert secret_of(ClientSettings(coordinator=HERE, token=given)) == given
