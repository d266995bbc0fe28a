"""Options of a framework's ranks that stream whole tensors (:mod:`weightsync.integrations.stream_ranks`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

import msgspec
import torch

from weightsync.config import Address, Seconds, ServerSettings, token_source
from weightsync.errors import ConfigurationError
from weightsync.tensors.shards import DTypes
from weightsync.transports.registry import FROM_HOST_MEMORY, known

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Names of dtypes in the frameworks' own configurations."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may write in the framework's configuration, the same on all ranks."""

    coordinator: str | None = None
    """URL of a coordinator that runs already; else ``WEIGHTSYNC_COORDINATOR`` of rank 0; else rank 0 starts one."""
    timeout: Seconds | None = None
    """Seconds for an update; else ``WEIGHTSYNC_PUBLISH_TIMEOUT``, else 300. What rank 0 has counts on all ranks."""
    dtype: str | dict[str, str] | None = None
    """dtype of floating-point tensors on the way, or patterns of names and their dtypes, as a mapping or a list
    of ``pattern=dtype``; by default the trainer's own. The first pattern that fits decides. Without one, nothing is converted."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where windows of trainer ranks and buckets of rollout ranks lie. GPU memory is read on one host, or by a named ``nccl``."""
    transports: tuple[str, ...] | None = None
    """Transports allowed, best first; by default all that both ends have."""
    direct: bool = True
    """Whether vLLM's workers read the shards of trainer ranks, where all ranks can take part in that."""
    keep_copy: bool = True
    """Whether a trainer rank that shares its GPU with vLLM keeps its converted copy there between updates, and stays joined."""

    @classmethod
    def of(cls, given: Mapping[str, object], where: str) -> Self:
        """Check ``given``, which the user wrote at ``where`` of the framework's configuration.

        Raises:
            ConfigurationError: An option is unknown or has a wrong value.
        """
        plain = {key: _builtins(value) for key, value in given.items() if value is not None}
        try:
            if isinstance(plain.get("dtype"), list):
                plain["dtype"] = _patterns(msgspec.convert(plain["dtype"], list[str]))
            options = msgspec.convert(plain, cls)
            if options.coordinator is not None:
                Address.parse(options.coordinator)
            unknown = sorted(set(options.transports or ()) - set(known()))
            if unknown:
                raise ConfigurationError(f"unknown transport {unknown[0]!r}; transports: {', '.join(known())}")
            for name in [options.dtype] if isinstance(options.dtype, str) else (options.dtype or {}).values():
                _dtype(name)
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from None
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigurationError(f"{where}: {error}; options: {', '.join(cls.__struct_fields__)}") from None
        return options

    def staging(self) -> torch.device | None:
        """The CUDA device of the calling thread, if windows and buckets lie there."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else None

    def dtype_of(self, name: str, own: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor of dtype ``own`` travels."""
        if not own.is_floating_point or not isinstance(self.dtype, dict):
            return own
        return next((_dtype(to) for pattern, to in self.dtype.items() if fnmatchcase(name, pattern)), own)

    def whole_dtype(self) -> torch.dtype | None:
        """The one dtype for all tensors, if there is one."""
        return _dtype(self.dtype) if isinstance(self.dtype, str) else None

    def dtypes(self, own: Mapping[str, torch.dtype]) -> DTypes:
        """The dtypes in which tensors of the dtypes ``own``, by name, travel."""
        if isinstance(self.dtype, dict):
            return {name: self.dtype_of(name, dtype) for name, dtype in own.items()}
        return self.whole_dtype()

    def shard_transports(self) -> tuple[str, ...] | None:
        """Transports for a rank's own shards: those that read a copy in host memory, unless the user wants GPU memory read."""
        return self.transports or (FROM_HOST_MEMORY if self.device == "cpu" else None)


def _builtins(value: Any) -> Any:  # noqa: ANN401 - frameworks give dicts, or OmegaConf's containers, which look like them
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {key: _builtins(item) for key, item in value.items()}
    return [_builtins(item) for item in value] if isinstance(value, Iterable) else value


def _patterns(items: list[str]) -> dict[str, str]:
    """Patterns and their dtypes from a list of ``pattern=dtype``, which a command line can express."""
    split = [item.rpartition("=") for item in items]
    if not all(pattern for pattern, _, _ in split):
        raise ConfigurationError(f"dtype: a list has items such as *.weight=bfloat16, not {items!r}")
    return {pattern: name for pattern, _, name in split}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, _SHORT.get(name, name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigurationError(f"dtype: {name!r} is not a floating-point dtype of torch, such as bfloat16")
    return dtype


def cast(weights: Iterable[tuple[str, torch.Tensor]], options: Options) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert each tensor to the dtype of the first pattern that fits its name."""
    for name, tensor in weights:
        yield name, tensor.to(options.dtype_of(name, tensor.dtype))


def server_settings(node: str) -> ServerSettings:
    """Settings of a coordinator on rank 0.

    With a token in the environment it listens on ``node``, this node's address, because all nodes may know the token. Without one
    it listens on loopback and leaves a token in a file that only this user can read.
    """
    defaults = {"WEIGHTSYNC_PORT": "0", **({"WEIGHTSYNC_HOST": node} if token_source() else {})}
    return ServerSettings.load(None, defaults)
