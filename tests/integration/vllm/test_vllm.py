"""Real rounds into a real vLLM: offline and served, one rank and two, tied and untied, old prefixes cached, a load that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.vllm.vllm_support import run_program

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("server-env", 1),
        *(pytest.param(kind, ranks, marks=pytest.mark.rare) for kind, ranks in [
            ("offline", 1), ("offline", 2), ("server", 1), ("server", 2), ("offline-env", 1), ("async-env", 1), ("async-env", 2),
            ("server-env", 2), ("offline-env", 2),
        ]),
    ],
)  # fmt: skip
def test_answers_are_those_of_the_published_checkpoint(tmp_path: Path, kind: str, ranks: int) -> None:
    seen = run_program("vllm/vllm_rounds.py", kind, ranks, tmp_path, ranks=ranks)
    assert "streamed through vLLM's loader: this worker's weights are on cpu, where vLLM repacks" in seen["log"]  # "auto" says why
    assert " vllm-0/0 joined run " in seen["log"]
    assert " vllm-0/0 serves run" in seen["log"]
    assert seen["before"] is True  # vLLM and Transformers agree at all
    for entry in seen["versions"]:
        assert entry["equal"], entry
        assert entry["label_after"] == entry["version"]
        assert (entry["state"], entry["delivery"], entry["verified"], entry["digest"]) == ("loaded", "streamed", "received", True)
        assert "on cpu, where vLLM repacks linear weights" in entry["why"]
        assert entry["nbytes"] == ranks * entry["model"]  # every rank stages the whole checkpoint
        assert entry["cached_before"] > 0  # so a cache that survived would have been used
        assert entry["cached_after"] == 0
        assert all(len(set(answer)) > 3 for answer in entry["answers"])
    answers = [entry["answers"] for entry in seen["versions"]]
    assert all(one != other for index, one in enumerate(answers) for other in answers[:index])
    failed = seen["versions"][2]
    assert "injected into the load" in failed["failed"]
    assert failed["label"] in (None, "weightsync:none")  # never the old version's, nor the one that failed
    if kind.startswith("server"):  # requests may name a version (by the plugin, without an option on the command line)
        assert failed["ready"] == 503
        for entry in seen["versions"]:
            assert entry["named"] == {
                "later": 409, "least": 200, "exact": 200, "earlier": 409, "answered": entry["version"],
                "ready": [200, entry["version"]],
            }  # fmt: skip
