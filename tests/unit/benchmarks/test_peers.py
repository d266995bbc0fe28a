"""The comparison with other systems, over gloo with a tiny model: rows of what runs, of what is absent and of what fails."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import __main__ as driver
from benchmarks.peers.movers import MOVERS
from benchmarks.peers.ways import WAYS

from weightsync.errors import ConfigurationError

_TINY = {
    "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16, "vocab_size": 64,
    "intermediate_size": 64, "num_key_value_heads": 1,
}  # fmt: skip

_ENGINE = """
import math
import torch

def packed_broadcast_producer(iterator, group, src, post_iter_func):
    for item in iterator:
        group.broadcast(post_iter_func(item).contiguous().view(-1).view(torch.uint8), src=src)

def packed_broadcast_consumer(iterator, group, src, post_unpack_func):
    for name, (shape, dtype) in iterator:
        received = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        group.broadcast(received, src=src)
        post_unpack_func([(name, received.view(dtype).view(shape))])
"""
"""An engine with the interface of NeMo-RL's, on the CPU."""


def _measured(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    model = folder / "tiny.json"
    model.write_text(json.dumps(_TINY))
    out = folder / "out" / "peers.json"
    status = driver.main(["--device", "cpu", "--model", str(model), "--rounds", "2", "--out", str(out), *arguments])
    return status, json.loads(out.read_text())


def test_every_way_has_a_mover_or_is_measured_by_the_bench() -> None:
    assert {way.mover for way in WAYS if way.mover} == set(MOVERS)
    assert [way.name for way in WAYS if not way.mover] == ["limit", "cuda_ipc", "streamed", "nccl"]
    assert len({way.label for way in WAYS}) == len(WAYS)


def test_unknown_ways_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="unknown ways: nothing"):
        _measured(tmp_path, "--only", "nothing")


def test_a_way_is_measured_and_one_that_is_absent_says_so(tmp_path: Path) -> None:
    status, report = _measured(tmp_path, "--only", "cuda_ipc,nemo_rl,by_tensor", "--nemo-rl", str(tmp_path / "nowhere"))
    assert status == 0
    ours, absent, by_tensor = report["rows"]
    assert ours["absent"] == "needs CUDA devices"
    assert absent["absent"].startswith("not installed: 0 files packed_tensor.py")
    assert len(by_tensor["variants"][0]["rounds_ms"]) == 2
    low, high = by_tensor["move"]
    assert 0 < low <= high
    assert report["what"].startswith("26,880 bytes in 14 tensors (")
    assert report["environment"]["torch"]


def test_what_has_no_time_left_says_so(tmp_path: Path) -> None:
    status, report = _measured(tmp_path, "--seconds", "1")
    assert status == 0
    assert {row["absent"] for row in report["rows"]} == {"left out: no time"}
    assert len(report["rows"]) == sum(2 in way.gpus for way in WAYS)


@pytest.mark.rare
def test_another_systems_engine_is_loaded_from_its_folder(tmp_path: Path) -> None:
    engine = tmp_path / "nemo_rl" / "utils"
    engine.mkdir(parents=True)
    (engine / "packed_tensor.py").write_text(_ENGINE)
    (tmp_path / "nemo_rl" / "VERSION").write_text("main of today\n")
    status, report = _measured(tmp_path, "--only", "flat,nemo_rl", "--nemo-rl", str(tmp_path / "nemo_rl"))
    assert status == 0
    _flat, row = report["rows"]
    assert [variant["settings"] for variant in row["variants"]] == [{"buffers": 2}, {"buffers": 3}]
    assert row["detail"].startswith("main of today, packed_tensor.py sha256 ")


@pytest.mark.rare
@pytest.mark.parametrize(
    ("mistake", "problem"),
    [
        (("post_unpack_func([(name", "name == 'lm_head.weight' or post_unpack_func([(name"), "1 tensors did not arrive"),
        (("group.broadcast(received, src=src)", "import threading; threading.Event().wait()"), "did not finish within"),
        (("group.broadcast(received, src=src)", "import os; os._exit(3)"), "rank-1 ended|[Cc]onnection (closed|reset)"),
    ],
    ids=["wrong", "hangs", "dies"],
)
def test_an_engine_that_fails_is_a_row_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: tuple[str, str], problem: str
) -> None:
    (tmp_path / "packed_tensor.py").write_text(_ENGINE.replace(*mistake))
    broken = next(way for way in WAYS if way.name == "nemo_rl")
    short = type(broken)(**{name: getattr(broken, name) for name in broken.__struct_fields__} | {"seconds": 20.0})
    monkeypatch.setattr(driver, "WAYS", [short, *(way for way in WAYS if way.name == "by_tensor")])
    status, report = _measured(tmp_path, "--nemo-rl", str(tmp_path))
    assert status == 1
    row, by_tensor = report["rows"]
    assert re.search(problem, row["error"])
    assert "move" not in row
    assert by_tensor["move"]
