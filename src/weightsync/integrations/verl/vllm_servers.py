"""vLLM servers of verl, Ray actors, whose workers take the weights in a call of the server."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import ray
import torch

from weightsync import __version__
from weightsync.closing import OnFailure
from weightsync.config import ClientSettings, variable
from weightsync.errors import ConfigurationError
from weightsync.integrations.engine_calls import EngineCalls, plugin_release
from weightsync.integrations.stream_options import Options
from weightsync.integrations.stream_ranks import Meeting, served_checkpoint, token_file
from weightsync.integrations.updates import GRACE

_log = logging.getLogger(__name__)
_DISMISSAL = 10.0  # seconds for a replica that verl left out to leave the coordinator
_REASON = 400
_LONG = 12  # lines of an error that is a traceback
_here: weakref.ref[ServedReplica] | None = None


def here() -> ServedReplica | None:
    """The replica of this process's adapter: verl makes one in each process."""
    return None if _here is None else _here()


def dismiss(names: list[str]) -> None:
    """Let the workers of servers leave the coordinator: no call would let the next round in. Ray's names of the actors."""
    for name in names:
        try:
            _call(ray.get_actor(name), "weightsync_leave", {}, _DISMISSAL)
        except Exception as error:  # noqa: BLE001 - verl may have ended it, in any way
            _log.info("%s, which verl leaves out, did not leave the coordinator: %s", name, _short(error))


def _call(server: Any, method: str, arguments: dict[str, Any], seconds: float) -> None:  # noqa: ANN401 - a Ray actor
    server.collective_rpc.remote(method, kwargs=arguments).future().result(seconds)


def _short(error: BaseException) -> str:
    """The error at the root of one that Ray passed on, on one line."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [""]
    return f"{type(cause).__name__}: {lines[-1] if len(lines) > _LONG else ' '.join(lines)}"[:_REASON]


class ServedReplica:
    """A replica of verl, as the process of one of its ranks sees it.

    Args:
        adapter: verl's adapter in this process.
    """

    def __init__(self, adapter: Any) -> None:  # noqa: ANN401 - verl's
        global _here
        _here = weakref.ref(self)
        self._adapter, self._config, self._model = adapter, adapter.config, adapter.model_config
        self.name = f"verl-{ray.get_runtime_context().get_job_id()}-{adapter.replica_rank}"
        self._is_ready = False
        self._checkpoint = ""
        self._joined = ""
        self.calls = EngineCalls(self._called)

    @property
    def leads(self) -> bool:
        """Whether this rank calls the server for its replica."""
        return bool(self._adapter._has_server)

    @property
    def server(self) -> Any:  # noqa: ANN401 - a Ray actor
        """The server, on the rank that leads."""
        self._adapter._ensure_server_handle()
        return self._adapter.server_handle

    def _called(self, method: str, arguments: dict[str, Any]) -> None:
        """Call a method of all workers. verl drops what they answer, but not what they raise."""
        seconds = float(arguments.get("timeout", 0.0)) or ClientSettings.load().timeouts.publish
        _call(self.server, method, arguments, seconds + 4 * GRACE)

    def why_not(self) -> str:
        """Why vLLM's workers cannot take the weights with this configuration; empty if they can."""
        config = self._config
        mtp = getattr(config, "mtp", None)
        ranks = config.tensor_model_parallel_size * config.pipeline_model_parallel_size
        reasons = {
            "LoRA adapters are not merged (actor_rollout_ref.model.lora.merge=True)": self._serves_adapter,
            f"the rollout is quantized ({config.quantization})": config.quantization,
            "prefill and decode are disaggregated": getattr(getattr(config, "disaggregation", None), "enabled", False),
            "the rollout has a draft model (mtp)": getattr(mtp, "enable", False) and getattr(mtp, "enable_rollout", False),
            "vLLM's data parallelism is untested": config.data_parallel_size > 1,
            "the replica spans several nodes": ranks > int(variable("RAY_LOCAL_WORLD_SIZE", str(ranks))),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    @property
    def _serves_adapter(self) -> bool:
        """Whether verl's requests name an adapter: its server has LoRA."""
        model = self._model
        return max(model.lora_rank, model.lora.get("rank", 0)) > 0 and not model.lora.get("merge", False)

    def about(self) -> dict[str, object]:
        """What the other ranks of an update must know. The leading rank asks its server, which may take seconds the first time."""
        if reason := self.why_not():
            # A server that loaded no checkpoint lacks the base, which verl sends to none that is separated from its actor.
            adapters = self._serves_adapter and "dummy" not in self._config.load_format
            return {"streams": reason, "adapters": adapters}
        about: dict[str, object] = {"replica": self.name}
        if not self.leads:
            return about
        try:
            if not self._is_ready:
                release = self.server.__ray_call__.remote(plugin_release).future().result(_DISMISSAL)
                if release != __version__:
                    raise ConfigurationError(f"its vLLM has weightsync {release}, and verl {__version__}")
                self.calls.ready(release=__version__)
                model = self._model
                dtype = getattr(torch, str(getattr(self._config, "dtype", "auto")), None)
                self._checkpoint = served_checkpoint(model.local_path, None, model.hf_config, dtype).fingerprint
                self._is_ready = True
        except Exception as error:  # noqa: BLE001 - Ray's, vLLM's and ours; all ranks then stream
            return {"streams": f"replica {self._adapter.replica_rank}: {_short(error)}"}
        server = f"{self._adapter._get_server_name_prefix()}server_{self._adapter.replica_rank}_{self._adapter.node_rank}"
        return {**about, "server": server, "checkpoint": self._checkpoint}

    def join(self, meeting: Meeting, options: Options, joined: Sequence[str]) -> None:
        """Let the workers join, or stay joined, if this rank leads: they may have been :func:`dismissed <dismiss>` meanwhile.

        Raises:
            Exception: What a worker raised, as vLLM and Ray pass it on.
        """
        if self.leads and (self._joined != meeting.coordinator or self.name not in joined):
            transports = None if options.transports is None else list(options.transports)
            self.calls.join(meeting.coordinator, self.name, token_file=token_file(), transports=transports)
            self._joined = meeting.coordinator

    def leave(self) -> None:
        """Let the workers leave the coordinator, if this rank leads and they have joined."""
        if self._joined:
            self._joined = ""
            self.calls.leave()

    def update(self, number: int, seconds: float) -> None:
        """Let the workers take a version. Raises what a worker raised."""
        with OnFailure(self.forget):
            self.calls.update(number, timeout=seconds)

    def forget(self) -> None:
        """Let the workers join again at the next update, if they have left: after an error."""
        self._joined = ""
