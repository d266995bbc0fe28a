"""The vLLM server that TRL samples from: TRL knows it by a URL, and weightsync by a replica's name. Nothing else links the two."""

from __future__ import annotations

from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import ConfigurationError, WeightSyncError
from weightsync.external.clients.http import EngineHttp, HttpCall
from weightsync.model import Version

_SECONDS = 30.0
_START = """VLLM_SERVER_DEV_MODE=1 vllm serve ... --weight-transfer-config '{"backend": "weightsync"}'"""
_NO_ROUTE = f"weightsync asks there whether TRL samples from updated weights. Restart it with its development routes: {_START}"


class RolloutServer:
    """Asks the server at ``url``, by vLLM's development routes, whether it is a replica and which version it serves."""

    def __init__(self, url: str) -> None:
        self._http = EngineHttp(url, missing_route=_NO_ROUTE)
        self._url = self._http.url

    def check_backend(self) -> None:
        """Check that the server was started with weightsync's backend. Without it, no wait for the replica would end.

        Raises:
            ConfigurationError: It was not, it does not answer, or it has no development routes.
        """
        transfer = self.config().get("weight_transfer_config") or {}
        backend = transfer.get("backend") if isinstance(transfer, dict) else transfer
        if backend != "weightsync":
            raise ConfigurationError(
                f"the vLLM server at {self._url} has the weight-transfer backend {backend or 'none'}, so it never joins "
                f"weightsync's coordinator. Restart it: WEIGHTSYNC_COORDINATOR=... {_START}"
            )

    def config(self) -> dict[str, Any]:
        """The configuration of vLLM as JSON. Raises as :meth:`check_label`."""
        return self._get("/server_info?config_format=json").get("vllm_config") or {}

    def labels(self) -> list[str]:
        """Names of models and adapters for requests. Raises as :meth:`check_label`."""
        return [str(model.get("id")) for model in self._get("/v1/models").get("data", ())]

    def check_label(self, version: Version, *, adapter: bool = False) -> None:
        """Check that the server serves ``version`` of the weights or an adapter, which was just brought to the replicas.

        Raises:
            ConfigurationError: It serves something else, so TRL would sample from a policy that no update reaches; or it does not
                answer, has no development routes, or is a vLLM before 0.27, which has no labels.
        """
        labels = self.labels() if adapter else [str(self._get("/weight_info").get("weight_version"))]
        if str(version) not in labels:
            raise ConfigurationError(
                f"TRL samples from the vLLM server at {self._url}, which serves {', '.join(map(repr, labels))}; this update "
                f"brought {version} to other replicas. Give TRL the URL of the server that joined this coordinator "
                "(vllm_server_base_url), or start the server at this URL with WEIGHTSYNC_COORDINATOR. `weightsync status` lists "
                "the replicas"
            )

    def _get(self, path: str) -> dict[str, Any]:
        try:
            body = self._http.call(HttpCall("GET", path), Deadline(_SECONDS))
        except WeightSyncError as error:
            if path == "/weight_info" and _NO_ROUTE in str(error):  # the development routes were there for check_backend()
                raise ConfigurationError(
                    f"the vLLM server at {self._url} is release {self._get('/version').get('version')} and has no route {path}, "
                    f"where weightsync asks whether TRL samples from updated weights. Use vLLM 0.27 or newer: {_START}"
                ) from error
            raise ConfigurationError(f"the vLLM server at {self._url} does not answer: {error}") from error
        return body if isinstance(body, dict) else {}
