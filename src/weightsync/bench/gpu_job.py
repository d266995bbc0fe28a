"""What a case of the GPU suite is: a model's shapes, who holds which parts of it, and on which GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from weightsync.bench.shapes import qwen3_8b, qwen3_30b_a3b
from weightsync.bench.sharding import fsdp, tensor_parallel
from weightsync.errors import ConfigurationError
from weightsync.model import Layout, Manifest, TensorSpec

__all__ = ["MODELS", "Delivery", "Job", "count_of", "manifest_for", "place"]

MODELS = {"qwen3-30b-a3b": qwen3_30b_a3b, "qwen3-8b": qwen3_8b}
"""Models whose shapes are known by name."""

Delivery = Literal["direct", "streamed"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One case, as every process of it gets it."""

    name: str
    model: str
    """A name of :data:`MODELS`, or the path of a Hugging Face ``config.json``."""
    delivery: Delivery
    on: tuple[int, ...]
    """The GPU of each trainer rank, which holds that part of every tensor that FSDP would."""
    to: tuple[int, ...]
    """The GPU of each engine rank, which holds that part that tensor parallelism would."""
    transport: str = "cuda_ipc"
    bucket_bytes: int = 0
    buffers: int = 2

    def floor(self, manifest: Manifest, local: float, peer: float) -> tuple[float, int, int]:
        """Seconds of moving the bytes alone at these rates (bytes a second), for the slowest rank; its bytes, those from peers.

        What other GPUs hold comes over this GPU's link, at the same time as its own is copied. Streamed, every rank takes the whole
        model that way, and then its loader copies this rank's part once more.
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
    """Bytes in both layouts, each of one row a tensor."""
    _, a, b = np.intersect1d(first.tensor, second.tensor, return_indices=True)
    extents = np.minimum(first.stops[a], second.stops[b]) - np.maximum(first.starts[a], second.starts[b])
    return int((np.prod(np.maximum(extents, 0), axis=1) * manifest.itemsizes[first.tensor[a]]).sum())


def manifest_for(model: str) -> Manifest:
    """The tensors of a model, in bfloat16; of a ``config.json``, those that Transformers would make of it.

    Raises :class:`~weightsync.errors.ConfigurationError` for what is neither.
    """
    if model in MODELS:
        return Manifest(MODELS[model]())
    path = Path(model)
    if not path.is_file():
        raise ConfigurationError(f"there is no model {model!r}: give {', '.join(MODELS)}, or the path of a config.json")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        settings = json.loads(path.read_text())
        config = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{model} is not a config.json of a model that Transformers knows: {error!r}") from error
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return Manifest([TensorSpec(name, tuple(value.shape), "bfloat16") for name, value in made.named_parameters()])


def place(source: str, target: str, placement: str, gpus: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The GPU of each trainer rank and of each engine rank, of ``fsdp=N`` and ``tp=M``.

    ``colocated``: trainer and engine ranks share GPUs from the first one on; ``separate``: engine ranks come after the trainers'.
    Raises :class:`~weightsync.errors.ConfigurationError` where there are not GPUs enough.
    """
    trainers, engines = count_of(source, "fsdp"), count_of(target, "tp")
    if placement not in ("separate", "colocated"):
        raise ConfigurationError(f"placement is separate or colocated, not {placement!r}")
    needed = trainers + engines if placement == "separate" else max(trainers, engines)
    if needed > gpus:
        raise ConfigurationError(f"{source} to {target}, {placement}, needs {needed} GPUs, and this machine has {gpus}")
    first = trainers if placement == "separate" else 0
    return tuple(range(trainers)), tuple(range(first, first + engines))


def count_of(text: str, kind: str) -> int:
    """The number in ``kind=N``. Raises :class:`~weightsync.errors.ConfigurationError` for anything else."""
    name, _, number = text.partition("=")
    if name != kind or not number.isdecimal() or not int(number):
        raise ConfigurationError(f"give {kind}=N, not {text!r}")
    return int(number)
