"""What a vLLM model's checkpoint holds, learned from its files' headers and its configuration. No weight is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from weightsync.errors import ConfigurationError
from weightsync.external import checkpoint_files
from weightsync.model import Manifest, TensorSpec
from weightsync.tensors.shards import manifest_of

__all__ = ["HfCheckpoint", "checkpoint_of"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HfCheckpoint:
    """The tensors that a loader expects."""

    manifest: Manifest
    names: tuple[str, ...]
    """Names under which tensors are handed to the loader: those that the files hold."""

    def with_draft(self, draft: HfCheckpoint, prefix: str) -> HfCheckpoint:
        """This one, and a draft model's under names that begin with ``prefix``.

        Raises :class:`~weightsync.errors.ConfigurationError` if some of its own do, or the prefix is empty.
        """
        # Imported here: it brings numba, which a CPU worker of vLLM must not find loaded when it begins.
        from weightsync.engine.draft import join_manifests

        specs = [
            msgspec.structs.replace(spec, name=prefix + spec.name, aliases=tuple(prefix + name for name in spec.aliases))
            for spec in draft.manifest
        ]
        joined = join_manifests(self.manifest, Manifest(specs), prefix)
        return HfCheckpoint(joined, self.names + tuple(prefix + name for name in draft.names))


def checkpoint_of(model: str, revision: str | None, config: object) -> HfCheckpoint:
    """The checkpoint behind a vLLM model: ``model`` is a folder or a hub name, ``config`` its Hugging Face configuration.

    Names, shapes and dtypes are those of the safetensors files; ties come from the Transformers class of ``config``, built
    without memory. Without files (vLLM started with dummy weights) all comes from that class. Raises
    :class:`~weightsync.errors.ConfigurationError` if neither is to be had.
    """
    headers = _headers(_folder(model, revision))
    built = _built(config)
    if not headers:
        if built is None:
            raise ConfigurationError(
                f"{model} has no safetensors files here, and Transformers has no class for its configuration: weightsync cannot "
                "tell which tensors this engine takes"
            )
        return HfCheckpoint(built, tuple(spec.name for spec in built))
    aliases = {} if built is None else _ties(built, headers)
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
    """Every tensor of the safetensors files in ``folder``, by name; empty if there are none. Of files without an index, all."""
    if folder is None:
        return {}
    whole = any((folder / name).exists() for name in (checkpoint_files.INDEX, checkpoint_files.SINGLE))
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    specs: dict[str, TensorSpec] = {}
    for path in [folder] if whole else files:
        with checkpoint_files.CheckpointFiles(path, follow_links=True) as opened:  # vLLM follows them, and no weight is read here
            specs |= {spec.name: spec for spec in opened.manifest}
    return specs


def _built(config: object) -> Manifest | None:
    """The manifest of the Transformers model of ``config``, in the configuration's dtype; ``None`` if there is no such class."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except (ValueError, KeyError, ImportError, AttributeError, TypeError, RuntimeError) as error:
        _log.info("weightsync: Transformers builds no model of this configuration (%s); ties are not known", error)
        return None
    dtype = getattr(config, "dtype", None)
    return manifest_of(model, dtype=dtype if isinstance(dtype, torch.dtype) else None)


def _ties(built: Manifest, headers: Mapping[str, TensorSpec]) -> dict[str, tuple[str, ...]]:
    """Aliases by the name that the files hold; a trainer's model lists the same ones."""
    ties: dict[str, tuple[str, ...]] = {}
    for spec in built:
        if spec.aliases and spec.name in headers:
            ties[spec.name] = spec.aliases
    return ties
