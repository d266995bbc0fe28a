"""Checks of ``python -m weightsync.integrations nemo_rl``: what NeMo-RL's workers find in this environment."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from weightsync.config import ClientSettings, token_source, variable
from weightsync.errors import WeightSyncError
from weightsync.integrations.checks import find_called_vllm
from weightsync.integrations.nemo_rl.engine import INTERFACE, NAME, RefitEngine
from weightsync.server.findings import Finding, ask_coordinator, find_token_of_workers


def findings() -> Iterator[Finding]:
    """Yield one finding after the other, where NeMo-RL can be imported."""
    yield _engine()
    yield find_called_vllm("policy", "a vLLM of this environment gets whole tensors; policy workers need none")
    yield _token()
    if variable("WEIGHTSYNC_COORDINATOR"):
        yield ask_coordinator("coordinator", ClientSettings.load())


def _engine() -> Finding:
    """Make an engine as NeMo-RL does."""
    try:
        interface = import_module("nemo_rl.utils.checkpoint_engines.base")
        interface.create_checkpoint_engine(NAME, bucket_size_bytes=1 << 20, engine_kwargs={"release_after_refit": False})
    except (ImportError, AttributeError, TypeError, WeightSyncError) as error:
        return Finding("engine", "missing", f"{type(error).__name__}: {error}", f"{INTERFACE} makes none")
    return Finding("engine", "ok", f"{RefitEngine.__name__} has what NeMo-RL calls. Use it by refit_transport: {NAME}")


def _token() -> Finding:
    if token_source() == "WEIGHTSYNC_TOKEN":
        return Finding(
            "token", "limited", "from WEIGHTSYNC_TOKEN",
            "NeMo-RL's driver passes its environment to Ray, which stores it: set WEIGHTSYNC_TOKEN_FILE instead",
        )  # fmt: skip
    return find_token_of_workers("the rank that runs the coordinator", "where the driver starts")
