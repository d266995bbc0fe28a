"""When GPU memory is published in place, and what is said where it cannot be: the rules, without a GPU."""

from __future__ import annotations

import pytest
import torch

from weightsync.deadline import Deadline
from weightsync.engine.readers import Readers
from weightsync.errors import LayoutError, TransportUnavailable
from weightsync.protocol.messages import Offer, SourceAddress
from weightsync.publishing import published_shards
from weightsync.publishing.publication import ReaderAccess
from weightsync.publishing.published_shards import LiveShards, obstacle_to_in_place
from weightsync.tensors.device_memory import device_of, forms_of, layout_by_shard
from weightsync.tensors.shards import Shard, shards_of
from weightsync.trainer.trainer_role import TrainerRole
from weightsync.transports.base import Transport
from weightsync.transports.cuda.ipc import CudaIpc
from weightsync.transports.host.shared_memory import SharedMemory
from weightsync.transports.hostinfo import this_host
from weightsync.transports.tcp.transport import Tcp

_KEY = b"a key of thirty-two bytes, or so"


def _state() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(3, 4), "b": torch.zeros(5, 2).t(), "c": torch.zeros(()), "empty": torch.zeros(0, 3)}


def test_a_region_each_so_the_layout_stays_when_memory_moves() -> None:
    manifest, shards = shards_of(_state())
    layout = layout_by_shard(manifest, shards)
    assert layout.regions == (48, 40, 4)
    assert layout.region.tolist() == [0, 1, 2]
    assert not layout.offset.any()
    part = torch.zeros(1000)[100:112].view(3, 4)  # elsewhere, in a larger storage
    moved = [Shard("a", (3, 4), shards[0].box, part), *shards[1:]]
    assert layout_by_shard(manifest, moved).digest == layout.digest
    turned = Shard("b", (2, 5), shards[1].box, torch.zeros(2, 5))
    assert layout_by_shard(manifest, [shards[0], turned, shards[2]]).digest != layout.digest
    assert forms_of([turned.tensor]) != forms_of([shards[1].tensor])


def test_a_state_is_looked_at_anew_and_what_is_gone_is_named() -> None:
    state = _state()
    live = LiveShards(state, shards_of(state)[1])
    state["a"] = torch.ones(3, 4)
    held, addresses = live.look()
    assert held[0] is state["a"]
    assert addresses == tuple(state[name].data_ptr() for name in "abc")
    module = torch.nn.Linear(2, 3)
    live = LiveShards(module, shards_of(module)[1])
    module.weight.data = torch.ones(3, 2)
    assert sorted(live.look()[1]) == sorted([module.weight.data_ptr(), module.bias.data_ptr()])
    module.weight.data = torch.ones(3, 2, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match=r"weight was torch\.float32"):
        live.look()
    live = LiveShards(state, shards_of(state)[1])
    del state["b"]
    with pytest.raises(LayoutError, match=r"b .*no longer"):
        live.look()


def test_the_experts_of_a_packed_parameter_are_where_it_is() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs Transformers 5, which packs experts")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    mixture = {"moe_intermediate_size": 6, "num_experts": 3, "num_experts_per_tok": 2, "mlp_only_layers": []}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **mixture, head_dim=8, intermediate_size=32))
    manifest, shards = shards_of(model)
    live = LiveShards(model, shards)
    packed = model.model.layers[0].mlp.experts.gate_up_proj
    packed.data = packed.data.clone()
    held, addresses = live.look()
    assert any(tensor.data_ptr() == packed.data_ptr() for tensor in held)
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    at = dict(zip([shard.name for shard in shards], addresses, strict=True))
    assert at[name] == packed[2, 6:].data_ptr()
    assert len(held) < len(manifest)


def test_the_device_of_shards() -> None:
    _, shards = shards_of(_state())
    assert device_of(shards) == torch.device("cpu")
    assert device_of([]) == torch.device("cpu")
    meta = Shard("a", (3, 4), shards[0].box, torch.zeros(3, 4, device="meta"))
    assert device_of([meta, *shards[1:]]) is None


def test_host_memory_is_copied_and_says_why() -> None:
    manifest, shards = shards_of(_state())
    assert "is among" in (obstacle_to_in_place(manifest, shards, [SharedMemory()]) or "")
    assert "not all on one CUDA device" in (obstacle_to_in_place(manifest, shards, [CudaIpc(), SharedMemory()]) or "")
    with pytest.raises(TransportUnavailable, match=r"not all on one CUDA device.*shared_memory or tcp"):
        TrainerRole(_state(), ReaderAccess([CudaIpc()], _KEY, this_host()))
    role = TrainerRole(_state(), ReaderAccess([CudaIpc(), SharedMemory()], _KEY, this_host()))
    assert not role.live
    assert [offer.scheme for offer in role.offers] == ["shared_memory"]
    role.close()


def test_a_copy_that_does_not_fit_on_the_gpu_is_made_in_host_memory_and_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(published_shards, "device_of", lambda _: torch.device("cuda:0"))
    monkeypatch.setattr(published_shards, "obstacle_to_in_place", lambda *_: "the shards take a copy")
    monkeypatch.setattr(published_shards, "room_for_copy", lambda nbytes, device: f"{device} has no room for {nbytes}")
    role = TrainerRole(_state(), ReaderAccess([CudaIpc(), SharedMemory()], _KEY, this_host()))
    assert [offer.scheme for offer in role.offers] == ["shared_memory"]
    role.close()
    assert "copied to host memory: cuda:0 has no room for" in caplog.text
    with pytest.raises(TransportUnavailable, match=r"cuda:0 has no room for .*shared_memory or tcp"):
        TrainerRole(_state(), ReaderAccess([CudaIpc()], _KEY, this_host()))


@pytest.mark.parametrize(
    ("offered", "device", "advice"),
    [
        (CudaIpc(), None, r"transports=\['shared_memory', 'tcp'\]"),
        (SharedMemory(), torch.device("cuda", 0), "delivery='streamed'"),
    ],
)
def test_who_cannot_reach_the_other_is_told_what_to_change(offered: Transport, device: torch.device | None, advice: str) -> None:
    address = SourceAddress("trainer/0", "d" * 32, (Offer(offered.name, "weightsync-gpu-x", this_host(), offered.traits),), _KEY)
    with pytest.raises(TransportUnavailable, match=advice):
        Readers([CudaIpc(), SharedMemory(), Tcp()], this_host(), False, lambda: None).open(address, device, Deadline(5))


def test_parameters_that_are_not_tied_any_more_are_not_published_in_part() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "head": torch.nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    live = LiveShards(model, shards_of(model)[1])
    model["embed"].weight.data = torch.zeros(8, 4)  # both move
    live.look()
    model["head"].weight = torch.nn.Parameter(torch.zeros(8, 4))
    with pytest.raises(LayoutError, match=r"head\.weight and embed\.weight were the same memory"):
        live.look()
