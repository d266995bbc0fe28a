"""Modules and names of packages that are distributions now can still be imported from where they were, with a warning."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import weightsync

MOVED = {
    "weightsync.ray": ("weightsync_ray", "./ray-manager"),
    "weightsync.rollouts": ("weightsync_rollouts", "./rollouts"),
    "weightsync.testing": ("weightsync_testing", "./testing"),
    "weightsync.transports.nixl": ("weightsync_nixl", "./transport-nixl"),
}

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here")
each = pytest.mark.parametrize("old", [pytest.param(old, marks=needs_ray if old == "weightsync.ray" else ()) for old in MOVED])


def modules(package: str) -> list[str]:
    return sorted(path.stem for path in Path(str(importlib.import_module(package).__file__)).parent.glob("[a-z]*.py"))


def warning(old: str) -> str:
    package, folder = MOVED[old]
    return rf"pip install {folder}.*import from {package}"


@pytest.fixture(autouse=True)
def not_imported_before() -> Iterator[None]:
    def imported() -> dict[str, object]:
        return {name: sys.modules[name] for name in list(sys.modules) if name.startswith(tuple(MOVED))}

    before = imported()
    for name in before:
        del sys.modules[name]
    yield
    for name in imported():
        del sys.modules[name]
    sys.modules.update(before)  # type: ignore[arg-type]


@each
def test_an_old_module_warns_and_is_the_new_one(old: str) -> None:
    package, _ = MOVED[old]
    for module in modules(package):
        for name in [name for name in sys.modules if name.startswith(old)]:
            del sys.modules[name]
        with pytest.warns(DeprecationWarning, match=warning(old)):
            moved = importlib.import_module(f"{old}.{module}")
        assert moved is importlib.import_module(f"{package}.{module}")
        assert getattr(sys.modules[old], module) is moved


@each
def test_the_old_names_are_the_new_ones(old: str) -> None:
    new = importlib.import_module(MOVED[old][0])
    with pytest.warns(DeprecationWarning, match=warning(old)):
        package = importlib.import_module(old)
    for name in getattr(new, "__all__", ()):
        assert getattr(package, name) is getattr(new, name)


@each
def test_the_warning_points_to_what_imports_the_old_name(old: str) -> None:
    with pytest.warns(DeprecationWarning) as warned:
        exec(compile(f"import {old}", "mine.py", "exec"), {})
    assert {warning.filename for warning in warned} == {"mine.py"}


@each
def test_a_module_that_never_was_is_not_found(old: str) -> None:
    with pytest.warns(DeprecationWarning), pytest.raises(ModuleNotFoundError, match="Nonsense"):
        importlib.import_module(f"{old}.Nonsense")


@each
def test_without_the_package_the_error_says_how_to_install_it(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, folder = MOVED[old]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install {folder}.* in a clone"):
        importlib.import_module(old)


def test_the_public_name_of_the_transport_is_that_of_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(weightsync), "Nixl", raising=False)
    with pytest.warns(DeprecationWarning, match="import from weightsync_nixl"):
        old = weightsync.Nixl
    assert old is importlib.import_module("weightsync_nixl").Nixl
    monkeypatch.delitem(vars(weightsync), "Nixl")
