"""What needs no framework: options of streams, and the check of an installation."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from weightsync.errors import ConfigurationError
from weightsync.integrations import __main__ as command
from weightsync.integrations.stream_options import Options, cast, server_settings
from weightsync.integrations.verl.source import EngineShards, training_worker, whole_weights
from weightsync.server.findings import Finding


def _casted(dtype: object) -> dict[str, torch.dtype]:
    weights = {"gate.weight": torch.zeros(2), "up.weight": torch.zeros(2), "positions": torch.zeros(2, dtype=torch.int64)}
    return {name: tensor.dtype for name, tensor in cast(weights.items(), Options.of({"dtype": dtype}, "engine.weightsync"))}


@pytest.mark.parametrize(
    ("dtype", "gate", "up"),
    [
        (None, torch.float32, torch.float32),
        ({"*.weight": "bfloat16"}, torch.bfloat16, torch.bfloat16),
        ({"gate.*": "float32", "*": "bfloat16"}, torch.float32, torch.bfloat16),
        ({"*": "torch.float16", "gate.*": "float32"}, torch.float16, torch.float16),
        ({"nothing": "bfloat16"}, torch.float32, torch.float32),
        (["gate.*=float32", "*=bf16"], torch.float32, torch.bfloat16),
    ],
)
def test_the_first_pattern_that_fits_a_name_decides_its_dtype(dtype: object, gate: torch.dtype, up: torch.dtype) -> None:
    assert _casted(dtype) == {"gate.weight": gate, "up.weight": up, "positions": torch.int64}


def test_one_dtype_for_all_is_left_to_the_trainer() -> None:
    assert Options.of({"dtype": "bfloat16"}, "engine.weightsync").whole_dtype() is torch.bfloat16
    assert Options.of({"dtype": "bf16"}, "engine.weightsync").whole_dtype() is torch.bfloat16
    assert _casted("bfloat16")["up.weight"] is torch.float32
    assert Options.of({}, "engine.weightsync").whole_dtype() is None


@pytest.mark.parametrize(
    "given",
    [
        {"dtyp": "bfloat16"}, {"dtype": "int8"}, {"dtype": "Tensor"}, {"dtype": {"*": "bf8"}}, {"dtype": 3}, {"timeout": 0},
        {"dtype": ["bfloat16"]}, {"dtype": ["*=int8"]}, {"dtype": [3]}, {"coordinator": "ftp://head"}, {"transports": ["rdma"]},
        {"timeout": "soon"}, {"transports": "tcp"}, {"transports": [1]}, {"coordinator": 7400},
    ],
)  # fmt: skip
def test_a_wrong_option_is_an_error_that_says_where_it_was_given(given: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=r"^engine\.weightsync"):
        Options.of(given, "engine.weightsync")


def test_a_coordinator_listens_beyond_loopback_only_where_all_nodes_can_know_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WEIGHTSYNC_")]:
        monkeypatch.delenv(name)
    assert (server_settings("192.0.2.7").host, server_settings("192.0.2.7").port) == ("127.0.0.1", 0)
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "secret")
    assert server_settings("192.0.2.7").host == "192.0.2.7"
    monkeypatch.setenv("WEIGHTSYNC_HOST", "192.0.2.8")
    assert server_settings("192.0.2.7").host == "192.0.2.8"


def test_the_frozen_base_of_a_lora_adapter_is_refused_because_verl_never_sends_the_adapter() -> None:
    base = {"embed.weight": torch.zeros(2), "layers.0.q_proj.base_layer.weight": torch.zeros(2)}
    walked = []
    with pytest.raises(ConfigurationError, match=r"q_proj\.base_layer\.weight.*lora\.merge=True"):
        for name, _ in whole_weights(base.items()):
            walked.append(name)
    assert walked == ["embed.weight"]


class _Worker:
    """As much of verl's actor worker as is looked for."""

    def __init__(self) -> None:
        self.actor = SimpleNamespace(engine=SimpleNamespace(get_per_tensor_param=print))
        self.found = self._makes()

    def _makes(self) -> object:
        return training_worker()


def test_the_training_engine_is_that_of_the_worker_that_makes_the_checkpoint_engine() -> None:
    worker = _Worker()
    assert worker.found is worker
    assert training_worker() is None


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (None, "does not show its training engine"),
        (SimpleNamespace(module=torch.nn.Linear(2, 2)), "neither FSDP2"),
        (SimpleNamespace(module=[], peft_cls=object), "adapters are merged"),
        (SimpleNamespace(module=SimpleNamespace(peft_config={})), "adapters are merged"),
        (SimpleNamespace(module=[], peft_cls=None, _qat_enabled=True), "quantized"),
    ],
)
def test_what_verl_converts_while_it_sends_is_not_published_as_it_is(engine: object, words: str) -> None:
    for direct in (True, False):
        with pytest.raises(ConfigurationError, match=words):
            EngineShards(engine and SimpleNamespace(actor=SimpleNamespace(engine=engine))).source(
                Options.of({}, "engine.weightsync"), direct=direct
            )


def _check(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightsync.integrations", name]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif("verl" in sys.modules, reason="verl is installed here")
def test_the_check_says_that_verl_is_missing_and_fails() -> None:
    pytest.importorskip("ray")
    done = _check("verl")
    assert done.returncode == 1, done.stderr
    assert "missing  verl" in done.stdout


def test_the_check_names_the_frameworks_that_it_knows() -> None:
    done = _check("slime")
    assert done.returncode == 2
    assert "verl" in done.stderr


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("limited", 0), ("missing", 1), ("unknown", 1)])
def test_the_check_fails_if_one_finding_means_that_it_cannot_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    rows = [Finding("first", "ok", "fine"), Finding("second", status, "value", "what it costs")]  # type: ignore[arg-type]
    monkeypatch.setattr(command, "findings", lambda package: iter(rows))
    assert command.main(["verl"]) == code
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["ok", "first", "fine"]
    assert [line.split() for line in printed[1:]] == [[status, "second", "value"], ["what", "it", "costs"]]


def test_a_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(package: str) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(command, "findings", broken)
    assert command.main(["verl"]) == 1
    assert "RuntimeError: no such thing" in capsys.readouterr().out
