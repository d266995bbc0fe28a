"""Quantizes the matrices of a stream while it goes on, with the bits that shards of the same matrices give."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, ManifestMismatch
from weightsync.model import Box, Manifest, TensorSpec
from weightsync.tensors.formats import FORMATS, Format
from weightsync.tensors.quantization import ChooseFormats, QuantizedShards, fused_group, not_finite
from weightsync.tensors.shards import DTypes, Shard, torch_dtype
from weightsync.trainer.stream_plan import published_spec

_ALONE = 60.0  # seconds for an exchange with no other rank
_GO = np.zeros(1, np.int8)
_Named = tuple[str, torch.Tensor]


class StreamFormats:
    """What takes the place of each tensor of a stream, for one publication after the other.

    Every rank has whole matrices, so none needs another rank. Matrices that engines fuse, in a format in which these share a
    scale, are held as copies until all of their group have come, or the stream has ended.

    Args:
        choose: Chooses formats of some of the tensors.
        dtype: What to convert to before; see :class:`weightsync.Trainer`.
    """

    def __init__(self, choose: ChooseFormats, dtype: DTypes) -> None:
        self._choose, self._dtype = choose, dtype
        self._chosen: dict[str, tuple[torch.Size, torch.dtype, TensorSpec, Format | None]] = {}
        self._held: dict[tuple[str, str], dict[TensorSpec, torch.Tensor]] = {}
        self._made: dict[tuple[tuple[TensorSpec, ...], Format], QuantizedShards] = {}
        self._complete = False  # whether it is known that rules fit all tensors together

    def begin(self) -> None:
        """Drop what the publication before has left."""
        self._held.clear()

    def published(self, name: str, tensor: torch.Tensor) -> list[_Named]:
        """Return what is published now that ``tensor`` has come: converted, quantized, or nothing while it is held.

        Raises:
            ConfigurationError: It cannot be quantized, or holds Inf or NaN.
            ManifestMismatch: A tensor of this name is held already.
        """
        shape, own, spec, encoding = self._chosen.get(name, (None, None, None, None))
        if spec is None or (shape, own) != (tensor.shape, tensor.dtype):
            spec = published_spec(self._dtype, name, tensor)
            encoding = self._choose(Manifest([spec]), whole=False).get(name)
            self._chosen[name] = tensor.shape, tensor.dtype, spec, encoding
            self._complete = False
        tensor = tensor.detach().to(torch_dtype(spec.dtype))
        if encoding is None:
            return [(name, tensor)]
        group, count = fused_group(name) if encoding.fuses else (name, 1)
        held = self._held.setdefault((group, encoding.name), {})
        if spec in held:
            raise ManifestMismatch(f"the stream brought {name} twice")
        held[spec] = tensor if count == 1 else tensor.clone()
        return [] if len(held) < count else self._quantized(self._held.pop((group, encoding.name)), encoding)

    def rest(self) -> list[_Named]:
        """Return what is left at the end of the stream.

        Raises:
            ConfigurationError: A pattern, or the configuration, fits no tensor of the stream.
        """
        if not self._complete:
            self._choose(Manifest(spec for _, _, spec, _ in self._chosen.values()))
            self._complete = True
        groups, self._held = self._held, {}
        return [part for (_, name), held in groups.items() for part in self._quantized(held, FORMATS[name])]

    def _quantized(self, matrices: Mapping[TensorSpec, torch.Tensor], encoding: Format) -> list[_Named]:
        alike = tuple(TensorSpec(re.sub(r"\b\d+\b", "0", spec.name), spec.shape, spec.dtype) for spec in matrices)  # of all layers
        manifest, shards = Manifest(alike), _shards(alike, list(matrices.values()))
        quantized = self._made.get((alike, encoding))
        if quantized is None:
            quantized = QuantizedShards(manifest, shards, {spec.name: encoding for spec in alike})
            self._made[alike, encoding] = quantized
        quantized.derive(manifest, shards)
        device = shards[0].tensor.device
        filled = tuple((part, torch.empty(part.box.shape, dtype=part.tensor.dtype, device=device)) for part in quantized.shards)
        try:
            quantized.exchange(Deadline(_ALONE))
            quantized.write(filled, _GO)
        except ConfigurationError:
            raise next(not_finite(spec.name) for spec, matrix in matrices.items() if not matrix.isfinite().all()) from None
        finally:
            quantized.forget()
        names = {part.name: spec.name for own, of in zip(matrices, alike, strict=True) for spec, part in _parts(encoding, own, of)}
        return [(names[part.name], memory) for part, memory in filled]


def _shards(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> list[Shard]:
    return [Shard(spec.name, spec.shape, Box.whole(spec.shape), each) for spec, each in zip(specs, tensors, strict=True)]


def _parts(encoding: Format, own: TensorSpec, of: TensorSpec) -> zip[tuple[TensorSpec, TensorSpec]]:
    return zip(encoding.specs(own), encoding.specs(of), strict=True)
