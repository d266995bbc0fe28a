"""The shards of one Megatron-core rank, as views of its live parameters. Needs no import of Megatron, and no collective.

Rules for the model's family give each parameter's part of the Hugging Face tensors, and so the manifest. They are compared with
what the model's own ``sharded_state_dict()`` says of its parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.integrations.megatron.blocks import HFConfig, head_dim
from weightsync.integrations.megatron.bridged_state import BridgedState
from weightsync.integrations.megatron.chunk import ModelChunk, expert_number
from weightsync.integrations.megatron.families import FAMILIES, NO_VIEWS, Family
from weightsync.integrations.megatron.live_state import LiveState, refuse_adapter
from weightsync.integrations.megatron.packing import Packing, Part
from weightsync.model import Manifest, TensorSpec
from weightsync.model.lora import PREFIX
from weightsync.tensors.shards import Shard, ShardedState, dtype_name

ShardedTensor: TypeAlias = Any
"""A ``megatron.core.dist_checkpointing.ShardedTensor``: a box of a tensor of the whole model."""
_NUMBERED = re.compile(r"^(?:decoder|mtp)\.layers\.([0-9]+)\.")


def sharded_tensors(model: nn.Module) -> Mapping[str, Sequence[ShardedTensor]]:
    """Return the boxes that each parameter of a GPTModel holds, by its local name: two for a gated MLP, which stacks two runs."""
    state: Any = model
    metadata = {
        "dp_cp_group": getattr(state.pg_collection, "dp_cp", None), "non_homogeneous_layers": True, "singleton_local_shards": False,
    }  # fmt: skip
    declared = state.sharded_state_dict(metadata=metadata)
    return {name: item.build() if hasattr(item, "build") else [item] for name, item in declared.items()}


def check_geometry(rule: Packing, runs: Sequence[tuple[int, int]], numbers: list[int], declared: Sequence[ShardedTensor]) -> None:
    """Check that ``rule`` and the model agree on a parameter's whole shape and on which part of it this rank holds.

    Args:
        rule: The rule of the parameter.
        runs: What this rank holds according to it.
        numbers: Layer and expert, as far as the parameter has any.
        declared: What the model declares.

    Raises:
        LayoutError: They do not agree.
    """
    if not declared:
        raise LayoutError("the model's own sharded_state_dict() does not have it")
    held = list[tuple[int, int]]()
    for item in declared:
        skipped = item.prepend_axis_num
        place = [*map(int, _NUMBERED.findall(item.key)), *item.global_offset[:skipped]]
        if place != numbers:
            raise LayoutError(f"layer and expert are {numbers} by their modules, but {place} in the model's sharded_state_dict()")
        starts, whole = item.global_offset[skipped:], list(item.global_shape[skipped:])
        held.append((starts[rule.dim], starts[rule.dim] + item.local_shape[rule.dim]))
        if rule.padded and whole[rule.dim] > rule.total:
            whole[rule.dim] = rule.total
        others = [starts[dim] for dim in range(len(starts)) if dim != rule.dim]
        if tuple(whole) != rule.whole_shape or any(others):
            raise LayoutError(
                f"the Hugging Face configuration means a whole of {list(rule.whole_shape)}, cut along dimension {rule.dim}, but "
                f"the model's sharded_state_dict() says {whole}, with this rank's part at {list(starts)}"
            )
    if _merged(held) != _merged(runs):
        raise LayoutError(
            f"this rank holds {_merged(runs)} of dimension {rule.dim} by the rules, but {_merged(held)} by the model's "
            "sharded_state_dict()"
        )


def _merged(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged = list[tuple[int, int]]()
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return merged


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class ModelRules:
    """Every parameter of a model, wherever a rank has it, and the Hugging Face tensors that it holds: the same on every rank.

    ``packings`` has the rule of each parameter, by its layer (``None`` outside layers) and its name there. ``dtype`` is that of the
    parameters; ``stacked`` asks for the names of Transformers' modules, which stack the experts of a layer.
    """

    def __init__(self, config: HFConfig, family: Family, dtype: str, *, stacked: bool, predicted: int = 0) -> None:
        """``predicted`` prediction layers follow the others, if the family has rules for them."""
        self.dtype = dtype
        self.predicts = family.prediction is not None
        self.packings: dict[tuple[int | None, str], Packing] = {(None, key): rule for key, rule in family.outside(config).items()}
        self.expert_counts = set[int]()
        """Of all layers that have experts."""
        layers = config.num_hidden_layers
        predictions = range(layers, layers + predicted if family.prediction else layers)
        for number in (*range(layers), *predictions):
            rules = dict(family.layer(config, number, stacked))
            if number in predictions and family.prediction:
                rules |= family.prediction(config)
            self.expert_counts.add(len({expert_number(key) for key in rules} - {None}))
            for key, rule in rules.items():
                parts = tuple(replace(part, name=f"model.layers.{number}.{part.name}") for part in rule.parts)
                self.packings[number, key] = replace(rule, parts=parts)
        self.expert_counts.discard(0)
        tied = bool(config.tie_word_embeddings)
        self.copies = dict[str, list[str]]()
        """By name, further Hugging Face tensors that are equal: every prediction layer has embedding and head of its own."""
        for number in predictions:
            self.copies.setdefault(_EMBEDDING, []).append(f"model.layers.{number}.embed_tokens.weight")
            self.copies.setdefault(_EMBEDDING if tied else _HEAD, []).append(f"model.layers.{number}.shared_head.head.weight")
        self.manifest = self._survey((_HEAD,) if tied else ())
        self.lora: Literal["base", "adapter"] | None = None

    def adapt(self, ranks: Mapping[str, int], dtype: str) -> None:
        """Replace the rules by those of Megatron-Bridge's LoRA, for the layers whose names ``ranks`` has, under PEFT's names.

        The parts of ``linear_out`` are those of the layer's weight. ``linear_in`` is the A of each of its tensors.
        """
        rules, self.packings, self.copies, self.dtype = self.packings, {}, {}, dtype
        for (layer, key), rule in rules.items():
            module, _, kind = key.rpartition(".")
            rank = ranks.get(module.rpartition(".")[2])
            if rank is not None and kind == "weight":
                parts = [replace(part, name=PREFIX + part.name.removesuffix(".weight")) for part in rule.parts]
                first, *others = dict.fromkeys(f"{part.name}.lora_A.weight" for part in parts)
                self.copies[first] = others
                into = Packing((Part(first, (rank, rule.parts[0].shape[1])),), rule.dim)
                self.packings[layer, f"{module}.adapter.linear_in.weight"] = into
                outs = tuple(replace(part, name=f"{part.name}.lora_B.weight", shape=(part.shape[0], rank)) for part in parts)
                self.packings[layer, f"{module}.adapter.linear_out.weight"] = replace(rule, parts=outs, dim=0, cut=True)
        self.manifest = self._survey(())

    def _survey(self, aliases: tuple[str, ...]) -> Manifest:
        specs = dict[str, TensorSpec]()
        for rule in self.packings.values():
            for part in rule.parts:
                spec = TensorSpec(part.name, part.shape, rule.dtype or self.dtype, aliases if part.name == _EMBEDDING else ())
                if specs.setdefault(part.name, spec) != spec:
                    raise ConfigurationError(f"two rules for {part.name} disagree: {specs[part.name]} and {spec}")
        for name, others in self.copies.items():
            specs |= {other: TensorSpec(other, specs[name].shape, specs[name].dtype) for other in others}
        return Manifest(specs.values())


def hf_state(
    model_chunks: nn.Module | Sequence[nn.Module],
    *,
    config: HFConfig,
    family: Family | None = None,
    stacked_experts: bool = False,
    convert_norms: bool = False,
    bridge: object | None = None,
    lora: Literal["base", "adapter"] | None = None,
) -> ShardedState:
    """Return this rank's part of a Megatron-core model under Hugging Face names, for :class:`weightsync.Trainer`.

    The shards are views of the live parameters (but for norms that are stored minus one), and follow them to other memory. Call
    this again after adding or removing modules. No collective is called.

    With ``bridge``, any model that the bridge converts can be published: numbers of elements go through its converters, once per
    kind of parameter, and say where each element belongs.

    Args:
        model_chunks: What Megatron's ``get_model()`` returns: the model of this rank, or one for each virtual pipeline stage, with
            or without Megatron's wrappers.
        config: The Hugging Face configuration of the same model.
        family: The rules; by default those of ``config.model_type`` in :data:`FAMILIES`.
        stacked_experts: Whether to name experts as the parameters of Transformers' modules, which stack those of a layer. By
            default they have the names of a checkpoint, which vLLM takes, and ``ModuleAdapter`` of a Transformers model.
        convert_norms: Whether to publish copies of norms, plus one, if Megatron stores them minus one
            (``layernorm_zero_centered_gamma``) and the family's checkpoints do not; or minus one the other way round. They are
            computed anew before each publication, in the dtype of the parameters. By default such a model is refused.
        bridge: Converts instead of the rules: an ``AutoBridge`` of Megatron-Bridge, a bridge of mbridge, or a function that takes
            Megatron's name and the whole parameter and returns pairs of Hugging Face names and tensors. Constants that it adds, as
            for norms, are added in copies. The other options are for rules only.
        lora: What to publish of a model with Megatron-Bridge's LoRA: its ``"base"``, by :class:`weightsync.Trainer`, or the
            ``"adapter"`` under PEFT's names, by :class:`weightsync.Adapters`. By default such a model is refused.

    Raises:
        ConfigurationError: The family is unknown, or the two configurations contradict each other.
        LayoutError: A parameter has no rule, has another shape or dtype than the configuration says, or is missing; or the bridge
            computes, drops or repeats elements. The message names the tensor and the rank.
    """
    chunks = [ModelChunk(model) for model in ([model_chunks] if isinstance(model_chunks, nn.Module) else model_chunks)]
    if not chunks:
        raise ConfigurationError("hf_state needs the model chunks of this rank, and got none")
    if bridge is not None:
        if family is not None or stacked_experts or convert_norms or lora:
            raise ConfigurationError("hf_state(bridge=) has no rules: leave out family, stacked_experts, convert_norms and lora")
        return BridgedState(chunks, config, bridge)
    if not isinstance(getattr(chunks[0].model, "decoder", None), nn.Module):
        raise ConfigurationError(
            f"hf_state takes Megatron-core's GPTModel, not a {type(chunks[0].model).__name__}; with bridge= it takes others too"
        )
    kind = getattr(config, "model_type", None)
    family = family or FAMILIES.get(str(kind))
    if family is None and kind in NO_VIEWS:
        raise ConfigurationError(f"model_type {kind!r} cannot be published without a conversion: {NO_VIEWS[kind]}")
    if family is None:
        raise ConfigurationError(
            f"no rules for model_type {kind!r}; known: {', '.join(sorted(FAMILIES))}. "
            "Pass the converter that your framework uses, hf_state(..., bridge=), or add a family: docs/guides/megatron.md"
        )
    _check_configuration(chunks, config)
    added = int(bool(chunks[0].config.layernorm_zero_centered_gamma)) - int(family.zero_centered_norms)
    if added and not convert_norms and lora != "adapter":
        raise ConfigurationError(
            f"the norms on {chunks[0].place} (decoder.final_layernorm.weight and others) hold the weight"
            f"{' minus one' if added > 0 else ''}, and this family's checkpoints {'do not' if added > 0 else 'hold it minus one'} "
            "(layernorm_zero_centered_gamma): that is no view of the parameter, and is not converted silently. "
            "hf_state(..., convert_norms=True) publishes converted copies of them"
        )
    dtype, predicted = dtype_name(chunks[0].config.params_dtype), getattr(chunks[0].config, "mtp_num_layers", None) or 0
    rules = ModelRules(config, family, dtype, stacked=stacked_experts and lora != "adapter", predicted=predicted)
    experts = chunks[0].config.num_moe_experts
    if rules.expert_counts - {experts}:
        raise ConfigurationError(
            f"Megatron's num_moe_experts is {experts} on {chunks[0].place}, and the Hugging Face configuration means "
            f"{', '.join(map(str, sorted(rules.expert_counts)))}"
        )
    rules.lora = lora
    if lora == "adapter":
        modules = [(path, module) for chunk in chunks for path, module in chunk.model.named_modules() if path.endswith(".adapter")]
        ranks = {path.split(".")[-2]: int(module.dim) for path, module in modules if hasattr(module, "dim")}
        if not ranks:
            raise ConfigurationError(f"the model on {chunks[0].place} has no LoRA of Megatron-Bridge (megatron.bridge.peft.lora)")
        rules.adapt(ranks, dtype_name(next(modules[0][1].parameters()).dtype))
    return MegatronState(chunks, rules, added)


class MegatronState(LiveState):
    """Made by :func:`hf_state` without a bridge: the boxes of each parameter are where the family's rules say.

    ``added`` is what a norm's weight is more than the parameter that stores it: copies are published if it is not zero.
    """

    def __init__(self, chunks: Sequence[ModelChunk], rules: ModelRules, added: int = 0) -> None:
        self._rules = rules
        self._added = added
        super().__init__(rules.manifest, chunks)

    def _shards_of(self, chunk: ModelChunk) -> Iterator[Shard]:
        """Yield the shards of one chunk. Raises if a parameter has no rule, or a rule of the chunk has no parameter."""
        held = set[Part]()
        parameters = [(name, value, *self._rule(chunk, name)) for name, value in self._tensors(chunk)]
        declared = sharded_tensors(chunk.model)  # after the rules: it fails, and names nothing, on a module that is not Megatron's
        for name, value, rule, layer, key in parameters:
            held.update(rule.parts)
            yield from self._cut(name, value, rule, layer, key, declared.get(name, ()))
        for (layer, key), rule in self._rules.packings.items():
            if chunk.holds(layer, key) and not held.issuperset(rule.parts):
                lacking = next(part.name for part in rule.parts if part not in held)
                raise LayoutError(f"nothing holds {lacking} on {self._place}, where its model should have a parameter {key}")

    def _tensors(self, chunk: ModelChunk) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is published of the chunk, under the names that its ``sharded_state_dict()`` has."""
        part = self._rules.lora
        for name, value in chunk.tensors():
            if part is None or (".adapter." in name) == (part == "adapter"):
                known_as = name if part is None else name.replace(".to_wrap.", ".")
                if part != "adapter":
                    refuse_adapter(known_as, self._place)
                yield known_as, value

    def _rule(self, chunk: ModelChunk, name: str) -> tuple[Packing, int | None, str]:
        """Return the rule of a parameter, its layer, and its name there."""
        layer, key = chunk.locate(name)
        rule = self._rules.packings.get((layer, key))
        if rule is None:
            remedy = (
                "this family has no rules for prediction layers: build the model without them (mtp_num_layers)"
                if name.startswith("mtp.") and not self._rules.predicts
                else f"the family's {'layer' if layer is not None else 'outside'} rules need one for {key!r}; "
                "docs/guides/megatron.md shows how to add it, and how to use the converter of your framework instead (bridge=)"
            )
            raise LayoutError(f"no rule for parameter {name} on {self._place}: {remedy}")
        return rule, layer, key

    def _cut(
        self, name: str, value: torch.Tensor, rule: Packing, layer: int | None, key: str, declared: Sequence[ShardedTensor]
    ) -> Iterator[Shard]:
        """Yield the shards that one parameter holds."""
        remedy = (
            "Megatron keeps it so from its first load or forward pass on: call hf_state after that"
            if rule.dtype
            else "give hf_state what get_model() returns, which has all parameters in the model's params_dtype"
        )
        data = self._plain(name, value, rule.dtype or self._rules.dtype, remedy)
        expert = expert_number(key)
        rank, size = self._place.tensor if expert is None else self._place.expert_tensor
        try:
            runs = rule.runs(tuple(data.shape), rank, size)
            if layer is not None and name.startswith("mtp."):
                layer -= self._chunks[0].config.num_layers
            check_geometry(rule, runs, [number for number in (layer, expert) if number is not None], declared)
        except LayoutError as error:
            raise LayoutError(f"{name} on {self._place}, which holds {rule.parts[0].name}: {error}") from None
        if self._added and not rule.norm and "norm" in key:
            raise LayoutError(
                f"{name} on {self._place} is a norm, and its rule does not say so: make it with blocks.norm(), because norms are "
                "to be converted"
            )
        data = self._published(data, self._added if rule.norm else 0)
        for piece in rule.pieces(runs):
            view = data.narrow(rule.dim, piece.start, piece.stop - piece.start).view(piece.box.shape)
            for label in (piece.part.name, *self._rules.copies.get(piece.part.name, ())):
                yield Shard(label, piece.part.shape, piece.box, view)


