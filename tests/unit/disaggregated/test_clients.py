"""Holds the request builders to the engines' documented bodies, and the checks of requests to what they must refuse. No network."""

from __future__ import annotations

import pytest

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, DeadlineExceeded, VersionError
from weightsync.external.clients import vllm as vllm_requests
from weightsync.external.clients.http import HttpCall
from weightsync.model import Manifest, TensorSpec, Version
from weightsync.model.manifest import join_manifests
from weightsync_disaggregated.checks import parse_version
from weightsync_disaggregated.clients import lmdeploy, sglang, vllm, weightsync
from weightsync_disaggregated.clients.bodies import GroupSpec, destroy_group, init_group
from weightsync_disaggregated.weight_updates import WeightUpdates

WISH = GroupSpec("head", 29500, 1, 5, "g", "nccl")
SPECS = [TensorSpec("a", (2, 3), "bfloat16"), TensorSpec("b", (), "bfloat16")]
GROUP = {"master_address": "head", "master_port": 29500, "rank_offset": 1, "world_size": 5, "group_name": "g", "backend": "nccl"}
BUCKET = {
    "names": ["a", "b"], "dtypes": ["bfloat16"] * 2, "shapes": [[2, 3], []], "group_name": "g", "load_format": "flattened_bucket",
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (init_group(WISH), HttpCall("POST", "/init_weights_update_group", GROUP)),
        (lmdeploy.update(SPECS, "g", False), HttpCall("POST", "/update_weights_from_distributed", BUCKET | {"finished": False})),
        (lmdeploy.update(SPECS, "g", True), HttpCall("POST", "/update_weights_from_distributed", BUCKET | {"finished": True})),
        (destroy_group("g"), HttpCall("POST", "/destroy_weights_update_group", {"group_name": "g"})),
        (lmdeploy.ABORT_REQUESTS, HttpCall("POST", "/abort_request", {"abort_all": True})),
        (init_group(WISH, 5.0), HttpCall("POST", "/init_weights_update_group", GROUP | {"timeout": 5.0})),
        (sglang.BEGIN, HttpCall("POST", "/begin_weight_update", {"selector": "all"})),
        (
            sglang.update(SPECS, "g"),
            HttpCall("POST", "/update_weights_from_distributed", BUCKET | {"flush_cache": False, "abort_all_requests": False}),
        ),
        (
            sglang.update(SPECS, "g", "7", last=True),
            HttpCall(
                "POST",
                "/update_weights_from_distributed",
                BUCKET | {"flush_cache": True, "abort_all_requests": False, "weight_version": "7"},
            ),
        ),
        (sglang.END, HttpCall("POST", "/end_weight_update", {})),
        (sglang.pause_generation("retract"), HttpCall("POST", "/pause_generation", {"mode": "retract"})),
        (vllm_requests.init_engine({"x": 1}), HttpCall("POST", "/init_weight_transfer_engine", {"init_info": {"x": 1}})),
        (vllm.update_weights({}), HttpCall("POST", "/update_weights", {"update_info": {}})),
        (vllm.finish_weight_update("7"), HttpCall("POST", "/finish_weight_update", {"weight_version": "7"})),
        (vllm_requests.pause("keep"), HttpCall("POST", "/pause?mode=keep&clear_cache=true", None)),
        (weightsync.commit({"a": "0" * 16}), HttpCall("POST", "/commit_weight_update", {"digests": {"a": "0" * 16}})),
    ],
)
def test_builders_say_what_the_engines_document(call: HttpCall, expected: HttpCall) -> None:
    assert call == expected


def test_a_vllm_session_whose_opening_was_not_answered_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM may have opened it, and would refuse every later push."""
    asked: list[HttpCall] = []

    def call(request: HttpCall, deadline: Deadline) -> None:
        asked.append(request)
        if request == vllm.START_WEIGHT_UPDATE:
            raise DeadlineExceeded("no answer")

    with vllm.VLLMClient("http://127.0.0.1:1") as client:
        monkeypatch.setattr(client, "call", call)
        with pytest.raises(DeadlineExceeded):
            client.begin("7", None, Deadline(5))
        client.abort(Deadline(5))
    assert asked[1:] == [vllm.update_weights({"abandon": True}), HttpCall("POST", "/finish_weight_update", {})]


def test_mixed_dtypes_never_leave_a_builder() -> None:
    mixed = [*SPECS, TensorSpec("c", (1,), "float32")]
    with pytest.raises(ConfigurationError, match="one dtype"):
        lmdeploy.update(mixed, "g", True)
    with pytest.raises(ConfigurationError, match="one dtype"):
        sglang.update(mixed, "g")
    with pytest.raises(ConfigurationError, match="one dtype"):
        weightsync.update(mixed, "g")


def test_draft_rule_is_checked_both_ways() -> None:
    main, draft = Manifest([TensorSpec("a", (1,), "float32")]), Manifest([TensorSpec("mtp.a", (1,), "float32")])
    assert [spec.name for spec in join_manifests(main, draft, "mtp.")] == ["a", "mtp.a"]
    assert join_manifests(draft, None, "mtp.") == draft  # without a draft model all is the main one's
    for wrong in ((draft, main, "mtp."), (main, main, "mtp."), (draft, draft, "mtp."), (main, draft, "")):
        with pytest.raises(ConfigurationError):
            join_manifests(*wrong)


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (None, ("r", 8, 3)),
        ("9", ("r", 9, 3)),
        ("other@1", ("other", 1, 1)),
        ("other.2@1", ("other", 1, 2)),
        ("a/b:c@3", ("a/b:c", 3, 1)),
        ("v1.0@3", ("v1.0", 3, 1)),
    ],
)
def test_labels(label: str | None, expected: tuple[str, int, int]) -> None:
    assert parse_version(label, "r", 7, 3) == expected


@pytest.mark.parametrize("label", ["", "x", "-1", "a@", "@1", "1.5", ".2@1", "a b@1", "9" * 19, "\u0663"])
def test_labels_that_are_none(label: str) -> None:
    with pytest.raises(ConfigurationError, match="not a version"):
        parse_version(label, "r", 7)


@pytest.mark.parametrize(
    ("label", "expected"), [("run.2@400", None), ("run.2@399", "older"), ("run@441", "older"), ("run.3@0", None), ("other@1", None)]
)
def test_a_label_of_an_older_epoch_is_refused(label: str, expected: str | None) -> None:
    updates = WeightUpdates.__new__(WeightUpdates)
    updates._last = Version("run", 400, "m", "d", 2)
    assert updates._parse("400") == ("run", 400, 2)
    assert updates._parse(None) == ("run", 401, 2)
    if expected is None:
        updates._parse(label)
    else:
        with pytest.raises(VersionError, match=rf"{label} is {expected} than run\.2@400"):
            updates._parse(label)
