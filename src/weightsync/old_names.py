"""Packages that are distributions beside this one now, under their old names."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module


def moved(old: str, package: str, folder: str, *modules: str, note: str = "") -> None:
    """Fill the package ``old``, which is being imported, with the names and ``modules`` of ``package``, and warn.

    Args:
        old: The old name.
        package: The package that has its contents.
        folder: Its distribution's folder in a clone.
        modules: Its modules.
        note: What else a message says of it.

    Raises:
        ModuleNotFoundError: ``package`` is not installed. The message says how to install it.
    """
    now = f"{old} is the package {package.replace('_', '-')} now{note} (pip install {folder} in a clone of weightsync)"
    try:
        new = import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(now, name=package) from None
    warnings.warn(f"{now}: import from {package}", DeprecationWarning, stacklevel=3)
    names = vars(sys.modules[old])
    names.update({name: getattr(new, name) for name in getattr(new, "__all__", ())})
    for name in modules:
        names[name] = sys.modules[f"{old}.{name}"] = import_module(f"{package}.{name}")
