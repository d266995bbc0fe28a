"""The tensors of a speculative decoder's own model, distinguished from the main model's by a prefix of their names."""

from __future__ import annotations

from weightsync.errors import ConfigurationError
from weightsync.model import Manifest

__all__ = ["join_manifests"]

_SHOWN = 5


def join_manifests(main: Manifest, draft: Manifest | None, prefix: str) -> Manifest:
    """The manifest of everything that may arrive: the main model's tensors, and a draft's, distinguished by ``prefix``.

    Raises :class:`~weightsync.errors.ConfigurationError` where the rule would send a tensor to the wrong model.
    """
    if draft is None:
        return main
    astray = [spec.name for spec in main for name in (spec.name, *spec.aliases) if name.startswith(prefix)]
    astray += [spec.name for spec in draft for name in (spec.name, *spec.aliases) if not name.startswith(prefix)]
    if astray or not prefix:
        names = ", ".join(name[:200] for name in astray[:_SHOWN])
        raise ConfigurationError(
            f"names that begin with {prefix!r} must be the draft model's, and only they; {len(astray)} are not: {names}"
        )
    return Manifest([*main, *draft])
