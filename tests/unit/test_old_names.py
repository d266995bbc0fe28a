"""Modules and names of packages that are distributions now can still be imported from where they were, with a warning."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
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

FOLDERS = {"weightsync_disaggregated": "./disaggregated-updates", "weightsync_relay": "./relay"}
MODULES = {
    f"weightsync.external.{name}": f"weightsync_disaggregated.{name}"
    for name in (
        *("checks", "push", "rank", "ranks", "requests", "router", "weight_updates"),
        *("clients.base", "clients.lmdeploy", "clients.sglang", "clients.weightsync"),
    )
} | {"weightsync.trainer.relay": "weightsync_relay.relay"}
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "weightsync.external": {
        "weightsync_disaggregated": (
            "DisaggregatedRank",
            "LocalRanks",
            "Ranks",
            "Settings",
            "WeightUpdates",
            "weight_update_routes",
        ),
    },
    "weightsync.external.checkpoint_files": {"weightsync_disaggregated.buckets": ("buckets_of",)},
    "weightsync.external.clients.http": {
        "weightsync_disaggregated.clients.bodies": ("GroupSpec", "bucket_body", "destroy_group", "init_group", "tensors_body"),
    },
    "weightsync.external.clients.vllm": {
        "weightsync_disaggregated.clients.vllm": (
            *("SHUTDOWN_ENGINE", "START_WEIGHT_UPDATE", "VLLMClient", "finish_weight_update", "update_weights"),
        ),
    },
    "weightsync.store.region": {"weightsync_relay.kept_region": ("KeptRegion",)},
}
"""Names that moved out of modules that are still there."""
EACH_NAME = [(old, new, name) for old, places in NAMES.items() for new, names in places.items() for name in names]

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here")
each = pytest.mark.parametrize("old", [pytest.param(old, marks=needs_ray if old == "weightsync.ray" else ()) for old in MOVED])


def folder_of(module: str) -> str:
    return FOLDERS[module.partition(".")[0]]


def modules(package: str) -> list[str]:
    return sorted(path.stem for path in Path(str(importlib.import_module(package).__file__)).parent.glob("[a-z]*.py"))


def warning(old: str) -> str:
    package, folder = MOVED[old]
    return rf"pip install {folder}.*import from {package}"


class Without(MetaPathFinder):
    """Finds nothing of these packages, as where they are not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in FOLDERS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture(autouse=True)
def not_imported_before() -> Iterator[None]:
    def imported() -> dict[str, object]:
        return {name: sys.modules[name] for name in list(sys.modules) if name.startswith(tuple(MOVED)) or name in MODULES}

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


@pytest.mark.parametrize("old", MODULES)
def test_an_old_module_of_a_package_that_stayed_warns_and_is_the_new_one(old: str) -> None:
    new = importlib.import_module(MODULES[old])
    with pytest.warns(
        DeprecationWarning, match=rf"pip install {folder_of(MODULES[old])} in a clone.*import from {MODULES[old]}"
    ) as warned:
        names: dict[str, object] = {}
        exec(compile(f"import {old} as old", "mine.py", "exec"), names)
    assert names["old"] is importlib.import_module(old) is new
    assert {warning.filename for warning in warned} == {"mine.py"}


@pytest.mark.parametrize(("old", "new", "name"), EACH_NAME)
def test_an_old_name_of_a_module_that_stayed_warns_and_is_the_new_one(
    old: str, new: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(vars(importlib.import_module(old)), name, raising=False)
    with pytest.warns(DeprecationWarning, match=rf"pip install {folder_of(new)} in a clone.*import from {new}") as warned:
        names: dict[str, object] = {}
        exec(compile(f"from {old} import {name}", "mine.py", "exec"), names)
    assert names[name] is getattr(importlib.import_module(new), name)
    assert {warning.filename for warning in warned} == {"mine.py"}
    vars(importlib.import_module(old)).pop(name, None)


@pytest.mark.parametrize("old", NAMES)
def test_a_name_that_never_was_is_an_attribute_error(old: str) -> None:
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = importlib.import_module(old).Nonsense


@pytest.mark.parametrize(
    ("code", "new"),
    [(f"import {old}", new) for old, new in MODULES.items()] + [(f"from {old} import {name}", new) for old, new, name in EACH_NAME],
)
def test_without_its_package_the_error_of_an_old_name_says_how_to_install_it(
    code: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in FOLDERS]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without(), *sys.meta_path])
    for old, _, name in EACH_NAME:
        monkeypatch.delitem(vars(importlib.import_module(old)), name, raising=False)
    package = new.partition(".")[0].replace("_", "-")
    with pytest.raises(ModuleNotFoundError, match=rf"{package} now \(pip install {folder_of(new)} in a clone"):
        exec(code, {})


def test_the_public_name_of_the_transport_is_that_of_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(weightsync), "Nixl", raising=False)
    with pytest.warns(DeprecationWarning, match="import from weightsync_nixl"):
        old = weightsync.Nixl
    assert old is importlib.import_module("weightsync_nixl").Nixl
    monkeypatch.delitem(vars(weightsync), "Nixl")
