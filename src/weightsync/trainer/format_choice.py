"""What a trainer quantizes: what its ``quantize`` says, or what the engines hold in low precision."""

from __future__ import annotations

from functools import partial

from weightsync.config import ClientSettings
from weightsync.server.client import Client
from weightsync.tensors.quantization import ChooseFormats
from weightsync.tensors.served_formats import Quantize, choose_formats, formats_as_served

AS_SERVED = "as-served"


def format_choice(quantize: Quantize, settings: ClientSettings) -> ChooseFormats:
    """Return how ``quantize`` chooses formats. For ``"as-served"`` this waits for the first replica, and all ranks get its tensors.

    Raises:
        ConfigurationError: See :func:`.served_formats.choose_formats`.
        ManifestMismatch: Replicas hold different tensors. The message names two.
        DeadlineExceeded: No replica joined within ``settings.timeouts.replicas`` seconds.
        CoordinatorUnreachable: No coordinator runs there.
    """
    if quantize != AS_SERVED:
        return choose_formats(quantize)
    with Client(settings) as client:
        served = client.served(settings.timeouts.replicas)
    return partial(formats_as_served, replica=served.replica, served=served.tensors)
