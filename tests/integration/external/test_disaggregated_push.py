"""Holds ``weightsync push`` to its promise: checkpoints reach running servers bit for bit; a server that fails hurts itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.integration.external.disaggregated_server import checkpoint
from tests.integration.external.disaggregated_support import Server, serving
from typer.testing import CliRunner

from weightsync.cli.main import app
from weightsync.external.checkpoint_files import INDEX

CONFORMANCE = "tests.contract.external.conformance_server"

pytestmark = pytest.mark.usefixtures("first_gloo_group", "no_leaks")


def _save(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """In two files with an index."""
    directory.mkdir()
    names = list(tensors)
    mapped: dict[str, str] = {}
    for part in (names[:4], names[4:]):
        file = f"model-{part[0].replace('.', '_')}.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        mapped |= dict.fromkeys(part, file)
    (directory / INDEX).write_text(json.dumps({"weight_map": mapped}))
    return directory


def _push(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["push", "--backend", "gloo", "--json", "--timeout", "40", "--bucket", "64", *arguments])
    assert done.stdout, done.output
    return done.exit_code, json.loads(done.stdout)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Server, Server]]:
    with serving(ranks=2) as one, serving(ranks=2) as other:
        yield one, other


def test_two_servers_of_two_ranks_are_updated_and_verified(pair: tuple[Server, Server], tmp_path: Path, seed: int) -> None:
    urls = [item for server in pair for item in ("--to", server.url)]
    for number in (1, 2):
        tensors = checkpoint(seed + number)
        path = _save(tmp_path / str(number), tensors)
        code, found = _push(str(path), *urls, "--engine", "weightsync", "--ranks", "2", "--label", f"push@{number}")
        assert code == 0, found
        assert (found["ok"], found["tensors"]) == (True, len(tensors))
        for server, result in zip(pair, found["servers"], strict=True):
            assert (result["ok"], result["verified"]) == (True, True)
            assert "verified as installed" in result["answer"]
            assert [server.holds(tensors, rank) for rank in range(2)] == [[], []]
            state = server.state()
            assert (state["state"], state["weight_version"], state["groups"]) == ("serving", f"push@{number}", [])


def test_server_that_fails_is_not_resumed_and_the_other_is_updated(pair: tuple[Server, Server], tmp_path: Path, seed: int) -> None:
    good, bad = pair
    bad.calls()
    bad.fault(1, raise_at="head.weight")
    tensors = checkpoint(seed)
    path = _save(tmp_path / "it", tensors)
    arguments = [str(path), "--to", bad.url, "--to", good.url, "--engine", "weightsync", "--ranks", "2"]
    code, found = _push(*arguments)
    assert (code, found["ok"]) == (1, False)
    failed, fine = found["servers"]
    assert (failed["ok"], failed["touched"], "no room for head.weight" in failed["answer"]) == (False, True, True)
    assert fine["ok"]
    assert good.holds(tensors, 1) == []
    assert bad.state()["state"] == "dirty"
    assert "resume" not in bad.calls()
    bad.fault(1)
    assert _push(*arguments)[0] == 0  # the same again heals it
    assert bad.holds(tensors, 1) == []
    assert bad.state()["state"] == "serving"


@pytest.mark.parametrize("engine", ["sglang", "lmdeploy", "vllm"])
def test_engines_by_their_own_routes(engine: str, tmp_path: Path, seed: int) -> None:
    tensors = checkpoint(seed)
    path = _save(tmp_path / "it", tensors)
    with serving(CONFORMANCE, engine=engine, token="key") as server:  # vLLM's does not look at it
        token = tmp_path / "token"
        token.write_text("key")
        token.chmod(0o600)
        code, found = _push(str(path), "--to", server.url, "--engine", engine, "--label", "7", "--token-file", str(token))
        assert code == 0, found
        assert (found["servers"][0]["ok"], found["servers"][0]["verified"]) == (True, engine == "vllm")
        assert server.holds(tensors) == []
        calls = server.calls()
        assert calls[-1] == "destroy"
        assert calls.count("flush") == (engine in ("sglang", "vllm"))


def test_server_without_an_update_is_untouched_when_nobody_answers_or_the_checkpoint_is_wrong(
    pair: tuple[Server, Server], tmp_path: Path, seed: int
) -> None:
    good, _ = pair
    good.calls()
    path = _save(tmp_path / "it", checkpoint(seed))
    code, found = _push(str(path), "--to", "http://127.0.0.1:9", "--engine", "weightsync")
    assert code == 1
    assert (found["servers"][0]["touched"], "PeerLost" in found["servers"][0]["answer"]) == (False, True)
    (path / INDEX).write_text('{"weight_map": {"a": "../x.safetensors"}}')
    done = CliRunner().invoke(app, ["push", str(path), "--to", good.url, "--engine", "weightsync", "--backend", "gloo"])
    assert done.exit_code == 2
    assert "files of this directory" in done.stderr
    for wrong in (["--to", good.url], ["--engine", "other"], ["--bucket", "0"]):
        assert (
            CliRunner()
            .invoke(app, ["push", str(path), "--to", good.url, "--engine", "weightsync", "--backend", "gloo", *wrong])
            .exit_code
            == 2
        )
    assert good.calls() == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"not.ours": torch.zeros(4)}, "1 tensors are unknown to the engine: not.ours"),
        ({"norm.scale": torch.zeros(3)}, "shape of norm.scale"),
        ({"norm.scale": torch.zeros((), dtype=torch.float64)}, "dtype of norm.scale"),
        ({"norm.scale": None}, "1 of the engine's 7 tensors are not there to be sent: norm.scale"),
    ],
)
def test_a_checkpoint_of_another_model_pauses_nobody(
    pair: tuple[Server, Server], tmp_path: Path, seed: int, change: dict[str, torch.Tensor | None], words: str
) -> None:
    good, _ = pair
    good.calls()
    state = good.state()
    tensors: dict[str, torch.Tensor | None] = {**checkpoint(seed), **change}
    path = _save(tmp_path / "it", {name: tensor for name, tensor in tensors.items() if tensor is not None})
    code, found = _push(str(path), "--to", good.url, "--engine", "weightsync", "--ranks", "2")
    result = found["servers"][0]
    assert (code, result["touched"], words in result["answer"]) == (1, False, True), result
    assert good.state() == state
    assert good.calls() == []


def test_a_checkpoint_that_does_not_fit_into_memory_pauses_nobody(pair: tuple[Server, Server], tmp_path: Path, seed: int) -> None:
    good, _ = pair
    good.calls()
    state, file = good.state(), tmp_path / "model.safetensors"
    arguments = ["push", str(tmp_path), "--to", good.url, "--engine", "weightsync", "--backend", "gloo"]
    for size in (1 << 30, 1 << 43):
        text = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(file, 8 + len(text) + size)
        done = CliRunner().invoke(app, arguments)
        assert (done.exit_code, "are stored" in done.stderr) == (2, True), done.stderr
    done = CliRunner().invoke(app, [*arguments, "--allow-sparse"])  # 8 TiB
    assert (done.exit_code, "do not fit into memory" in done.stderr) == (2, True), done.stderr
    assert good.state() == state
    assert good.calls() == []


def test_result_for_people(pair: tuple[Server, Server], tmp_path: Path, seed: int) -> None:
    path = _save(tmp_path / "it", checkpoint(seed))
    good, _ = pair
    arguments = [
        "push",
        str(path),
        "--to",
        good.url,
        "--engine",
        "weightsync",
        "--ranks",
        "2",
        "--backend",
        "gloo",
        "--timeout",
        "40",
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert f"{good.url}: version " in done.stdout
