"""Real Megatron-core models in real processes: published without a gather, they arrive in Transformers' module bit for bit."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.megatron_cases import Case, hf_config

import weightsync

ROOT = Path(__file__).parents[2]
NEEDED = [name for name in ("megatron", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.timeout(180),  # the ranks share two cores with whatever else runs
    pytest.mark.skipif(
        bool(NEEDED), reason=f"needs {', '.join(NEEDED)}: pip install megatron-core==0.16.1 transformers safetensors"
    ),
]

TIED = {"tie_word_embeddings": True}
CASES = [
    Case("llama", tp=2, dtype="float32", forward=True),
    Case("llama", pp=2, changes=TIED),
    Case("llama", tp=2, pp=2),
    Case("llama", pp=2, vpp=2),
    Case("llama", tp=2, dp=2),
    Case("llama", tp=4, changes={"num_key_value_heads": 2}),
    Case("qwen2", tp=2, dtype="float32", forward=True, changes=TIED),
    Case("qwen2", tp=2, pp=2, vpp=2, changes=TIED),
    Case("qwen3", tp=2, dtype="float32", forward=True),
    Case("qwen3", tp=2, pp=2),
    Case("qwen3_moe", ep=2),
    Case("qwen3_moe", tp=2, ep=2, etp=2),
    Case("qwen3_moe", tp=2, ep=2, etp=1, pp=2, stacked=False),
    Case("mixtral", tp=2, etp=2),
    Case("mixtral", ep=2, pp=2, vpp=2, stacked=False),
    Case("deepseek_v3", tp=2, ep=2, etp=1),
    Case("deepseek_v3", tp=2, ep=2, etp=2),
    Case("deepseek_v3", ep=2, pp=2, stacked=False),
]


class Ranks:
    """The process that has imported Megatron, from which the ranks of each case are forked. A case that fails ends it."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._process: subprocess.Popen[str] | None = None
        self._busy = False

    def begin(self, case: Case, folder: Path) -> None:
        if self._busy:
            self.close()
        if self._process is None:
            self._start()
        self._busy = True
        self.write(json.dumps([asdict(case), str(folder)]))

    def _start(self) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("WEIGHTSYNC_")}
        environment |= {"WEIGHTSYNC_PORT": "0", "PYTHONWARNINGS": "ignore"}  # Megatron warns of all that is not installed
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.megatron_ranks"],
                cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1,
                start_new_session=True,
            )  # fmt: skip
        self.read("ready")

    def write(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")

    def read(self, key: str) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        said = json.loads(line) if line else {}
        assert key in said, f"{said}\n{self._log.read_text()[-4000:]}"
        return said

    def end(self) -> None:
        """All ranks of the case have ended well."""
        assert set(self.read("ended")["ended"]) == {0}
        self._busy = False

    def close(self) -> None:
        if self._process is None:
            return
        if self._busy:
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process, self._busy = None, False


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("megatron"))
    yield started
    started.close()


def _module(case: Case) -> torch.nn.Module:
    """The engine's module: Transformers' own, or one that has its parameters under the names of the checkpoint."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        hf_config(case.family, case.changes), dtype=getattr(torch, case.dtype)
    )
    for name, value in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            value.data = value.data.float()  # as checkpoints have it
    return module if case.stacked else Checkpoint(module)


class Checkpoint(torch.nn.Module):
    """Parameters under the names that Transformers saves, as vLLM's loaders take them."""

    def __init__(self, model: Any) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        super().__init__()
        for name, value in revert_weight_conversion(model, model.state_dict()).items():
            path, _, last = name.rpartition(".")
            module: torch.nn.Module = self
            for part in path.split("."):
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, torch.nn.Parameter(value.clone()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_version_arrives_in_transformers_bit_for_bit(ranks: Ranks, case: Case, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from tests.integration.megatron_reference import reference, stacked

    module = _module(case)
    adapter = weightsync.ModuleAdapter(module, include_buffers=True)
    ranks.begin(case, tmp_path)
    environment = ranks.read("environment")["environment"]
    where, token = environment["WEIGHTSYNC_COORDINATOR"], environment["WEIGHTSYNC_TOKEN"]
    with weightsync.Engine(adapter, replica="transformers-0", coordinator=where, token=token):
        for version in range(1, case.versions + 1):
            assert ranks.read("published")["replicas"] == [["loaded", "installed", "direct"]]
            wanted = reference(case, tmp_path, version)
            wanted = stacked(wanted) if case.stacked else wanted
            held = module.state_dict()
            assert set(held) == set(wanted)
            assert [name for name, value in wanted.items() if not torch.equal(held[name], value)] == []
            if case.forward:
                computed = load_file(tmp_path / f"{version}-logits.safetensors")
                with torch.no_grad():
                    logits = module(computed["ids"]).logits
                torch.testing.assert_close(logits, computed["logits"], rtol=1e-4, atol=1e-4)
            ranks.write("")
    ranks.end()
