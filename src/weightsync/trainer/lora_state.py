"""The tensors and the configuration of a LoRA adapter, as PEFT holds them in a model or as a state dict."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from msgspec import structs

from weightsync.errors import ConfigurationError
from weightsync.model import Manifest
from weightsync.model.lora import PREFIX, LoraConfig, lora_modules
from weightsync.tensors.shards import FollowedShards, Shard, ShardedState, checkpoint_name, dtype_name, torch_dtype

_MATRIX = re.compile(r"(.+)\.(lora_(?:embedding_)?[AB])(?:\.([^.]+))?(?:\.weight)?")
_STACKED = 32 << 20  # bytes of matrices whose numbers are looked at together, in a copy
_PART_OF_LORA = re.compile(r"\.lora_[A-Za-z_]+(\.|\Z)")

State = Mapping[str, torch.Tensor] | ShardedState


def adapter_of(
    state: Mapping[str, torch.Tensor] | torch.nn.Module | ShardedState, which: str, alpha: float | None, rslora: bool
) -> tuple[State, LoraConfig]:
    """Return the tensors of an adapter under the names of PEFT's files, and its configuration.

    Args:
        state: A model with PEFT's adapters, or the adapter's tensors.
        which: Name of the adapter in the model.
        alpha: ``lora_alpha``, where ``state`` is no model.
        rslora: ``use_rslora``, where ``state`` is no model.

    Raises:
        ConfigurationError: The model has no such adapter, or it has parts that cannot be published.
    """
    if isinstance(state, torch.nn.Module):
        return _of_model(state, which)
    if alpha is None:
        raise ConfigurationError("an adapter given as tensors needs its lora_alpha: Adapters(state, base=..., alpha=...)")
    state = state if isinstance(state, ShardedState) else {_name(name): tensor for name, tensor in state.items()}
    modules = lora_modules(FollowedShards(state).now()[0])
    chosen = LoraConfig(max(module.rank for module in modules), float(alpha), rslora)
    own = {module.name: structs.replace(chosen, rank=module.rank).scaling("") for module in modules if module.rank != chosen.rank}
    return state, structs.replace(chosen, scalings=own)  # as PEFT scales by each module's rank


def _of_model(model: torch.nn.Module, which: str) -> tuple[dict[str, torch.Tensor], LoraConfig]:
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    config = configs.get(which)
    if config is None:
        raise ConfigurationError(f"the model has no PEFT adapter {which!r}; it has {', '.join(configs) or 'none'}")
    if getattr(config, "bias", "none") != "none" or getattr(config, "modules_to_save", None):
        raise ConfigurationError("biases and modules_to_save cannot be published as part of an adapter: train it without them")
    if getattr(config, "alora_invocation_tokens", None):
        raise ConfigurationError("no engine here serves activated LoRA: train it without alora_invocation_tokens")
    if getattr(config, "use_dora", False):
        raise ConfigurationError("no engine here serves DoRA adapters: train it with use_dora=False, or publish merged weights")
    tensors = {}
    for name, parameter in model.named_parameters():
        match = _MATRIX.fullmatch(checkpoint_name(name))
        if match is not None and match[3] == which:
            tensors[_name(name)] = parameter.detach()
        elif re.search(rf"\.(lora|trainable_tokens)_\w+\.{re.escape(which)}(\.|\Z)", name):
            raise ConfigurationError(f"{name} cannot be published with an adapter: train without lora_bias and token indices")
    chosen = LoraConfig(int(config.r), float(config.lora_alpha), bool(getattr(config, "use_rslora", False)))
    others = {module: scaling for module, scaling in _scalings(model, which) if scaling != chosen.scaling(module)}
    rank = max([chosen.rank, *getattr(config, "rank_pattern", {}).values()])
    if rank != chosen.rank:  # a module without an entry has the scaling of the rank that is stated
        others = dict(_scalings(model, which))
    return tensors, LoraConfig(rank, chosen.alpha, chosen.rslora, scalings=others)


def _scalings(model: torch.nn.Module, which: str) -> Iterable[tuple[str, float]]:
    for name, module in model.named_modules():
        scalings = getattr(module, "scaling", None)
        if isinstance(scalings, Mapping) and which in scalings:
            yield checkpoint_name(name).removeprefix(PREFIX), float(scalings[which])


def _name(name: str) -> str:
    """``base_model.model.layers.0.q.lora_A.weight``, with or without the prefix and the adapter's name."""
    match = _MATRIX.fullmatch(checkpoint_name(name))
    if match is None:
        return name  # the manifest's check names it
    kind = match[2]
    return f"{PREFIX}{match[1].removeprefix(PREFIX)}.{kind}" + ("" if "embedding" in kind else ".weight")


def base_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of a model with PEFT's adapters without the adapters, by their names without PEFT.

    ``weightsync.Trainer(weightsync.base_weights(peft_model))`` publishes the base of its adapters.
    """
    named = ((checkpoint_name(name), tensor) for name, tensor in model.state_dict(keep_vars=True).items())
    buffers = {checkpoint_name(name) for name, _ in model.named_buffers()}
    return {
        name.removeprefix(PREFIX).replace(".base_layer.", "."): tensor.detach()
        for name, tensor in named
        if _PART_OF_LORA.search(name) is None and name not in buffers
    }


def check_finite(shards: Sequence[Shard], what: str, manifest: Manifest) -> None:
    """Raise :class:`~weightsync.errors.ConfigurationError` if a number of an adapter is not finite in the dtype of ``manifest``."""
    kinds = {spec.name: torch_dtype(spec.dtype) for spec in manifest}
    alike = defaultdict[tuple[torch.device, torch.dtype, torch.Size, torch.dtype], list[torch.Tensor]](list)
    for shard in shards:
        alike[shard.tensor.device, shard.tensor.dtype, shard.tensor.shape, kinds[shard.name]].append(shard.tensor)
    # In few launches, because an adapter of experts has 18,000 matrices: one for each takes ten times as long.
    steps = ((same, max(_STACKED // max(same[0].nbytes, 1), 1), key[-1]) for key, same in alike.items())
    parts = ((same[first : first + step], dtype) for same, step, dtype in steps for first in range(0, len(same), step))
    if not all([torch.stack(part).to(dtype).isfinite().all() for part, dtype in parts]):
        wrong = [shard.name for shard in shards if not bool(shard.tensor.to(kinds[shard.name]).isfinite().all())]
        raise ConfigurationError(f"{what} is not published: {wrong[0]} holds NaN or infinity as {dtype_name(kinds[wrong[0]])}")
