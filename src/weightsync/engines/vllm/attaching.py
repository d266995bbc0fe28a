"""Joining a running vLLM to a coordinator: a ``vllm.LLM``, an ``AsyncLLM``, or an HTTP server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, TypedDict, TypeVar, Unpack

from weightsync.closing import Closeable
from weightsync.config import ClientSettings
from weightsync.engines.staged_adapter import UNLABELLED
from weightsync.engines.vllm.controls import INSTALL, HttpControls
from weightsync.engines.vllm.local_controls import ControlsServer
from weightsync.engines.vllm.served_loras import ServedLoras, served_loras
from weightsync.errors import Aborted, ConfigurationError, DeadlineExceeded, as_load_error
from weightsync.model import PauseMode
from weightsync.protocol.messages import Delivery

_INIT = "init_weight_transfer_engine"
_LEAVE: dict[str, object] = {"init_info": {"control": "", "leave": True}}  # vLLM 0.25 has no call that shuts its engine down
_JOIN_SECONDS = 120.0  # seconds until every worker has joined
_LOADING = "vLLM could not load the staged weights"
T = TypeVar("T")


class OfflineLLM(Protocol):
    """``vllm.LLM``, reduced to the methods that weightsync calls."""

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker."""

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop cached keys and values. Returns whether all were dropped."""


class AsyncEngine(Protocol):
    """``vllm.v1.engine.async_llm.AsyncLLM``, reduced in the same way."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker."""

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Pause generation."""

    async def resume_generation(self) -> None:
        """Resume generation."""

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop cached keys and values. Returns whether all were dropped."""


class _Gate:
    """Exclusive access to a ``vllm.LLM``, or an ``LLMEngine`` held weakly: either its user generates, or a round updates it.

    Neither is thread-safe.
    """

    def __init__(self, llm: OfflineLLM) -> None:
        self._llm = llm
        self._lock = threading.RLock()
        """Entered itself, not as :attr:`_changed`: an exception of a signal handler in between would leave it held."""
        self._changed = threading.Condition(self._lock)
        self._calls = threading.Lock()
        self._user: object = None
        self._paused = False
        self.version: str | None = None

    @contextmanager
    def used(self, timeout: float, *, even_paused: bool = False) -> Iterator[str | None]:
        """Use the engine exclusively, and block rounds. ``even_paused`` permits use during a pause, to join and to leave."""
        me = object()
        try:  # around it all: a signal handler may raise right after the engine was taken
            with self._lock:
                if not self._changed.wait_for(lambda: self._user is None and (even_paused or not self._paused), timeout):
                    raise DeadlineExceeded(f"vLLM was paused for an update, or in use, for more than {timeout:g} s")
                self._user = me
            yield self.version
        finally:
            if self._user is me:
                self._user = None
            with self._lock:
                self._changed.notify_all()

    def _call(self, work: Callable[[], T], timeout: float) -> T:
        if not self._calls.acquire(timeout=timeout):
            raise DeadlineExceeded(f"an earlier call of vLLM was still running after {timeout:.3g} s")
        try:
            return work()
        except ReferenceError:
            raise Aborted("this vLLM engine was deleted") from None
        finally:
            self._calls.release()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        with self._lock:
            self._paused, self.version = True, None  # new users wait from now on
            if not self._changed.wait_for(lambda: self._user is None, timeout):
                raise DeadlineExceeded(f"vLLM was in use for more than {timeout:.3g} s: in_use() did not end")

    def install(self, timeout: float) -> None:
        with as_load_error(_LOADING):
            self._call(lambda: self._llm.collective_rpc(INSTALL, timeout), timeout)

    def flush(self, timeout: float) -> bool:
        return bool(self._call(lambda: self._llm.reset_prefix_cache(True, True), timeout))

    def label(self, version: str, timeout: float) -> None:
        def relabel() -> None:
            # It has another name in an LLMEngine, and vLLM 0.25 has no labels for weights.
            label = getattr(self._llm, "update_weight_version", None) or getattr(self._llm, "set_weight_version", None)
            if label is not None:
                label(version)

        self._call(relabel, timeout)
        self.version = None if version == UNLABELLED else version

    def resume(self, timeout: float) -> None:
        with self._lock:
            self._paused = False
            self._changed.notify_all()

    def add_lora(self, label: str, timeout: float) -> None:
        raise ConfigurationError("a vllm.LLM serves no LoRA adapters of weightsync: use an AsyncLLM, or vLLM's server")

    def drop_lora(self, label: str, timeout: float) -> None:
        return


