"""The rules of a whole model, and the manifest of the Hugging Face tensors that they give."""

from __future__ import annotations

from dataclasses import replace

from weightsync.errors import ConfigurationError
from weightsync.integrations.megatron.blocks import HFConfig
from weightsync.integrations.megatron.chunk import expert_number
from weightsync.integrations.megatron.families import Family
from weightsync.integrations.megatron.packing import Packing
from weightsync.model import Manifest, TensorSpec

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
