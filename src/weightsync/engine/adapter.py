"""What weightsync asks of a rollout engine: small methods, of which most engines need four."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from weightsync.engine.lora_memory import LoraMemory
from weightsync.model import Manifest, PauseMode, Version
from weightsync.model.lora import AdapterSpec, LoraSlots
from weightsync.tensors.shards import Shard


class EngineLoras(Protocol):
    """Versions of LoRA adapters at one rank of an engine. Methods are those of :class:`EngineAdapter`."""

    slots: LoraSlots

    def check(self, spec: AdapterSpec, manifest: Manifest) -> None:
        """See :meth:`EngineAdapter.check_lora`."""

    def stage(self, label: str, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor] | str:
        """See :meth:`EngineAdapter.stage_lora`."""

    def register(self, version: Version) -> None:
        """See :meth:`EngineAdapter.register_lora`."""

    def drop(self, label: str) -> None:
        """See :meth:`EngineAdapter.drop_lora`."""

    def labels(self) -> Collection[str]:
        """See :meth:`EngineAdapter.loras`."""


class EngineAdapter:
    """One engine rank, as weightsync sees it. Derive from it; the defaults suit an engine that has nothing to do there.

    Calls come one at a time from weightsync's own thread, in the order of the round: ``pause``, ``begin``, ``wake_weights``, then
    ``load`` (streamed delivery) or writes into the memory of ``shards`` (direct delivery), ``finish``, ``wake_cache``, ``flush``,
    ``resume``. After an exception the engine stays paused, out of service, and a later round goes on with ``begin``. The
    library remembers that the engine is paused: ``pause`` comes again only after ``resume``, or after one of the two raised, or
    if the adapter says ``pauses_twice``.
    """

    name = "custom"
    """For people: shown in status and results."""

    no_shards = ""
    """Why ``shards`` answers ``None``, where that is worth telling: results say it."""

    no_source = ""
    """Why other replicas must not read the memory of ``shards`` while this engine serves; empty: they may, unless it ``sleeps``."""

    repacks = False
    """Whether ``finish`` changes what was written to the memory of ``shards``, because the engine computes with another layout.

    Digests are taken before that, so results say ``received``. The memory is not compared with them later, takes no changes, and
    other replicas do not read it.
    """

    moves = False
    """Whether the engine exchanges parameters with other ranks while it serves (experts, to balance their load).

    Then ``shards`` may return other boxes than before, in each round, after :meth:`hold_parameters`.
    """

    loads_late = False
    """Whether ``load`` only keeps tensors, and parameters change in ``finish``: then they are not read back before that."""

    pauses_twice = False
    """``pause()`` may be called again while paused, and then makes sure that nothing runs.

    Say so where somebody else may resume the engine by its own means: then ``pause`` is called before every update, with mode
    ``keep`` if it was paused. A class that defines ``pause`` must state it again; it is not inherited from the class whose
    ``pause`` it replaces.
    """

    owner_pauses = False
    """Whether the engine's owner (a framework) pauses and resumes it, and lets updates in by a call, for which ``pause`` waits.

    A quarantine then does not call ``pause``: ``aborted`` ends the owner's call with an error, and the owner keeps the engine
    paused. Set ``pauses_twice`` too, so that each update waits for a call.
    """

    sleeps = False
    """Whether ``wake_weights`` gives parameters memory that may be elsewhere: where they are is looked at after it.

    A class that defines ``wake_weights`` sleeps, unless it says otherwise. An adapter that wraps another one takes its word, for
    this and for the other flags: ``self.sleeps = inner.sleeps``.
    """

    follows = False
    """``shards()`` returns the same list again if, and only if, nothing has moved: then a round need not look at its memory again.

    Worth stating for ten thousands of shards. A class that defines ``shards`` must state it again.
    """

    can_load = False
    """Whether there is a ``load``, and so streamed delivery. A class that defines ``load`` can, unless it says otherwise."""

    loads_some = False
    """Whether ``load`` may get only the tensors that changed since the version that this engine serves: see :meth:`keep`.

    All others must still be what the last update brought, also where ``finish`` derives something from them. A class that defines
    ``load`` or ``wake_weights`` must state it again.
    """

    replica_ranks = 1
    """The ranks of the replica that this adapter is one of. :class:`~weightsync.Engine` sets it."""

    takes_any = False
    """Whether this is no model but takes whatever tensors a stream brings: then ``manifest`` is empty."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.pauses_twice = _declared(cls, "pauses_twice", "pause", default=False)
        cls.sleeps = _declared(cls, "sleeps", "wake_weights", default=True)
        cls.follows = _declared(cls, "follows", "shards", default=False)
        cls.can_load = _declared(cls, "can_load", "load", default=True)
        cls.loads_some = _declared(cls, "loads_some", "load", "wake_weights", default=False)

    def manifest(self) -> Manifest:
        """The checkpoint tensors that this engine takes. Required."""
        raise NotImplementedError(f"{type(self).__name__} must say which checkpoint tensors it takes: define manifest()")

    def shards(self) -> Sequence[Shard] | None:
        """Where this rank's parameters live, if they are plain copies of checkpoint elements; ``None``: stream to ``load``.

        Called at any time, also while the engine generates: look, and change nothing. Called again in the pause, before the first
        byte is written, because parameters may have moved while the pause waited for a generation step. Their bytes are updates'
        alone to change: they are read again while the engine serves, and a difference takes the replica out of service.
        """
        return None

    @property
    def outdated(self) -> bool:
        """Whether ``shards`` returns memory that parameters have left, because the engine must not be looked at while it computes.

        It is asked right after ``shards`` while the engine serves. Then its parameters are not read again until later. It is asked
        once more if they were read and differ.
        """
        return False

    def device(self) -> torch.device | None:
        """The CUDA device in whose memory ``load`` is lent its buckets, if trainers on this host can be read from there.

        ``None``: the device of ``shards``, and host memory where there are none.
        """
        return None

    def announced(self, order: tuple[int, int] | None) -> None:
        """The next ``pause`` is for the version of this epoch and number; ``None`` if that is not known. Must not block."""

    def hold_parameters(self, seconds: float) -> None:
        """A round begins, while the engine serves: exchange no parameters until ``resume``, or until ``seconds`` have passed.

        Only called if it ``moves``. If it exchanged some after that time, ``shards`` says so in the pause, and the round fails.
        """

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Return within ``timeout`` seconds with no generation step running, and none starting until ``resume``.

        If it raises, it is called again; else only as ``pauses_twice`` says. A call that does not return keeps
        this rank out of rounds until it does; errors name it.
        """

    def begin(self) -> None:
        """Paused, and a round is about to bring weights: drop what an earlier failed round left."""

    def wake_weights(self) -> None:
        """Paused, and about to be written: an engine that gave its weights' memory away (colocated) takes it again now.

        ``shards`` may be elsewhere afterwards, but has the same layout.
        """

    def wake_cache(self) -> None:
        """The weights are verified: an engine that gave the memory of its KV cache away takes it again now, before ``flush``."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load whole tensors under the names of ``manifest``, not aliases. Called once a bucket; a tensor is lent until it returns.

        Tensors on a CUDA device may be read by the device's current stream, also after this returned; work that is queued on other
        streams must have been waited for. Needed for streamed delivery only.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loader: define load(), or shards() for direct delivery")

    def keep(self, names: Collection[str]) -> None:
        """The tensors of these ``names`` do not come in this update, because they are those of the version before.

        Called between ``wake_weights`` and the first ``load``, if ``loads_some``, and only in an update of the engine that served
        that version, which has brought it. There may be no ``load`` at all.
        """

    def finish(self, version: Version) -> None:
        """All bytes are in place and verified: rebuild what was derived from weights, and label the engine with ``version``."""

    def flush(self) -> bool:
        """Drop caches made with the old weights (KV, prefix). ``False`` fails the round for this replica."""
        return True

    def resume(self) -> None:
        """Generate again, with the new weights."""

    # LoRA adapters. These are called on another thread, one at a time, also while a round runs and while the engine generates.

    lora_versions: EngineLoras | None = None
    """Versions of LoRA adapters, if the engine takes any: the following methods ask it."""

    def lora_slots(self) -> LoraSlots | None:
        """How many versions of LoRA adapters this engine holds at most, and their largest rank; ``None`` if it takes none."""
        return None if self.lora_versions is None else self.lora_versions.slots

    def check_lora(self, spec: AdapterSpec, manifest: Manifest) -> None:
        """Raise unless this engine can serve an adapter with these tensors: it has every module, with these extents.

        Called before anything is read or allocated. Nothing is known of the tensors yet.
        """
        if self.lora_versions is not None:
            self.lora_versions.check(spec, manifest)

    def lora_memory(self) -> LoraMemory | None:
        """Return memory for a version of the adapter that was checked last, which :meth:`stage_lora` gets, filled, and may keep.

        ``None`` if this engine makes copies in any case.
        """
        return None

    def stage_lora(
        self, label: str, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor] | str | None:
        """Take a copy of ``tensors`` as version ``label`` (``alice/math@3``), for no request yet.

        They are lent until this returns, unless :meth:`lora_memory` gave them.

        Returns the copies by the same names, if they are plain copies that requests will compute with: they are digested then. An
        empty string, if :meth:`register_lora` will read them back where requests compute with them, and raise if they differ from
        ``tensors``. Otherwise ``None``, or the reason on one line, and the result says ``received``.
        """
        return self._loras_here.stage(label, spec, tensors)

    def register_lora(self, version: Version) -> None:
        """Every rank holds what was staged, verified, as ``version``: ``version.run`` is the adapter's name.

        New requests may name it, and the name alone means the newest version that is registered.
        """
        self._loras_here.register(version)

    def drop_lora(self, label: str) -> None:
        """Let no new request use ``label``, staged or registered, and free it when the last that does has ended. Known or not."""
        if self.lora_versions is not None:
            self.lora_versions.drop(label)

    def loras(self) -> Collection[str]:
        """Labels of all versions whose memory is in use: staged, registered, or dropped and still used."""
        return () if self.lora_versions is None else self.lora_versions.labels()

    @property
    def _loras_here(self) -> EngineLoras:
        if self.lora_versions is None:
            raise NotImplementedError(f"{type(self).__name__} has neither lora_versions nor methods for LoRA adapters of its own")
        return self.lora_versions

    def call_ended(self, call: int, reason: str, refuse: bool) -> None:
        """The owner's call with this number is over, or ends now if no update is in it. With ``refuse`` no pause waits for it."""

    def aborted(self, reason: str) -> None:
        """An update that may be running was given up; ``reason`` is empty where only the connection was lost. Any thread.

        A ``load`` that waits for another process should raise soon. Must not block.
        """


def _declared(cls: type, flag: str, *methods: str, default: bool) -> bool:
    """What the class that defines ``flag`` or one of ``methods``, the nearest of them, says of ``flag``; else the ``default``."""
    declared = next(vars(base) for base in cls.__mro__ if {flag, *methods} & vars(base).keys())
    return bool(declared.get(flag, default))
