"""One bucket handed to an engine's own loader, and the check that the loader took all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from weightsync.errors import LoadError, WeightSyncError

__all__ = ["load_all"]

_SHOWN = 3


def load_all(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], None], name: str, tensors: Sequence[tuple[str, torch.Tensor]]
) -> None:
    """Hand ``tensors`` to ``load``, the loader of the adapter ``name``.

    Raises :class:`~weightsync.errors.LoadError` if the loader raises, or leaves tensors of its iterator untaken.
    """
    left = iter(tensors)
    try:
        load(left)
    except WeightSyncError:
        raise
    except Exception as error:
        names = ", ".join(name for name, _ in tensors[:_SHOWN])
        raise LoadError(f"the {name} loader raised on a bucket of {len(tensors)} tensors ({names}, ...): {error!r}") from error
    missed = sum(1 for _ in left)
    if missed:
        raise LoadError(f"the {name} loader took {len(tensors) - missed} of the {len(tensors)} tensors of a bucket")
