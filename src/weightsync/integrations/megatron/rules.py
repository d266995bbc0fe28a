"""The rules of a whole model, and the manifest of the Hugging Face tensors that they give."""

from __future__ import annotations

from dataclasses import replace

from weightsync.errors import ConfigurationError
from weightsync.integrations.megatron.blocks import HFConfig
from weightsync.integrations.megatron.chunk import expert_number
from weightsync.integrations.megatron.families import Family
from weightsync.integrations.megatron.packing import Packing
from weightsync.model import Manifest, TensorSpec

__all__ = ["ModelRules"]

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class ModelRules:
    """Every parameter of a model, wherever a rank has it, and the Hugging Face tensors that it holds: the same on every rank.

    ``packings`` has the rule of each parameter, by its layer (``None`` outside layers) and its name there. ``dtype`` is that of the
    parameters; ``stacked`` asks for the names of Transformers' modules, which stack the experts of a layer.
    """

    def __init__(self, config: HFConfig, family: Family, dtype: str, *, stacked: bool) -> None:
        self.dtype = dtype
        self.packings: dict[tuple[int | None, str], Packing] = {(None, key): rule for key, rule in family.outside(config).items()}
        self.expert_counts = set[int]()
        """Of all layers that have experts."""
        for number in range(config.num_hidden_layers):
            rules = family.layer(config, number, stacked)
            self.expert_counts.add(len({expert_number(key) for key in rules} - {None}))
            for key, rule in rules.items():
                parts = tuple(replace(part, name=f"model.layers.{number}.{part.name}") for part in rule.parts)
                self.packings[number, key] = replace(rule, parts=parts)
        self.expert_counts.discard(0)
        self.manifest = self._survey((_HEAD,) if config.tie_word_embeddings else ())

    def _survey(self, aliases: tuple[str, ...]) -> Manifest:
        specs = dict[str, TensorSpec]()
        for rule in self.packings.values():
            for part in rule.parts:
                spec = TensorSpec(part.name, part.shape, rule.dtype or self.dtype, aliases if part.name == _EMBEDDING else ())
                if specs.setdefault(part.name, spec) != spec:
                    raise ConfigurationError(f"two rules for {part.name} disagree: {specs[part.name]} and {spec}")
        return Manifest(specs.values())
