"""What moved to a package of its own can still be imported from where it was, with a warning."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

import weightsync_callbacks
from weightsync.config import ServerSettings
from weightsync.errors import ConfigurationError
from weightsync.server import mounts


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delitem(sys.modules, "weightsync.rollouts", raising=False)
    with pytest.warns(DeprecationWarning, match="weightsync_rollouts"):
        return importlib.import_module("weightsync.rollouts")


@pytest.mark.parametrize("name", weightsync_callbacks.__all__)
def test_an_old_name_warns_and_is_the_new_one(rollouts: ModuleType, name: str) -> None:
    with pytest.warns(DeprecationWarning, match="weightsync_callbacks"):
        assert getattr(rollouts, name) is getattr(weightsync_callbacks, name)


def test_a_name_that_never_was_is_an_attribute_error(rollouts: ModuleType) -> None:
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = rollouts.Nonsense


def test_the_routes_come_by_an_entry_point() -> None:
    [mount] = mounts.load_mounts(ServerSettings(mounts=("rollouts",)))
    assert any(operation.path == "/v1/rollouts/orders" for operation in mount.operations)
    mount.close()


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "entry_points", lambda group: ())
    with pytest.raises(ConfigurationError, match=r"pip install \./callbacks"):
        mounts.load_mounts(ServerSettings(mounts=("rollouts",)))
