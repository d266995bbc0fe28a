"""Checks of ``python -m weightsync.integrations``: what a framework or an engine finds in this environment."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

import weightsync
from weightsync.config import ClientSettings, variable
from weightsync.errors import ConfigurationError, WeightSyncError
from weightsync.integrations.engine_calls import plugin_release
from weightsync.releases import IN_CALL, check_interface, release_of, releases_tested, was_tested
from weightsync.server.findings import Finding, ask_coordinator, find_release

_SGLANG = "sglang.srt.plugins"
_STARTS_COORDINATOR = ("nemo_rl", "verl")
"""The others join a coordinator that runs already."""
_INTERFACES = {
    "areal": ("engine", "FSDPEngine has what weightsync replaces and calls", "weightsync.integrations.areal.actor"),
    "openrlhf": ("policy", "its policy actors have what weightsync replaces", "weightsync.integrations.openrlhf.policy"),
    "sglang": ("interface", "SGLang has what weightsync hooks and calls", "weightsync.engines.sglang.plugin"),
    "skyrl": ("trainer", "enable() takes its name in vLLM's factory of trainer engines", "weightsync.integrations.skyrl"),
    "trl": ("server mode", "enable() finds what it substitutes", "weightsync.integrations.trl.server_mode"),
}
"""Name of the finding, what it says if all is there, and our module that the trainer or the engine imports."""


def _interface(package: str) -> Finding:
    """Import what the trainer or the engine would, in the same way, and look for what is replaced or called."""
    name, fits, module = _INTERFACES[package]
    try:
        import_module(module)
        check_interface(package)
    except (ImportError, WeightSyncError) as error:
        cost = "SGLang serves without updates" if package == "sglang" else "enable() raises this too"
        return Finding(name, "missing", f"{type(error).__name__}: {error}", cost)
    return Finding(name, "ok", fits)


def _sglang() -> Iterator[Finding]:
    if variable("WEIGHTSYNC_COORDINATOR"):
        yield Finding("environment", "ok", "WEIGHTSYNC_COORDINATOR is set")
    else:
        yield Finding("environment", "missing", "WEIGHTSYNC_COORDINATOR is not set", "SGLang does not join")
    yield _plugin()


def _plugin() -> Finding:
    if "weightsync" not in {entry.name for entry in entry_points(group=_SGLANG)}:
        return Finding("plugin", "missing", f"no entry point weightsync in the group {_SGLANG}", "install weightsync again")
    allowed = variable("SGLANG_PLUGINS")
    if allowed and "weightsync" not in {name.strip() for name in allowed.split(",")}:
        return Finding("plugin", "missing", f"SGLANG_PLUGINS is {allowed}", "SGLang does not load it: add weightsync")
    return Finding("plugin", "ok", f"in the group {_SGLANG}")


def find_called_vllm(trainers: str, otherwise: str) -> Finding:
    """Whether vLLM's workers in this environment can read the shards of ``trainers``, and what happens if they cannot."""
    release = release_of("vllm")
    try:
        if release is None:
            raise ConfigurationError("not installed in this environment")
        plugin_release()
        check_interface("vllm", IN_CALL)
    except ConfigurationError as error:
        return Finding("vLLM", "limited", str(error), otherwise)
    tested = "" if was_tested("vllm", release) else f" (tested: {releases_tested('vllm')})"
    return Finding("vLLM", "ok", f"{release}{tested}: its workers read the {trainers}'s shards, where the model allows it")


CHECKS = tuple(sorted((*_INTERFACES, *_STARTS_COORDINATOR)))
"""Names of the packages that can be checked."""


def _checks(package: str) -> Iterator[Finding]:
    """Checks that are made where ``package`` is installed."""
    if package in _STARTS_COORDINATOR:
        yield from import_module(f"weightsync.integrations.{package}.check").findings()
        return
    if package == "sglang":
        yield from _sglang()
    yield _interface(package)


def findings(package: str) -> Iterator[Finding]:
    """Yield one finding after the other. ``missing`` and ``unknown`` mean that it cannot work."""
    yield Finding("weightsync", "ok", weightsync.__version__)
    if package not in _STARTS_COORDINATOR:
        yield ask_coordinator("coordinator", ClientSettings.load())
    release = find_release(package)
    if release.status == "missing" and find_spec(package) is not None:  # a source tree on the path
        import_module(package)
        release = find_release(package)
    yield release
    if release.status != "missing":
        yield from _checks(package)
