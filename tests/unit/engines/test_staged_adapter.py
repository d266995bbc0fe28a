"""What adapters of engines with a server of their own declare, and what they keep of a checkpoint from version to version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from weightsync.engine.adapter import EngineAdapter
from weightsync.engines.hf_checkpoint import HfCheckpoint
from weightsync.engines.module import ModuleAdapter
from weightsync.engines.sglang.joining import SglangAdapter
from weightsync.engines.staged_adapter import StagedAdapter
from weightsync.engines.vllm.adapter import VllmWorkerAdapter
from weightsync.errors import LoadError
from weightsync.model import Manifest, TensorSpec


@pytest.mark.parametrize("adapter", [SglangAdapter, VllmWorkerAdapter])
def test_an_engine_that_its_own_clients_can_resume_is_paused_again(adapter: type[StagedAdapter]) -> None:
    assert adapter.pauses_twice
    assert adapter.loads_late


def staging(*names: str) -> StagedAdapter:
    specs = [TensorSpec(name, (2,), "float32", ("head",) if name == "embed" else ()) for name in names]
    files = [file for name in names for file in ([name, "head"] if name == "embed" else [name])]
    return StagedAdapter(HfCheckpoint(Manifest(specs), tuple(files)), "an engine")


def brings(adapter: StagedAdapter, value: float, *names: str, kept: Sequence[str] = ()) -> None:
    adapter.begin()
    adapter.keep(kept)
    adapter.load((name, torch.full((2,), value)) for name in names)


NAMES = ("embed", "layers.0.a", "layers.0.b.1.c", "layers.1.a", "norm")


@pytest.mark.parametrize(("changed", "loaded"), [
    (["layers.0.a"], ["layers.0.a", "layers.0.b.1.c"]), (["embed"], ["embed", "head", "norm"]), ([], []),
    (["layers.1.a", "norm"], ["embed", "head", "layers.1.a", "norm"]),
])  # fmt: skip
def test_blocks_in_which_a_tensor_changed_are_loaded_from_what_is_staged(changed: list[str], loaded: list[str]) -> None:
    adapter = staging(*NAMES)
    brings(adapter, 1, *NAMES)
    brings(adapter, 2, *changed, kept=[name for name in NAMES if name not in changed])
    adapter.check_complete()
    assert [name for name, _ in adapter.staged(changed=True)] == loaded
    values = {name: float(tensor[0]) for name, tensor in adapter.staged()}
    assert values == {name: 2 if name in changed or (name == "head" and "embed" in changed) else 1 for name in (*NAMES, "head")}


def test_what_was_never_staged_cannot_be_kept() -> None:
    adapter = staging(*NAMES)
    brings(adapter, 1, "embed", kept=NAMES[1:])
    with pytest.raises(LoadError, match="4 tensors were not received"):
        adapter.check_complete()
    brings(adapter, 1, *NAMES)
    adapter.begin()
    with pytest.raises(LoadError, match="5 tensors were not received"):  # what is kept is said anew for each version
        adapter.check_complete()


@pytest.mark.parametrize("adapter", [SglangAdapter, VllmWorkerAdapter, ModuleAdapter])
def test_loaders_that_take_some_tensors_say_so_and_not_for_loaders_that_replace_them(adapter: type[EngineAdapter]) -> None:
    assert adapter.loads_some and not EngineAdapter.loads_some
    for method in ("load", "wake_weights"):
        other: Any = type(f"Other{method}", (adapter,), {method: lambda *_: None})
        again: Any = type(f"Again{method}", (other,), {"loads_some": True})
        assert again.loads_some and not other.loads_some
