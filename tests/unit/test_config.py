"""Settings: read from the environment or given, checked, and never leaking a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightsync.config import (
    Address,
    ClientSettings,
    Secret,
    ServerSettings,
    Timeouts,
    agent_environment,
    control_settings,
    read_token,
    runtime_directory,
    token_for_request,
)
from weightsync.errors import ConfigurationError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://head:7400", Address("http", "head", 7400)),
        ("http://head", Address("http", "head", 7400)),
        ("https://head.example:443/", Address("https", "head.example", 443)),
        ("http://[::1]:7401", Address("http", "::1", 7401)),
        (" http://127.0.0.1:1 ", Address("http", "127.0.0.1", 1)),
    ],
)
def test_addresses_are_parsed(url: str, expected: Address) -> None:
    assert Address.parse(url) == expected
    assert Address.parse(expected.url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "head:7400",
        "ftp://head",
        "http://",
        "http://head:99999",
        "http://[::1",
        "http://u:p@head",
        "http://head/x",
        "http://head?x",
    ],
)
def test_bad_addresses_are_refused_with_an_example(url: str) -> None:
    with pytest.raises(ConfigurationError, match="http://host:7400"):
        Address.parse(url)


def test_a_setting_that_does_not_exist_is_not_dropped_in_silence() -> None:
    with pytest.raises(TypeError, match="ServerSettings has no grace, prot"):
        ServerSettings.load({}, prot=7400, grace=2.0)


def test_a_password_in_a_url_is_not_repeated() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Address.parse("http://user:hunter2@head:7400")
    assert "hunter2" not in str(caught.value)


def test_ipv6_addresses_keep_their_brackets() -> None:
    address = Address.parse("https://[fe80::1]:7400")
    assert address.url == "https://[fe80::1]:7400"
    assert address.websocket == "wss://[fe80::1]:7400"


def test_what_is_given_wins_over_the_environment() -> None:
    environment = {"WEIGHTSYNC_PORT": "7500", "WEIGHTSYNC_HOST": "::1", "WEIGHTSYNC_ROUND_DEADLINE": "12.5"}
    settings = ServerSettings.load(environment, port=0, host=None)
    assert (settings.port, settings.host, settings.round_deadline) == (0, "::1", 12.5)


def test_limits_come_from_the_environment_too() -> None:
    assert ServerSettings.load({"WEIGHTSYNC_FRAME_BYTES": "4096"}).limits.frame_bytes == 4096


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WEIGHTSYNC_PORT", "70000"),
        ("WEIGHTSYNC_PORT", "http"),
        ("WEIGHTSYNC_ROUND_DEADLINE", "-1"),
        ("WEIGHTSYNC_ROUND_DEADLINE", "nan"),
        ("WEIGHTSYNC_HEARTBEAT", "0"),
        ("WEIGHTSYNC_PAUSE_MODE", "later"),
        ("WEIGHTSYNC_REQUIRE", "some"),
        ("WEIGHTSYNC_REQUIRE", "-1"),
        ("WEIGHTSYNC_AGENTS", "0"),
        ("WEIGHTSYNC_TLS_CERTIFICATE", "/no/such/file"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=variable):
        ServerSettings.load({variable: value})


def test_what_the_coordinator_needs_is_passed_on() -> None:
    settings = ServerSettings.load({"WEIGHTSYNC_REQUIRE": "2", "WEIGHTSYNC_RUN": "mine"}, pause_mode="keep", round_deadline=9)
    control = control_settings(settings)
    assert (control.run, control.require, control.pause_mode, control.timeout) == ("mine", 2, "keep", 9)
    assert control_settings(ServerSettings.load({"WEIGHTSYNC_REQUIRE": "all"})).require == "all"
    assert control_settings(ServerSettings()).run != control_settings(ServerSettings()).run


def test_a_wrong_coordinator_is_named() -> None:
    with pytest.raises(ConfigurationError, match="WEIGHTSYNC_COORDINATOR"):
        ClientSettings.load({"WEIGHTSYNC_COORDINATOR": "head:7400"})


def test_half_of_a_tls_pair_is_refused(tmp_path: Path) -> None:
    certificate = tmp_path / "certificate.pem"
    certificate.write_text("x")
    with pytest.raises(ConfigurationError, match="WEIGHTSYNC_TLS_KEY"):
        ServerSettings.load({"WEIGHTSYNC_TLS_CERTIFICATE": str(certificate)})


def test_a_ca_file_without_https_is_refused(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("x")
    with pytest.raises(ConfigurationError, match="https"):
        ClientSettings.load({"WEIGHTSYNC_CA_FILE": str(ca)})


def test_a_token_never_shows() -> None:
    settings = ClientSettings.load({"WEIGHTSYNC_TOKEN": "hunter2hunter2"})
    assert settings.token == Secret("hunter2hunter2")
    assert "hunter2" not in repr(settings) + str(settings)
    with pytest.raises(ConfigurationError) as caught:
        ClientSettings.load({"WEIGHTSYNC_TOKEN": "hunter2 with spaces"})
    assert "WEIGHTSYNC_TOKEN" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_token_file_is_read_and_its_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("sesame-sesame\n")
    assert ServerSettings.load({"WEIGHTSYNC_TOKEN_FILE": str(path)}).token == Secret("sesame-sesame")
    with pytest.raises(ConfigurationError, match=r"WEIGHTSYNC_TOKEN_FILE.*No such file"):
        ServerSettings.load({"WEIGHTSYNC_TOKEN_FILE": str(tmp_path / "none")})
    path.write_text("two words")
    with pytest.raises(ConfigurationError, match="WEIGHTSYNC_TOKEN_FILE") as caught:
        ServerSettings.load({"WEIGHTSYNC_TOKEN_FILE": str(path)})
    assert "two words" not in str(caught.value)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="--token-file"):
        read_token(str(path), "--token-file ")
    with pytest.raises(ConfigurationError, match="both"):
        ServerSettings.load({"WEIGHTSYNC_TOKEN_FILE": str(path), "WEIGHTSYNC_TOKEN": "x"})


def test_an_empty_variable_counts_as_unset() -> None:
    assert ServerSettings.load({"WEIGHTSYNC_PORT": "", "WEIGHTSYNC_TOKEN": ""}) == ServerSettings()


def test_children_get_the_same_coordinator_and_token() -> None:
    settings = ClientSettings.load({}, coordinator="http://[::1]:7401", token=Secret("sesame"))
    assert ClientSettings.load(agent_environment(settings)) == settings


def test_the_runtime_directory_is_the_users_own(tmp_path: Path) -> None:
    assert runtime_directory({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "weightsync"
    elsewhere = runtime_directory({"XDG_RUNTIME_DIR": str(tmp_path / "none"), "TMPDIR": "/var/tmp"})
    assert elsewhere.parent == Path("/var/tmp")
    assert elsewhere.name.startswith("weightsync-")


def test_the_environments_token_is_for_the_environments_coordinator_alone() -> None:
    own = {"WEIGHTSYNC_COORDINATOR": "http://head:7400", "WEIGHTSYNC_TOKEN": "do-not-show-me"}
    assert token_for_request("http://head:7400", None, own) is None, "it is looked up as ever"
    assert token_for_request("http://HEAD:7400/", None, own) is None
    assert token_for_request(None, None, own) is None
    assert token_for_request("http://evil:7400", "given", own) == "given"
    for other in ("http://evil:7400", "http://head:7401", "https://head:7400", "http://127.0.0.1:7400"):
        with pytest.raises(ConfigurationError, match="that one alone") as caught:
            token_for_request(other, None, own)
        assert "show-me" not in str(caught.value)
    assert token_for_request("http://evil:7400", None, {"WEIGHTSYNC_COORDINATOR": "http://head:7400"}) is None, "it has none"
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:7400"):
        token_for_request("http://evil:7400", None, {"WEIGHTSYNC_TOKEN": "do-not-show-me"})


def test_timeouts_come_from_the_environment_unless_they_are_given() -> None:
    source = {"WEIGHTSYNC_PUBLISH_TIMEOUT": "7", "WEIGHTSYNC_CONNECT_TIMEOUT": "3", "WEIGHTSYNC_HEARTBEAT": "1.5"}
    loaded = ClientSettings.load(source).timeouts
    assert (loaded.publish, loaded.connect, loaded.heartbeat, loaded.reconnect) == (7.0, 3.0, 1.5, 10.0)
    assert ClientSettings.load(source, timeouts=Timeouts(publish=9)).timeouts == Timeouts(publish=9)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "5", True, None])
def test_a_wrong_timeout_is_a_configuration_error(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="publish="):
        Timeouts(publish=value)


def test_names_of_mounts_are_separated_by_commas() -> None:
    assert ServerSettings.load({"WEIGHTSYNC_MOUNTS": "rollouts, mine"}).mounts == ("rollouts", "mine")
    assert ServerSettings.load({}).mounts == ()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_STATE_HOME": "/state", "HOME": "/h"}, "/state/weightsync"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/weightsync"),
        ({"HOME": "/h"}, "/h/.local/state/weightsync"),
        ({"HOME": "/h", "WEIGHTSYNC_STATE_DIR": "/mine"}, "/mine"),
        ({"HOME": "/h", "WEIGHTSYNC_STATE_DIR": "off"}, None),
        ({}, None),
    ],
)
def test_the_history_is_kept_in_the_users_state_folder_unless_told_otherwise(
    environment: dict[str, str], expected: str | None
) -> None:
    directory = ServerSettings.load(environment).history_directory
    assert (None if directory is None else str(directory)) == expected
    assert ServerSettings().history_directory is None, "made in code, it touches no folder"
