"""Holds the demo's server to the disaggregated contract: updated in buckets from outside, it answers with the new weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from examples.demo.models import build_model, scramble
from tests.integration.external.disaggregated_support import Sender, Server, serving

from weightsync.deadline import Deadline
from weightsync.tensors.shards import manifest_of
from weightsync.transports.broadcast.process_groups import StoreRendezvous, init_custom_process_group

PROMPT = [5, 9, 3, 7]


@pytest.fixture(scope="module", autouse=True)
def gloo() -> None:
    """Gloo keeps a pipe from its first group on, for the life of the process."""
    rendezvous = StoreRendezvous("127.0.0.1", 1, Deadline(10))
    init_custom_process_group("gloo", 0, 1, "first", Deadline(10), rendezvous=rendezvous).close()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving("tests.integration.examples.demo_updated", token="a-token-of-sixteen-or-more") as found:
        yield found


def test_a_bucketed_update_reaches_the_demos_server(server: Server) -> None:
    model = build_model("qwen2", tied=True, seed=0)
    scramble(model, seed=2)
    model.train(False)
    own = dict(model.named_parameters())
    names = [spec.name for spec in manifest_of(model)]
    wish = {"prompt": PROMPT, "max_tokens": 6}
    assert server.http.post("/v1/completions", json=wish).json()["error"]["type"] == "not_seeded"
    refused = server.http.post("/init_weights_update_group", json={}, headers={"Authorization": "Bearer nobody"})
    assert refused.status_code == 401
    sender = Sender(server)
    half = len(names) // 2
    with torch.no_grad():
        first = {name: own[name].detach() for name in names[:half]}
        rest = {name: own[name].detach() for name in names[half:]}
        assert sender.send(first)[0] == 200
        assert server.http.get("/health").status_code == 503  # nothing is served between two buckets
        status, message = sender.send(rest, finished=True)
    assert status == 200, message
    sender.close()
    answer = server.http.post("/v1/completions", json=wish).json()
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        for _ in answer["weightsync"]["tokens"]:
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert answer["weightsync"]["tokens"] == ids[0, len(PROMPT) :].tolist()
    assert len(set(answer["weightsync"]["token_versions"])) == 1
