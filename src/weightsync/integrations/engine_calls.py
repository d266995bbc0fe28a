"""A framework's side of an update inside its own call: tells the workers of its engine "now" while the trainer publishes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from weightsync import __version__
from weightsync.config import variable
from weightsync.errors import ConfigurationError, DeadlineExceeded, VerificationError
from weightsync.model import Version
from weightsync.outcome import Outcome
from weightsync.protocol.messages import RoundResult
from weightsync.trainer.requests import FrameworkCall

Answers = Sequence[Mapping[str, Any] | None] | None
"""What the workers returned, one answer each; ``None`` from a framework that does not pass answers on."""

_SETTLE = 60.0  # seconds from the end of a publication to the end of the call


class EngineCalls:
    """Calls weightsync's methods of an engine's workers in the framework's own way. The engine needs only weightsync's plugin.

    ::

        calls = EngineCalls(lambda method, arguments: llm.collective_rpc(method, kwargs=arguments))
        calls.join(trainer_url, "rollout-0", token_file="/run/job/token")
        ...                                     # the framework pauses its engine, or lets it sleep and wakes its weights
        result = calls.publish(lambda: trainer.publish(step), step)
        ...                                     # it drops the caches, and resumes

    A trainer in other processes publishes there. Then call :meth:`update` here at the same time.

    Args:
        call: Calls a method of all workers of one engine with keyword arguments. Blocks until all have answered.
    """

    def __init__(self, call: Callable[[str, dict[str, Any]], Answers]) -> None:
        self._call = call

    def ready(self, **options: object) -> Answers:
        """Learn how weights are delivered, before a coordinator is known.

        Takes the options of :meth:`~weightsync.engines.vllm.in_call.CalledWorker.ready`.
        """
        return self._call("weightsync_ready", options)

    def join(self, coordinator: str, replica: str, **options: object) -> Answers:
        """Join a coordinator, each worker as a rank of ``replica``. Idempotent.

        Takes the options of :meth:`~weightsync.engines.vllm.in_call.CalledWorker.join`, and raises what a worker raises.
        """
        return self._call("weightsync_join", {"coordinator": coordinator, "replica": replica, **options})

    def update(self, number: int | None = None, epoch: int | None = None, timeout: float = 300.0, call: int = 0) -> Answers:
        """Let the update to version ``number`` in, and return at its end.

        See :meth:`~weightsync.engines.vllm.in_call.CalledWorker.update`.
        """
        return self._call("weightsync_update", {"number": number, "epoch": epoch, "timeout": timeout, "call": call})

    def leave(self) -> None:
        """Leave the coordinator. Idempotent."""
        self._call("weightsync_leave", {})

    def publish(
        self,
        publish: Callable[[], RoundResult],
        number: int | None = None,
        epoch: int | None = None,
        timeout: float = 300.0,
    ) -> RoundResult:
        """Call the engine on another thread, ``publish`` on this one, and return its result.

        If ``publish`` fails, the call ends, too. If the call fails before the update has come, ``publish`` fails because of it.
        This holds for a :class:`~weightsync.Trainer` in this process; with another one, they end at ``timeout``.

        Args:
            publish: Publishes the version, for instance ``lambda: trainer.publish(step)``.
            number: See :meth:`update`, as the next two.
            epoch: Epoch of the version.
            timeout: Seconds.

        Raises:
            VerificationError: A worker installed another version than ``publish`` returned.
            DeadlineExceeded: The call did not end after the publication.
            Exception: ``publish`` or the call raised it. A note on an error of ``publish`` says what the call raised.
        """
        answers: Outcome[Answers] = Outcome()
        call = FrameworkCall()

        def update() -> None:
            answers.run(self.update, number, epoch, timeout, call.number)
            if (error := answers.error) is not None:
                call.failed(f"the framework's call of its engine failed: {type(error).__name__}: {error}", timeout)

        threading.Thread(target=update, name="weightsync-now", daemon=True).start()
        try:
            with call.lent():
                result = publish()
        except Exception as error:
            if not answers.over.wait(_SETTLE / 6):
                error.add_note("the engine is still in its call, which waits for an update until its timeout")
            elif answers.error is not None:
                error.add_note(f"the engine's call raised {type(answers.error).__name__}: {answers.error}")
                if call.refused:
                    raise error from answers.error
            raise
        if not answers.over.wait(_SETTLE):
            raise DeadlineExceeded(
                f"version {result.version} was published, but the engine's call did not return within {_SETTLE:g} s: do not resume "
                "the engine"
            )
        check_answers(answers.result(), result.version)
        return result


def plugin_release(_process: object = None) -> str:
    """Return the release of weightsync whose plugin the vLLM of this process loads.

    Look before the first call of the engine: a vLLM of several workers that all lack the method stops reading at the first error,
    and takes the others for answers to its next call. Run it where vLLM runs, for instance by the ``__ray_call__`` of a Ray actor.

    Raises:
        ConfigurationError: vLLM loads none here.
    """
    if "weightsync" not in {entry.name for entry in entry_points(group="vllm.general_plugins")}:
        raise ConfigurationError("vLLM finds no plugin of weightsync: install weightsync in vLLM's environment")
    allowed = variable("VLLM_PLUGINS", "weightsync")
    if "weightsync" not in allowed.split(","):
        raise ConfigurationError(f"VLLM_PLUGINS={allowed} leaves weightsync out")
    return __version__


def check_answers(answers: Answers, version: Version) -> None:
    """Check that workers that answered have installed ``version``.

    Raises:
        VerificationError: One installed another version.
    """
    for answer in answers or ():
        if answer and (answer["epoch"], answer["number"], answer["digest"]) != (*version.order, version.digest):
            raise VerificationError(
                f"rank {answer['rank']} of replica {answer['replica']} installed {answer['version']} instead of {version}: do not "
                "resume the engine. Give the number and the epoch of the version to the engine's call"
            )
