"""The distributions of this repository beside the main one, and how to install them."""

from __future__ import annotations

_FOLDERS = {
    "weightsync_bench": "./bench",
    "weightsync_callbacks": "./callbacks ./disaggregated-updates",  # which it needs
    "weightsync_disaggregated": "./disaggregated-updates",
    "weightsync_nixl": "./transport-nixl",
    "weightsync_ray": "./ray-manager",
    "weightsync_relay": "./relay",
    "weightsync_rollouts": "./rollouts",
    "weightsync_testing": "./testing",
}


def how_to_install(package: str) -> str:
    """Return what to do to get the import package ``package``."""
    return f"pip install {_FOLDERS[package]} in a clone of weightsync"
