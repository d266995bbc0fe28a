"""Cases of the GPU suite: the shapes of a model, its sharding, and the GPU of each rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from weightsync.errors import ConfigurationError
from weightsync.model import Layout, Manifest, TensorSpec
from weightsync_bench.shapes import qwen3_8b, qwen3_30b_a3b, qwen3_30b_a3b_24_layers
from weightsync_bench.sharding import fsdp, tensor_parallel

MODELS = {"qwen3-30b-a3b": qwen3_30b_a3b, "qwen3-30b-a3b-24-layers": qwen3_30b_a3b_24_layers, "qwen3-8b": qwen3_8b}
"""Models with built-in shapes."""

Delivery = Literal["direct", "streamed"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One case, passed to each of its processes."""

    name: str
    model: str
    """A name of :data:`MODELS`, or the path of a Hugging Face ``config.json``."""
    delivery: Delivery
    on: tuple[int, ...]
    """GPU of each trainer rank. The rank holds its FSDP shard of every tensor."""
    to: tuple[int, ...]
    """GPU of each engine rank. The rank holds its tensor-parallel shard of every tensor."""
    transport: str = "cuda_ipc"
    bucket_bytes: int = 0
    buffers: int = 2
    masters: bool = False
    """Whether trainer ranks hold float32, published as bfloat16."""
    changed: float = 1.0
    """The share of words that each round after the first changes. Below one, the trainer publishes with ``deltas``."""
    quantize: dict[str, str] | None = None
    """What ``Trainer(quantize=)`` is given."""

    def floor(self, manifest: Manifest, local: float, peer: float) -> tuple[float, int, int]:
        """Compute the time that moving the bytes takes at least, for the slowest rank.

        Bytes of other GPUs cross the GPU's link while its own bytes are copied. With streamed delivery every rank receives the
        whole model, and then its loader copies the rank's part once more.

        Args:
            manifest: The tensors.
            local: Copy rate within a GPU in bytes per second.
            peer: Copy rate from another GPU in bytes per second.

        Returns:
            Seconds, and the rank's bytes in total and from other GPUs.
        """
        sources = fsdp(manifest, len(self.on))
        worst, most = 0.0, (0, 0)
        whole = tensor_parallel(manifest, 1)[0]
        for layout, device in zip(tensor_parallel(manifest, len(self.to)), self.to, strict=True):
            wanted = whole if self.delivery == "streamed" else layout
            total = wanted.nbytes(manifest)
            near = [source for source, where in zip(sources, self.on, strict=True) if where == device]
            own = sum(_common(manifest, wanted, source) for source in near)
            seconds = max((total - own) / peer, own / local)
            if self.delivery == "streamed":
                seconds += layout.nbytes(manifest) / local
            sharing = sum(1 for other in self.to if other == device)
            seconds *= sharing
            if seconds > worst:
                worst, most = seconds, (total, total - own)
        return worst, *most


def _common(manifest: Manifest, first: Layout, second: Layout) -> int:
    """Count the bytes in both layouts, which have at most one row for each tensor."""
    _, a, b = np.intersect1d(first.tensor, second.tensor, return_indices=True)
    extents = np.minimum(first.stops[a], second.stops[b]) - np.maximum(first.starts[a], second.starts[b])
    return int((np.prod(np.maximum(extents, 0), axis=1) * manifest.itemsizes[first.tensor[a]]).sum())


def manifest_for(model: str) -> Manifest:
    """Return the tensors of a model, in bfloat16.

    Args:
        model: A name of :data:`MODELS`, or the path of a ``config.json``, for which Transformers makes the model.

    Raises:
        ConfigurationError: ``model`` is neither.
    """
    if model in MODELS:
        return Manifest(MODELS[model]())
    path = Path(model)
    if not path.is_file():
        raise ConfigurationError(f"unknown model {model!r}: give {', '.join(MODELS)}, or the path of a config.json")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        settings = json.loads(path.read_text())
        config = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{model} is not a config.json of a model that Transformers knows: {error!r}") from error
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    return Manifest([TensorSpec(name, tuple(value.shape), "bfloat16") for name, value in made.named_parameters()])


def place(source: str, target: str, placement: str, gpus: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the GPU of each trainer rank and of each engine rank.

    Args:
        source: ``fsdp=N``.
        target: ``tp=M``.
        placement: With ``colocated`` trainer and engine ranks share GPUs, starting at GPU 0. With ``separate`` the engine ranks'
            GPUs follow the trainer ranks'.
        gpus: Number of GPUs of this machine.

    Raises:
        ConfigurationError: An argument is invalid, or there are too few GPUs.
    """
    trainers, engines = count_of(source, "fsdp"), count_of(target, "tp")
    if placement not in ("separate", "colocated"):
        raise ConfigurationError(f"placement must be separate or colocated, not {placement!r}")
    needed = trainers + engines if placement == "separate" else max(trainers, engines)
    if needed > gpus:
        raise ConfigurationError(f"{source} to {target}, {placement}, needs {needed} GPUs, but this machine has {gpus}")
    first = trainers if placement == "separate" else 0
    return tuple(range(trainers)), tuple(range(first, first + engines))


def count_of(text: str, kind: str) -> int:
    """Return the number in ``kind=N``.

    Raises:
        ConfigurationError: ``text`` has another form.
    """
    name, _, number = text.partition("=")
    if name != kind or not number.isdecimal() or not int(number):
        raise ConfigurationError(f"give {kind}=N, not {text!r}")
    return int(number)
