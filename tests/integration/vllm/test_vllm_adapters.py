"""LoRA adapters of PEFT in a real vLLM server: answers equal Transformers' and PEFT's, by name and by version."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tests.integration.vllm.vllm_support import run_program

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.rare, pytest.mark.timeout(420)]


def test_adapters_are_served_by_version_through_evictions_and_a_base_update(tmp_path: Path) -> None:
    seen = run_program("vllm/vllm_adapters.py", tmp_path, ranks=1)
    assert seen["publish1"] == seen["publish2"] == [[None, "installed", 0.0]]
    assert seen["differ"] and seen["newest"] and seen["first"] and seen["again"]
    assert seen["unknown"] == seen["gone"] == [404, 404]
    assert seen["contradicted"] == [200] * 4 + [409] * 4, "headers that ask for another version than the body"
    assert "choose another name" in seen["taken"] and "@" not in seen["base before"]
    assert seen["foreign"] == [[500, True], [500, True], [200, False]], "nobody else's adapter takes a version's place"
    assert seen["kept"]
    assert seen["retired"] == ["alice/math@1", "alice/math@2"]
    assert seen["running"] == [True, True], "a request that ran kept its version"
    assert seen["newer"] and seen["others"] and all(seen["evicted"])
    assert "all 4 slots for adapters are in use" in seen["full"]
    assert "has rank 16, and this engine allows 8" in seen["wrong_rank"]
    assert "bob/code" in seen["wrong_module"]
    assert seen["base"] == "tiny"
    update = seen["update"]
    assert update["base"] == [[None, "received", "streamed"]]
    assert update["before"] == [True, True] and update["after"]
    assert update["strict"] == 404 and update["again"] == [None]


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_an_adapter_over_a_base_in_4_bits_gives_pefts_own_answers(tmp_path: Path) -> None:
    seen = run_program("vllm/vllm_qlora.py", tmp_path, ranks=1)
    assert seen["published"] == [[None, "installed"]] * 2
    assert seen["answers"] == [True, True] and seen["differ"]
    assert "quantized (QLoRA)" in seen["refused"]


def test_every_data_parallel_engine_of_a_server_is_a_rank_and_serves_each_version(tmp_path: Path) -> None:
    seen = run_program("vllm/vllm_parallel_adapters.py", tmp_path, ranks=2)
    assert seen["publish1"] == seen["publish2"] == [[None, "installed"]]
    assert seen["engines"] == ["0", "1"], "both engines answered requests"
    assert seen["differ"] and seen["answers"] == [True, True] and seen["newest"]
    assert (seen["retired"], seen["gone"]) == (["alice/math@1"], 404)
    assert seen["base"] == [[None, "received"]] and seen["updated"], "the base is updated in both, and keeps the adapter"


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_are_read_back_from_the_slots_of_every_rank(ranks: int, tmp_path: Path) -> None:
    seen = run_program("vllm/vllm_adapter_slots.py", tmp_path, ranks, ranks=ranks)
    assert seen["fused"] == seen["rows"] == seen["after"] == ["installed", ""]
    assert seen["fused answers"] and seen["rows answers"] and seen["after answers"] and seen["computed answers"]
    assert seen["spoiled"][1] == seen["left"][1] == 404, "a name became visible that was not read back"
    assert "has other bytes than were published of base_model.model.model.layers.0" in seen["spoiled"][0]
    assert "has more than was published" in seen["left"][0]
    verified, reason = seen["computed"]
    assert verified == "received" and "vLLM does more than copy" in reason and "\n" not in reason


@pytest.mark.rare
@pytest.mark.parametrize(("mutant", "unnoticed"), [("unread", ["spoiled", "left"]), ("filled only", ["left"])])
def test_what_is_spoiled_is_noticed_by_reading_back_alone(mutant: str, unnoticed: list[str], tmp_path: Path) -> None:
    seen = run_program("vllm/vllm_adapter_slots.py", tmp_path, 1, mutant, ranks=1)
    assert [name for name in ("spoiled", "left") if seen[name] == ["installed", ""]] == unnoticed


@pytest.mark.rare
def test_another_slot_than_the_adapters_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="has other bytes than were published"):
        run_program("vllm/vllm_adapter_slots.py", tmp_path, 1, "of the first slot", ranks=1)


def test_the_benchmark_of_adapters_runs() -> None:
    seen = run_program("../../benchmarks/vllm_adapters.py", "tiny", "--rank", "8", "--versions", "1", ranks=1)
    assert seen["answers_as_loaded"] == [True, True]
    assert (seen["verified"], seen["paused_seconds"]) == ("installed", 0.0)
    assert not all(seen["own_in_place_answers_as_fresh"]), "vLLM's cache knows an adapter by its name"
