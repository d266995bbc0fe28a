"""The modules and names of weightsync-rollouts can still be imported from where they were, with a warning."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import weightsync_rollouts

MODULES = sorted(path.stem for path in Path(weightsync_rollouts.__file__).parent.glob("[a-z]*.py"))
WARNING = r"pip install \./rollouts.*import from weightsync_rollouts"


@pytest.fixture(autouse=True)
def not_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("weightsync.rollouts", *(f"weightsync.rollouts.{module}" for module in MODULES)):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("module", MODULES)
def test_an_old_module_warns_and_is_the_new_one(module: str) -> None:
    with pytest.warns(DeprecationWarning, match=WARNING):
        old = importlib.import_module(f"weightsync.rollouts.{module}")
    assert old is importlib.import_module(f"weightsync_rollouts.{module}")
    assert getattr(sys.modules["weightsync.rollouts"], module) is old


def test_the_old_names_are_the_new_ones() -> None:
    with pytest.warns(DeprecationWarning, match=WARNING):
        old = importlib.import_module("weightsync.rollouts")
    for name in weightsync_rollouts.__all__:
        assert getattr(old, name) is getattr(weightsync_rollouts, name)


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.warns(DeprecationWarning), pytest.raises(ModuleNotFoundError, match="Nonsense"):
        importlib.import_module("weightsync.rollouts.Nonsense")


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "weightsync_rollouts", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install \./rollouts"):
        importlib.import_module("weightsync.rollouts.controller")
