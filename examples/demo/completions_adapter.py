"""A server that generates with a plain module behind a gate, as a rollout engine: the demo's replicas, and a model for yours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from weightsync.engine.adapter import EngineAdapter
from weightsync.errors import LoadError
from weightsync.model import Manifest, PauseMode, Version
from weightsync.tensors.shards import FollowedShards, Shard, checkpoint_name

__all__ = ["CompletionsAdapter", "Served"]


class Served(Protocol):
    """What the adapter asks of the server."""

    @property
    def model(self) -> torch.nn.Module:
        """The module whose parameters are served."""
        ...

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Return with no forward pass running, none starting until ``resume``, and no label; also if it is paused already."""
        ...

    def label(self, version: Version) -> None:
        """Name the weights; refused while anything runs."""
        ...

    def flush(self) -> bool:
        """Drop what was computed with the old weights and say whether that worked."""
        ...

    def resume(self) -> None:
        """Serve again; refused without a label."""
        ...


class CompletionsAdapter(EngineAdapter):
    """Writes straight into the served module's parameters, or takes whole tensors by name; never labels what was not committed."""

    name = "completions"
    pauses_twice = True

    def __init__(self, server: Served) -> None:
        self._server = server
        self._followed = FollowedShards(server.model)

    def manifest(self) -> Manifest:
        """The module's parameters under their checkpoint names."""
        return self._followed.now()[0]

    def shards(self) -> Sequence[Shard]:
        """The parameters where they lie: direct delivery."""
        return self._followed.now()[1]

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Close the gate."""
        self._server.pause(mode, timeout)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy into the parameters of the same names.

        Raises :class:`~weightsync.errors.LoadError` for an unknown name, another shape or another dtype.
        """
        named = self._server.model.named_parameters(remove_duplicate=False)
        parameters = {checkpoint_name(name): parameter for name, parameter in named}
        with torch.no_grad():
            for name, tensor in tensors:
                own = parameters.get(name)
                if own is None:
                    raise LoadError(f"the served model has no parameter named {name!r}")
                if own.shape != tensor.shape or own.dtype != tensor.dtype:
                    raise LoadError(
                        f"{name} arrived as {tensor.dtype} {list(tensor.shape)}; the served model has {own.dtype} {list(own.shape)}"
                    )
                own.copy_(tensor)

    def finish(self, version: Version) -> None:
        """Take the version's label."""
        self._server.label(version)

    def flush(self) -> bool:
        """Ask the server to drop its caches."""
        return self._server.flush()

    def resume(self) -> None:
        """Open the gate."""
        self._server.resume()
