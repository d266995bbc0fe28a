"""What moved to a package of its own can still be imported from where it was, with a warning."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import weightsync_testing

MODULES = sorted(path.stem for path in Path(weightsync_testing.__file__).parent.glob("[a-z]*.py"))


@pytest.fixture(autouse=True)
def not_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("weightsync.testing", *(f"weightsync.testing.{module}" for module in MODULES)):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("module", MODULES)
def test_an_old_module_warns_and_is_the_new_one(module: str) -> None:
    with pytest.warns(DeprecationWarning, match=r"pip install \./testing.*import from weightsync_testing"):
        old = importlib.import_module(f"weightsync.testing.{module}")
    assert old is importlib.import_module(f"weightsync_testing.{module}")
    assert getattr(sys.modules["weightsync.testing"], module) is old


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.warns(DeprecationWarning), pytest.raises(ModuleNotFoundError, match="Nonsense"):
        importlib.import_module("weightsync.testing.Nonsense")


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "weightsync_testing", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install \./testing in a clone"):
        importlib.import_module("weightsync.testing.adapter_contract")
