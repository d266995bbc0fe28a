"""Public names that are imported on first use, so that importing their package stays quick and needs no tensor library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def on_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the function ``__getattr__`` of ``package``.

    Args:
        package: Name of the package.
        modules: Its public names, and the modules below it that hold them.
    """

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
