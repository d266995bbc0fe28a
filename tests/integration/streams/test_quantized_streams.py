"""Streams whose matrices are quantized as they come: the bits of the references and of quantized shards, over one rank and two."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from tests.integration.rounds.test_quantized import Served, assert_serves
from tests.integration.streams.stream_world import World, lent
from tests.unit.tensors.quantized_references import NAMES, reference

from weightsync.config import ServerSettings
from weightsync.deadline import Deadline
from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ConfigurationError, ManifestMismatch
from weightsync.server.server import BackgroundServer
from weightsync.tensors.quantization import QuantizedShards, formats_by_pattern
from weightsync.tensors.shards import shards_of
from weightsync.trainer.stream import Stream

SECONDS = 30.0
Tensors = dict[str, torch.Tensor]
ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")  # in the order of files


@pytest.fixture
def world() -> Iterator[World]:
    with BackgroundServer(ServerSettings.load({}, port=0, require="any")) as server, ExitStack() as owned:
        yield World(server, owned)


def masters(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {"norm.weight": torch.randn(7, generator=generator)}
    for layer in range(3):
        for name, rows in zip(ATTENTION, (128, 200, 130, 128), strict=True):
            tensors[f"layers.{layer}.{name}.weight"] = torch.randn(rows, 256, generator=generator) * (layer + 1)
        tensors[f"layers.{layer}.gate_proj.weight"] = torch.randn(64, 256, generator=generator)
    return tensors


def by_shards(tensors: Tensors, kind: str) -> Tensors:
    """What a trainer that holds them publishes."""
    manifest, shards = shards_of({name: tensor.bfloat16() for name, tensor in tensors.items()})
    made = QuantizedShards(manifest, shards, formats_by_pattern(manifest, {"*_proj.weight": kind}))
    made.exchange(Deadline(SECONDS))
    filled = [
        (shard, torch.empty(shard.box.shape, dtype=shard.tensor.dtype) if shard.tensor.is_meta else shard.tensor)
        for shard in made.shards
    ]
    made.write(filled, np.zeros(1, np.int8))
    return {shard.name: memory for shard, memory in filled}


def bits(tensors: Tensors) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {
        name: (tensor.dtype, tuple(tensor.shape), bytes(tensor.reshape(-1).view(torch.uint8).numpy()))
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", NAMES)
def test_each_format_has_the_bits_of_shards(world: World, kind: str, ranks: int) -> None:
    options = {"dtype": torch.bfloat16, "quantize": {"*_proj.weight": kind}}
    receiver = world.receiver()
    stream = Stream(window_bytes=70_000)
    with ThreadPoolExecutor(ranks) as pool:
        trainers = list(pool.map(lambda rank: world.trainer(stream, rank, ranks, **options), range(ranks)))
        for number in (1, 2):
            arrived = world.receive(receiver)
            tensors = masters(number)
            publications = [pool.submit(each.publish_stream, lent(tensors), number, timeout=SECONDS) for each in trainers]
            assert all(each.result(SECONDS).ok for each in publications)
            received = arrived.result(SECONDS)
            assert bits(received) == bits(by_shards(tensors, kind))
    if kind not in ("fp8-tensor", "nvfp4", "nvfp4-modelopt"):  # in which q, k and v share a scale
        name = "layers.2.q_proj.weight"
        expected = zip(NAMES[kind], reference(kind, tensors[name].bfloat16()), strict=True)
        parts = {name.removesuffix("weight") + part: tensor for part, tensor in expected}
        assert bits({part: received[part] for part in parts}) == bits(parts)


def test_an_engine_takes_what_it_serves(world: World) -> None:
    tensors = {"0.weight": torch.randn(150, 256), "1.weight": torch.randn(150)}
    names = [f"0.{part}" for part in NAMES["nvfp4"]]
    expected = {"1.weight": tensors["1.weight"].bfloat16()}
    expected |= dict(zip(names, reference("nvfp4", tensors["0.weight"].bfloat16()), strict=True))
    target = Served(expected)
    with Engine(ModuleAdapter(target), "replica-0", world.server.url, token=world.server.token):
        trainer = world.trainer(Stream(), dtype=torch.bfloat16, quantize="as-served")
        assert trainer.publish_stream(lent(tensors), timeout=SECONDS).ok
        assert_serves(target, expected)


def test_inf_and_rules_that_fit_nothing_are_errors_by_name_and_the_next_stream_arrives(world: World) -> None:
    trainer = world.trainer(dtype=torch.bfloat16, quantize={"*.w2.weight": "fp8-block", "*_proj.weight": "nvfp4"})
    receiver = world.receiver()
    for change, error, words in (
        ("layers.1.v_proj.weight", ConfigurationError, r"layers\.1\.v_proj\.weight holds Inf or NaN"),
        ("", ConfigurationError, r"no tensor is left for the pattern '\*\.w2\.weight'"),
        ("twice", ManifestMismatch, r"brought layers\.0\.k_proj\.weight twice"),
    ):
        tensors = masters(1) | ({"layers.1.w2.weight": torch.ones(128, 128)} if change else {})
        if change in tensors:
            tensors[change][3, 5] = torch.inf
        items = list(tensors.items())
        arrived = world.receive(receiver)
        with pytest.raises(error, match=words):
            trainer.publish_stream(iter(items[:2] + items[1:] if change == "twice" else items), timeout=SECONDS)
        with pytest.raises(Exception, match=r"."):
            arrived.result(SECONDS)
    arrived = world.receive(receiver)
    tensors = masters(2) | {"layers.1.w2.weight": torch.ones(128, 128)}
    assert trainer.publish_stream(lent(tensors), timeout=SECONDS).ok
    assert arrived.result(SECONDS)["layers.1.w2.weight"].dtype == torch.float8_e4m3fn
