"""What a vLLM model's checkpoint holds, learned from its files' headers and its configuration. No weight is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from weightsync.errors import ConfigurationError
from weightsync.messages import UNREADABLE
from weightsync.model import Manifest, TensorSpec
from weightsync.tensors.shards import manifest_of

__all__ = ["Checkpoint", "checkpoint_of", "read_headers"]

_log = logging.getLogger(__name__)

_MAX_HEADER = 100_000_000  # bytes, safetensors' own limit
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I16": "int16",
    "F16": "float16", "BF16": "bfloat16", "I32": "int32", "F32": "float32", "I64": "int64", "F64": "float64",
}  # fmt: skip


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """The tensors that a loader expects."""

    manifest: Manifest
    names: tuple[str, ...]
    """Names under which tensors are handed to the loader: those that the files hold."""


def checkpoint_of(model: str, revision: str | None, config: object) -> Checkpoint:
    """The checkpoint behind a vLLM model: ``model`` is a folder or a hub name, ``config`` its Hugging Face configuration.

    Names, shapes and dtypes are those of the safetensors files; ties come from the Transformers class of ``config``, built
    without memory. Without files (vLLM started with dummy weights) all comes from that class. Raises
    :class:`~weightsync.errors.ConfigurationError` if neither is to be had.
    """
    headers = read_headers(_folder(model, revision))
    built = _built(config)
    if not headers:
        if built is None:
            raise ConfigurationError(
                f"{model} has no safetensors files here, and Transformers has no class for its configuration: weightsync cannot "
                "tell which tensors this engine takes"
            )
        return Checkpoint(built, tuple(spec.name for spec in built))
    aliases = {} if built is None else _ties(built, headers)
    tied = {name for others in aliases.values() for name in others}
    specs = [msgspec.structs.replace(spec, aliases=aliases.get(name, ())) for name, spec in headers.items() if name not in tied]
    return Checkpoint(Manifest(specs), tuple(headers))


def _folder(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def read_headers(folder: Path | None) -> dict[str, TensorSpec]:
    """Every tensor of the safetensors files in ``folder``, by name; empty if there are none.

    Raises :class:`~weightsync.errors.ConfigurationError` for a file that is not what it should be.
    """
    if folder is None:
        return {}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(
            {folder / Path(name).name for name in msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()}
        )
    else:
        files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    found: dict[str, TensorSpec] = {}
    for path in files:
        found |= _header(path)
    return found


def _header(path: Path) -> dict[str, TensorSpec]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= min(_MAX_HEADER, path.stat().st_size):
                raise ConfigurationError(f"{path} is not a safetensors file: its header would have {size} bytes")
            entries = msgspec.json.decode(file.read(size), type=dict[str, msgspec.Raw])
            entries.pop("__metadata__", None)
            typed = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in entries.items()}
            return {name: TensorSpec(name, entry.shape, _DTYPES[entry.dtype]) for name, entry in typed.items()}
    except (OSError, KeyError) as error:
        raise ConfigurationError(f"{path} cannot be read as a safetensors file: {error}") from error
    except UNREADABLE as error:
        raise ConfigurationError(f"{path} cannot be read as a safetensors file: {error}") from error


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
    found: dict[str, tuple[str, ...]] = {}
    for spec in built:
        if spec.aliases and spec.name in headers:
            found[spec.name] = spec.aliases
    return found
