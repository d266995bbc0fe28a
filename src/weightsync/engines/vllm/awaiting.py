"""Wait for a coordinator that is not there yet, without a word to vLLM's workers, which cannot generate while they connect."""

from __future__ import annotations

import logging

import httpx

from weightsync.config import ClientSettings
from weightsync.errors import AuthenticationError, ConfigurationError, WeightSyncError
from weightsync.server.http_client import Backoff, check_status, coordinator_http

_log = logging.getLogger(__name__)


async def coordinator_answers() -> None:
    """Return when the coordinator that the environment names answers and accepts the token. Log once for each reason to wait.

    Raises:
        ConfigurationError: The environment's settings are invalid.
    """
    # A coordinator that is started late finds its servers within the longest pause.
    again, reason = Backoff(0.5, 15.0), ""
    while True:
        settings = ClientSettings.load()  # anew: on one machine, a coordinator leaves its token where it starts
        try:
            async with coordinator_http(settings) as http:
                answer = await http.get("/v1/status")
                check_status(answer, settings)
            return
        except ConfigurationError:
            raise
        except AuthenticationError:
            trouble = "the token is missing or wrong"
        except (httpx.HTTPError, WeightSyncError) as error:
            trouble = f"{type(error).__name__}: {error}"
        if trouble != reason:
            reason = trouble
            _log.warning(
                "weightsync: vLLM cannot join the coordinator at %s yet (%s). It serves without it, and keeps trying",
                settings.coordinator, trouble,
            )  # fmt: skip
        # Not a poll: this is a connection being made again, less and less often, while there is none.
        await again.rest()
