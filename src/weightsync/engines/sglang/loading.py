"""Loading of whole checkpoint tensors into a running SGLang model, through the loader of its class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from weightsync.engines.traced_shards import parameters_kept
from weightsync.errors import LoadError, few
from weightsync.model import Manifest
from weightsync.tracing.tracer import trace_loader


def install(runner: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:  # noqa: ANN401 - SGLang's ModelRunner
    """Load tensors of a checkpoint into the model of ``runner`` in place, on the thread that runs it.

    Args:
        runner: SGLang's runner of the model.
        tensors: Tensors by their names in the checkpoint's files.

    Raises:
        LoadError: The loader did not consume all tensors.
        Exception: The loader raised it.
    """
    updater, left = runner.weight_updater, iter(tensors)
    with torch.no_grad():
        updater.begin_weight_update()
        try:
            runner.model.load_weights(left)
        finally:
            updater.end_weight_update(run_post_load=False)
    untaken = next(left, None)
    if untaken is not None:
        raise LoadError(f"SGLang's loader stopped before {untaken[0]} and did not load it and the tensors after it")


def padding_of_vocabulary(model: torch.nn.Module) -> dict[str, list[slice]]:
    """Return the rows of ``model``'s embeddings and output layers that belong to no token, by parameter.

    SGLang makes vocabularies divisible by 64 and by the number of ranks. Its loader writes zeros into these rows, no token number
    addresses them, and the sampler cuts them off.
    """
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    padding: dict[str, list[slice]] = {}
    for prefix, layer in model.named_modules():
        if isinstance(layer, VocabParallelEmbedding):
            indices = layer.shard_indices
            for name, parameter in layer.named_parameters(prefix, recurse=False, remove_duplicate=False):
                if parameter.dim() and parameter.shape[0] == indices.num_elements_padded:
                    padding[name] = rows_of_padding(indices)
    return padding


def rows_of_padding(indices: Any) -> list[slice]:  # noqa: ANN401 - SGLang's VocabParallelEmbeddingShardIndices
    """Return the rows of a rank that are padding: those after the checkpoint's tokens, and those after added tokens."""
    added = indices.num_org_elements_padded
    return [slice(indices.num_org_elements, added), slice(added + indices.num_added_elements, indices.num_elements_padded)]


def gaps_of_loader(model: torch.nn.Module, manifest: Manifest, ranks: int, padding: Mapping[str, Sequence[slice]]) -> str | None:
    """Return on one line what the loader of ``model`` drops or does not fill; ``None`` if it takes everything.

    SGLang's loaders skip names that they do not know, and return nothing. So this runs the loader once without bytes. With several
    ranks a tensor may belong to another rank, so only parameters are checked, except their ``padding``.

    Raises:
        LoadError: The loader raised an error.
    """
    with parameters_kept(model):
        traced = trace_loader(model.load_weights, model, manifest, padding=padding)  # type: ignore[arg-type]
    transformed = set(traced.fallback)
    if ranks == 1 and (dropped := [name for name in traced.unused if name not in transformed]):
        return f"it drops {few(dropped)}"
    if traced.unwritten:
        return f"it does not fill {few(sorted(traced.unwritten))}"
    return None
