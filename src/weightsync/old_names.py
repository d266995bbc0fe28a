"""Old names of what is in the distributions beside this one now."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType

from weightsync.distributions import how_to_install


def moved(old: str, new: str, *modules: str, note: str = "") -> None:
    """Make the module ``old``, which is being imported, stand for ``new`` of another distribution, and warn.

    Args:
        old: The old name.
        new: The module that has its contents, or the package. A package's names and ``modules`` are then those of ``old``.
        modules: Modules of the package.
        note: Follows in messages.

    Raises:
        ModuleNotFoundError: The distribution is not installed. The message says how to install it.
    """
    loaded = _load(old, new, note)
    if not modules:
        sys.modules[old] = loaded
        return
    names = vars(sys.modules[old])
    names.update({name: getattr(loaded, name) for name in getattr(loaded, "__all__", ())})
    for name in modules:
        names[name] = sys.modules[f"{old}.{name}"] = import_module(f"{new}.{name}")


def moved_names(old: str, new: str, *names: str) -> None:
    """Let ``names`` of the module ``old``, which is being imported, be found in ``new`` of another distribution, with a warning."""

    def load(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        return getattr(_load(f"{old}.{name}", new), name)

    vars(sys.modules[old])["__getattr__"] = load


def _load(old: str, new: str, note: str = "") -> ModuleType:
    package = new.partition(".")[0]
    now = f"{old} is in the package {package.replace('_', '-')} now{note} ({how_to_install(package)})"
    try:
        loaded = import_module(new)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(now, name=package) from None
    warnings.warn(f"{now}: import from {new}", DeprecationWarning, stacklevel=_importer())
    return loaded


def _importer() -> int:
    """Return the stack level, seen by the caller, of the code that uses an old name."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("weightsync", "importlib"):
        frame = frame.f_back
        level += "importlib._bootstrap" not in frame.f_code.co_filename  # such frames have no level
    return level
