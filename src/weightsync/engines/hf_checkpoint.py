"""Manifest of a vLLM or SGLang model's checkpoint, from the headers of its files and its configuration. Reads no weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from weightsync.errors import ConfigurationError
from weightsync.external import checkpoint_files
from weightsync.model import Manifest, TensorSpec
from weightsync.model.manifest import join_manifests
from weightsync.tensors.shards import manifest_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HfCheckpoint:
    """Tensors that a loader expects."""

    manifest: Manifest
    names: tuple[str, ...]
    """Names in the checkpoint's files, under which tensors are passed to the loader."""

    def with_draft(self, draft: HfCheckpoint, prefix: str) -> HfCheckpoint:
        """Return this checkpoint joined with a draft model's, whose names get the ``prefix``.

        Raises:
            ConfigurationError: The prefix is empty, or a name of this checkpoint starts with it.
        """
        specs = [
            msgspec.structs.replace(spec, name=prefix + spec.name, aliases=tuple(prefix + name for name in spec.aliases))
            for spec in draft.manifest
        ]
        joined = join_manifests(self.manifest, Manifest(specs), prefix)
        return HfCheckpoint(joined, self.names + tuple(prefix + name for name in draft.names))


def checkpoint_of(model: str, revision: str | None, config: object) -> HfCheckpoint:
    """Return the checkpoint of an engine's model.

    Names, shapes and dtypes are those of the safetensors files. Ties come from the Transformers class of ``config``, built on the
    meta device. Without files (an engine started with dummy weights), everything comes from that class.

    Args:
        model: Directory, or name on the hub.
        revision: Revision on the hub.
        config: Hugging Face configuration of the model.

    Raises:
        ConfigurationError: There are neither files nor a Transformers class, or there are no files of a quantized checkpoint.
    """
    headers = _headers(_folder(model, revision))
    built = _built(config)
    if not headers:
        if built is None or getattr(config, "quantization_config", None):
            raise ConfigurationError(
                f"{model} has no local safetensors files, and Transformers has no class for its configuration, or none with its "
                "quantized tensors, so the tensors of this engine are unknown"
            )
        return HfCheckpoint(built, tuple(spec.name for spec in built))
    # A trainer's model has the same ties.
    aliases = {spec.name: spec.aliases for spec in built or () if spec.aliases and spec.name in headers}
    tied = {name for others in aliases.values() for name in others}
    specs = [msgspec.structs.replace(spec, aliases=aliases.get(name, ())) for name, spec in headers.items() if name not in tied]
    return HfCheckpoint(Manifest(specs), tuple(headers))


def _folder(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def _headers(folder: Path | None) -> dict[str, TensorSpec]:
    """Return all tensors of the safetensors files in ``folder`` by name. Without an index, all files are read."""
    if folder is None:
        return {}
    whole = any((folder / name).exists() for name in (checkpoint_files.INDEX, checkpoint_files.SINGLE))
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    specs: dict[str, TensorSpec] = {}
    for path in [folder] if whole else files:
        with checkpoint_files.CheckpointFiles(path, follow_links=True, allow_sparse=True) as opened:  # its headers alone are read
            specs |= {spec.name: spec for spec in opened.manifest}
    return specs


def _built(config: object) -> Manifest | None:
    """Return the manifest of the Transformers model of ``config``, in its dtype; ``None`` if Transformers cannot build it."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, ImportError, AttributeError, TypeError, RuntimeError) as error:
        _log.info("weightsync: Transformers cannot build this model (%s), so its tied tensors are unknown", error)
        return None
    dtype = getattr(config, "dtype", None)
    return manifest_of(model, dtype=dtype if isinstance(dtype, torch.dtype) else None)