def _check_configuration(chunks: Sequence[ModelChunk], config: HFConfig) -> None:
    """Refuse what shapes cannot tell: two configurations that mean different models."""
    model, place = chunks[0].config, chunks[0].place
    wanted: dict[str, object] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
    }
    if model.multi_latent_attention:
        wanted |= {
            "q_lora_rank": config.q_lora_rank,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_head_dim": config.qk_nope_head_dim,
            "qk_pos_emb_head_dim": config.qk_rope_head_dim,
            "v_head_dim": config.v_head_dim,
        }
    else:
        wanted |= {
            "num_query_groups": config.num_key_value_heads,
            "kv_channels": head_dim(config),
            "rotary_interleaved": False,
        }
    predicted = getattr(model, "mtp_num_layers", None) or 0
    if predicted:
        wanted["mtp_num_layers"] = getattr(config, "num_nextn_predict_layers", None) or 0
    for name, value in wanted.items():
        if getattr(model, name) != value:
            raise ConfigurationError(
                f"Megatron's {name} is {getattr(model, name)!r} on {place}, and the Hugging Face configuration means {value!r}"
            )
    for setting in ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"):  # of later releases
        if getattr(model, setting, None):
            raise ConfigurationError(
                f"experts on {place} alternate {getattr(model, setting)} rows of gate and up ({setting}): this family has no rules "
                "for that"
            )
    if model.multi_latent_attention and not getattr(config, "rope_interleave", True):
        raise ConfigurationError(
            f"Megatron's latent attention on {place} has rotary pairs side by side, and the Hugging Face configuration says "
            "rope_interleave=False, which means that halves are apart"
        )
    for chunk in chunks:
        shared = bool(chunk.model.share_embeddings_and_output_weights)
        if shared != bool(config.tie_word_embeddings):
            raise ConfigurationError(
                f"share_embeddings_and_output_weights is {shared} on {place}, and tie_word_embeddings {config.tie_word_embeddings}"
            )
    virtual = model.virtual_pipeline_model_parallel_size or 1
    if len(chunks) != virtual:
        raise ConfigurationError(f"{place} has {virtual} virtual pipeline stages, and hf_state got {len(chunks)} model chunks")
    numbers = [number for chunk in chunks for number in chunk.layers]
    if len(set(numbers)) != len(numbers) or not all(0 <= number < config.num_hidden_layers + predicted for number in numbers):
        raise ConfigurationError(f"{place} holds layers {numbers}, counted from zero, of a model of {config.num_hidden_layers}")