class _AsyncOwner:
    """Controls of an ``AsyncLLM``, which run its methods on its event loop."""

    def __init__(self, engine: AsyncEngine, loop: asyncio.AbstractEventLoop, on_label: Callable[[str], None]) -> None:
        self._engine, self._loop, self._on_label = engine, loop, on_label

    def _run_on_loop(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result(timeout)
        except TimeoutError:
            running.cancel()
            raise DeadlineExceeded(f"vLLM did not answer within {timeout:.3g} s") from None

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self._run_on_loop(self._engine.pause_generation(mode=mode, clear_cache=False), timeout)

    def install(self, timeout: float) -> None:
        with as_load_error(_LOADING):
            self._run_on_loop(self._engine.collective_rpc(INSTALL), timeout)

    def flush(self, timeout: float) -> bool:
        return bool(self._run_on_loop(self._engine.reset_prefix_cache(True, True), timeout))

    def label(self, version: str, timeout: float) -> None:
        label = getattr(self._engine, "update_weight_version", None)  # vLLM 0.25 has no labels for weights
        if label is not None:
            self._run_on_loop(label(version), timeout)
        self._on_label(version)

    def resume(self, timeout: float) -> None:
        self._run_on_loop(self._engine.resume_generation(), timeout)

    def add_lora(self, label: str, timeout: float) -> None:
        self._run_on_loop(self._loras().add(label), timeout)

    def drop_lora(self, label: str, timeout: float) -> None:
        self._run_on_loop(self._loras().drop(label), timeout)

    def _loras(self) -> ServedLoras:
        loras = served_loras(self._engine)
        if loras is None:
            raise ConfigurationError("this vLLM was started without --enable-lora")
        return loras


class Attached(Closeable):
    """A ``vllm.LLM`` that joined a coordinator. Close it before the LLM, or use it in a ``with``.

    ``vllm.LLM`` is not thread-safe, so generate ``with attached.in_use() as version:``. A round waits until that context ends,
    and the context cannot be entered during a round. All pause modes have the same effect.
    """

    def __init__(self, gate: _Gate, owned: ExitStack) -> None:
        self._gate, self._owned = gate, owned

    def in_use(self, timeout: float = 300.0) -> AbstractContextManager[str | None]:
        """Block rounds inside the context, which yields the label of vLLM's version (``run@number``; ``None`` before the first).

        Raises:
            DeadlineExceeded: An update or another use lasted longer than ``timeout`` seconds.
        """
        return self._gate.used(timeout)

    def close(self) -> None:
        """Leave the coordinator. vLLM keeps its weights. Idempotent."""
        self._owned.close()


class AttachKeywords(TypedDict, total=False):
    """Options of :func:`attach`, :func:`attach_async` and :func:`attach_server`, as for :class:`weightsync.Engine`."""

    token: str | None
    """Token of the coordinator."""
    run: str
    bucket_bytes: int
    transports: Sequence[str] | None
    delivery: Delivery | None
    draft_prefix: str | None
    """Prefix of the draft model's tensor names; by default ``WEIGHTSYNC_DRAFT_PREFIX``."""


def _init_info(control: str, replica: str | None, coordinator: str | None, options: AttachKeywords) -> dict[str, object]:
    unknown = sorted(options.keys() - AttachKeywords.__annotations__.keys())
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; options: {', '.join(AttachKeywords.__annotations__)}")
    return {"control": control, "replica": replica, "coordinator": coordinator, **options}


def _with_own_token(coordinator: str | None, options: AttachKeywords) -> AttachKeywords:
    """Add the token of this process's environment for its workers, which is used only for the coordinator that it names."""
    if options.get("token") is not None or coordinator is None:
        return options
    token = ClientSettings.load(coordinator=coordinator).token
    return options if token is None else {**options, "token": token.reveal()}


def attach(
    llm: OfflineLLM,
    replica: str | None = None,
    coordinator: str | None = None,
    **options: Unpack[AttachKeywords],
) -> Attached:
    """Join a ``vllm.LLM`` made with ``weight_transfer_config=WeightTransferConfig(backend="weightsync")``.

    Every worker becomes a rank of the replica.

    Args:
        llm: The LLM.
        replica: Name of the replica; by default ``WEIGHTSYNC_REPLICA``.
        coordinator: URL of the coordinator; by default ``WEIGHTSYNC_COORDINATOR``.
        options: See :class:`AttachKeywords`.

    Returns:
        The attached LLM.

    Raises:
        Exception: A worker raised it while joining.
    """
    gate = _Gate(llm)
    with ExitStack() as owned:
        server = owned.enter_context(ControlsServer(gate))
        info = _init_info(server.address, replica, coordinator, _with_own_token(coordinator, options))

        def leave() -> None:
            with gate.used(_JOIN_SECONDS, even_paused=True):
                llm.collective_rpc(_INIT, kwargs=_LEAVE)

        owned.callback(leave)
        with gate.used(_JOIN_SECONDS, even_paused=True):
            llm.collective_rpc(_INIT, timeout=_JOIN_SECONDS, kwargs={"init_info": info})
        return Attached(gate, owned.pop_all())


def _engines(engine: Any) -> int:  # noqa: ANN401 - vLLM's AsyncLLM
    """Return the number of data-parallel engines that ``engine`` controls. With other load balancers it controls some of them."""
    parallel = getattr(getattr(engine, "vllm_config", None), "parallel_config", None)
    shared = any(getattr(parallel, f"data_parallel_{kind}_lb", False) for kind in ("external", "hybrid"))
    return 1 if shared else int(getattr(parallel, "data_parallel_size", 1))


async def attach_async(
    engine: AsyncEngine,
    replica: str | None = None,
    coordinator: str | None = None,
    *,
    on_label: Callable[[str], None] = lambda label: None,
    **options: Unpack[AttachKeywords],
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Join an ``AsyncLLM`` from its event loop.

    All pause modes are supported. Suspended requests (``keep``) continue with the new weights, and their keys and values are
    recomputed. ``on_label`` is called with every new label of the weights, on another thread, while the engine is paused. The other
    arguments are those of :func:`attach`.

    Returns:
        A coroutine function that leaves the coordinator.

    Raises:
        Exception: A worker raised it while joining.
    """
    server = ControlsServer(_AsyncOwner(engine, asyncio.get_running_loop(), on_label))

    async def leave() -> None:
        try:
            await engine.collective_rpc(_INIT, kwargs=_LEAVE)
        finally:
            await asyncio.to_thread(server.close)

    try:
        info = _init_info(server.address, replica, coordinator, _with_own_token(coordinator, options))
        info["engines"] = _engines(engine)
        await engine.collective_rpc(_INIT, timeout=_JOIN_SECONDS, kwargs={"init_info": info})
    except BaseException:
        await asyncio.to_thread(server.close)
        raise
    return leave


def attach_server(
    url: str,
    replica: str | None = None,
    coordinator: str | None = None,
    *,
    timeout: float = _JOIN_SECONDS,
    **options: Unpack[AttachKeywords],
) -> None:
    """Join the vLLM server at ``url``, started with ``VLLM_SERVER_DEV_MODE=1`` and the flag of this package's docstring.

    Any client of vLLM's routes can name a coordinator. So the token in the server's environment is used only for the coordinator
    that its ``WEIGHTSYNC_COORDINATOR`` names. For another coordinator give ``token``, which is then sent to ``url``. A
    coordinator of the same user on the same machine needs neither. Leave by posting to ``/shutdown_weight_transfer_engine``, or
    by ending the server. Rank 0 of the server also uses ``url``, so it must be valid on that machine. ``timeout`` is in seconds.
    The other arguments are those of :func:`attach`.

    Raises:
        PeerLost: The server does not answer.
        DeadlineExceeded: ``timeout`` passed.
        WeightSyncError: The server returned an error, which the message quotes.
    """
    info = _init_info(url, replica, coordinator, options)
    HttpControls(url).join(info, timeout)
