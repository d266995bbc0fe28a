"""Which releases of vLLM this adapter was written for and tried with."""

from __future__ import annotations

from weightsync.errors import ConfigurationError

__all__ = ["SUPPORTED", "WITH_LABELS", "check_release", "has_labels", "installed_release", "is_supported"]

SUPPORTED = ((0, 25), (0, 32))
"""Major and minor numbers. vLLM's interface for weight transfer has changed between minor releases."""

WITH_LABELS = ((0, 32),)
"""Those that name their weights (``/update_weight_version``), and whose server says whether it could drop its prefix cache."""


def installed_release() -> str:
    """The release of the vLLM that this process would import. By its own word: the CPU wheel's metadata has another name."""
    from vllm import __version__

    return str(__version__)


def is_supported(release: str) -> bool:
    """Whether ``release`` is one of :data:`SUPPORTED`."""
    return _minor(release) in SUPPORTED


def has_labels(release: str) -> bool:
    """Whether ``release`` is one of :data:`WITH_LABELS`."""
    return _minor(release) in WITH_LABELS


def _minor(release: str) -> tuple[int, ...] | None:
    numbers = release.split(".")[:2]
    return tuple(map(int, numbers)) if all(part.isdigit() for part in numbers) else None


def check_release(release: str) -> None:
    """Raise :class:`~weightsync.errors.ConfigurationError` that names the supported releases unless this is one of them."""
    if not is_supported(release):
        known = ", ".join(f"{major}.{minor}.*" for major, minor in SUPPORTED)
        raise ConfigurationError(
            f"this weightsync supports vLLM {known}, and this is vLLM {release}: install a supported one, or another weightsync"
        )
