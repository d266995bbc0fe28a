"""The GPU benchmark of LMDeploy, as far as it runs without one: its server's processes, its buckets, and its tokenizer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import gpu_lmdeploy

CHILD = (
    "import subprocess, sys, time\n"
    "code = 'import time; print(1, flush=True); time.sleep(60)'\n"
    "child = subprocess.Popen([sys.executable, '-c', code], start_new_session=True, stdout=subprocess.PIPE)\n"
    "child.stdout.readline()"  # it runs by then: before, it has no environment that can be read
)


def test_a_server_is_ended_with_processes_that_left_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[str] = []
    original = gpu_lmdeploy.environment

    def environment(mark: str) -> dict[str, str]:
        marks.append(mark)
        return dict(original(mark))  # type: ignore[no-untyped-call]

    monkeypatch.setattr(gpu_lmdeploy, "environment", environment)
    program = f"{CHILD}\nprint('{gpu_lmdeploy.READY}here', flush=True); time.sleep(60)"
    with gpu_lmdeploy.serving([sys.executable, "-c", program], tmp_path / "log", 30):
        assert len(list(gpu_lmdeploy.marked(marks[0]))) == 2  # type: ignore[no-untyped-call]
    assert list(gpu_lmdeploy.marked(marks[0])) == []  # type: ignore[no-untyped-call]
    assert gpu_lmdeploy.READY in (tmp_path / "log").read_text()


def test_a_server_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="no such model"),
        gpu_lmdeploy.serving([sys.executable, "-c", "print('no such model')"], tmp_path / "log", 30),
    ):
        pass


def test_ray_finds_no_other_cluster_and_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    made = gpu_lmdeploy.environment("mark")  # type: ignore[no-untyped-call]
    assert "RAY_ADDRESS" not in made
    assert (made["CUDA_VISIBLE_DEVICES"], made[gpu_lmdeploy.MARK]) == ("3", "mark")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"


def test_buckets_hold_the_bytes_of_the_parameters() -> None:
    model = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
    made = gpu_lmdeploy.buckets_of_model(model, 24)  # type: ignore[no-untyped-call]
    assert [[spec.name for spec in bucket.specs] for bucket in made] == [["bias"], ["weight"]]
    assert torch.equal(made[1].memory.view(torch.bfloat16).view(3, 4), model.weight)


def test_a_tokenizer_of_every_token_is_made_here(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    gpu_lmdeploy.make_tokenizer(tmp_path, 20)  # type: ignore[no-untyped-call]
    made = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert made("w3 w19")["input_ids"] == [3, 19]
    assert made.eos_token_id == 2
