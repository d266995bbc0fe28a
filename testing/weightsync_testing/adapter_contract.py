"""Contract tests that every engine adapter passes, including faults.

Inherit them to test an adapter of your own::

    # tests/test_my_adapter.py
    from weightsync_testing.adapter_contract import AdapterContract

    class TestMine(AdapterContract):
        def engine(self): ...                 # an engine with scrambled weights, and its adapter
        def installed(self, engine): ...      # checkpoint name -> tensor that the engine uses now
        def generates(self, engine): ...      # whether the engine takes a step
        def go_on(self, engine): ...          # only with pauses_twice: resume the engine without the adapter

Each test uses a real trainer, a real coordinator on loopback and the adapter, in this process. Needs pytest.
"""

# ruff: noqa: D102 (the name of a test describes it)
from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, get_args

import pytest
import torch

from weightsync.config import ServerSettings
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine import Engine
from weightsync.engine.engine_role import EngineRole
from weightsync.errors import ProtocolError, RoundFailed
from weightsync.model import Manifest, PauseMode, Version
from weightsync.protocol.messages import Body, Commit, Delivery, Move, Pause, Resume, RoundResult
from weightsync.server.server import BackgroundServer
from weightsync.tensors.shards import Shard
from weightsync.trainer.trainer import Trainer
from weightsync.transports.hostinfo import this_host

_SECONDS = 20.0


class _Faulty(EngineAdapter):
    """Wraps the adapter under test, and raises an error in the method named by ``fault``."""

    def __init__(self, inner: EngineAdapter) -> None:
        self.inner, self.fault, self.stopped = inner, "", False
        self.name, self.no_shards = inner.name, inner.no_shards
        self.loads_late, self.pauses_twice, self.repacks = inner.loads_late, inner.pauses_twice, inner.repacks
        self.sleeps, self.can_load, self.loads_some = inner.sleeps, inner.can_load, inner.loads_some

    def _maybe(self, where: str) -> None:
        if self.fault == where:
            raise RuntimeError(f"injected in {where}")

    def manifest(self) -> Manifest:
        return self.inner.manifest()

    def shards(self) -> Sequence[Shard] | None:
        return self.inner.shards()

    def device(self) -> torch.device | None:
        return self.inner.device()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        if not self.stopped or self.pauses_twice:  # a failed pause is repeated, but the adapter under test is paused once
            self.inner.pause(mode, timeout)
            self.stopped = True
        self._maybe("pause")

    def begin(self) -> None:
        self._maybe("begin")
        self.inner.begin()

    def wake_weights(self) -> None:
        self._maybe("wake_weights")
        self.inner.wake_weights()

    def keep(self, names: Collection[str]) -> None:
        self.inner.keep(names)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = list(tensors)
        self.inner.load(given[: len(given) // 2])
        self._maybe("load")
        self.inner.load(given[len(given) // 2 :])

    def finish(self, version: Version) -> None:
        self._maybe("finish")
        self.inner.finish(version)

    def wake_cache(self) -> None:
        self._maybe("wake_cache")
        self.inner.wake_cache()

    def flush(self) -> bool:
        return self.inner.flush() and self.fault != "flush"

    def resume(self) -> None:
        self._maybe("resume")
        self.inner.resume()
        self.stopped = False


class AdapterContract:
    """Suite of tests. Inherit it and define its methods. ``deliveries`` lists the deliveries that the adapter supports."""

    deliveries: ClassVar[tuple[Delivery, ...]] = ("direct", "streamed")

    def engine(self) -> tuple[Any, EngineAdapter]:
        """Return a new engine with scrambled weights that has never served, and its adapter."""
        raise NotImplementedError

    def installed(self, engine: Any) -> Mapping[str, torch.Tensor]:  # noqa: ANN401 (any engine)
        """Return the tensors that the engine uses now, by checkpoint names."""
        raise NotImplementedError

    def generates(self, engine: Any) -> bool:  # noqa: ANN401
        """Return whether the engine takes a generation step, after at most a fraction of a second."""
        raise NotImplementedError

    def go_on(self, engine: Any) -> None:  # noqa: ANN401
        """Resume the engine without the adapter, as an operator would. Called only if the adapter has ``pauses_twice``."""
        raise NotImplementedError

    def weights(self, adapter: EngineAdapter, seed: int) -> dict[str, torch.Tensor]:
        """Make random tensors for the adapter's manifest, different for each seed."""
        generator = torch.Generator().manual_seed(seed)
        return {
            spec.name: torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype)) for spec in adapter.manifest()
        }

    @pytest.fixture
    def server(self) -> Iterator[BackgroundServer]:
        with BackgroundServer(ServerSettings.load({}, port=0)) as running:
            yield running

    @pytest.fixture
    def owned(self) -> Iterator[ExitStack]:
        with ExitStack() as stack:
            yield stack

    def _same(self, engine: Any, weights: Mapping[str, torch.Tensor]) -> bool:  # noqa: ANN401
        installed = self.installed(engine)
        return all(torch.equal(installed[name].view(-1), tensor.view(-1)) for name, tensor in weights.items())

    def _join(
        self, server: BackgroundServer, owned: ExitStack, adapter: EngineAdapter, delivery: Delivery
    ) -> tuple[Trainer, dict[str, torch.Tensor]]:
        state = self.weights(adapter, 0)
        trainer = owned.enter_context(Trainer(state, server.url, token=server.token, transports=["inproc"]))
        join = Engine(
            adapter, "under-test", server.url, token=server.token, transports=["inproc"], delivery=delivery, bucket_bytes=4096
        )
        owned.enter_context(join)
        return trainer, state

    def _publish(self, trainer: Trainer, state: Mapping[str, torch.Tensor], adapter: EngineAdapter, number: int) -> RoundResult:
        for name, tensor in self.weights(adapter, number).items():
            state[name].copy_(tensor)
        return trainer.publish(number, timeout=_SECONDS)

    def test_the_manifest_is_stable_and_not_empty(self) -> None:
        _, adapter = self.engine()
        assert adapter.manifest().nbytes
        assert adapter.manifest().fingerprint == adapter.manifest().fingerprint

    @pytest.mark.parametrize("mode", get_args(PauseMode))
    def test_it_takes_no_step_while_it_is_paused(self, mode: PauseMode) -> None:
        engine, adapter = self.engine()
        adapter.pause(mode, _SECONDS)
        assert not self.generates(engine)

    @pytest.mark.parametrize("number", range(3))
    def test_changed_versions_arrive_bit_for_bit(self, server: BackgroundServer, owned: ExitStack, number: int) -> None:
        delivery = self.deliveries[number % len(self.deliveries)]
        engine, adapter = self.engine()
        trainer, state = self._join(server, owned, adapter, delivery)
        for version in (number + 1, number + 2, number + 9):
            result = self._publish(trainer, state, adapter, version)
            assert self._same(engine, state)
            assert result.replicas[0].version == version
            assert result.replicas[0].delivery == delivery
            assert self.generates(engine)

    @pytest.mark.parametrize("fault", ["pause", "begin", "wake_weights", "load", "finish", "wake_cache", "flush", "resume"])
    def test_after_a_fault_it_takes_no_step_until_a_later_round_succeeded(
        self, server: BackgroundServer, owned: ExitStack, fault: str
    ) -> None:
        if fault == "load" and "streamed" not in self.deliveries:
            pytest.skip("this adapter has no loader")
        engine, inner = self.engine()
        adapter = _Faulty(inner)
        trainer, state = self._join(server, owned, adapter, "streamed" if fault == "load" else self.deliveries[0])
        self._publish(trainer, state, adapter, 1)
        adapter.fault = fault
        with pytest.raises(RoundFailed, match="under-test"):
            self._publish(trainer, state, adapter, 2)
        assert not self.generates(engine)
        adapter.fault = ""  # from now on the coordinator may deliver version 2 itself
        self._publish(trainer, state, adapter, 3)
        assert self._same(engine, state)
        assert self.generates(engine)

    def test_it_is_not_resumed_or_labelled_without_verified_bytes(self) -> None:
        engine, adapter = self.engine()
        role = EngineRole(adapter, ["inproc"], this_host())
        forbidden: tuple[Body, ...] = (Move(1), Commit(Version("run", 1, "m", "d")), Resume())
        for body in forbidden[1:]:
            with pytest.raises(ProtocolError):
                role.handle(body, _SECONDS)
        role.handle(Pause("abort"), _SECONDS)
        for body in forbidden:
            with pytest.raises(ProtocolError):
                role.handle(body, _SECONDS)
        assert not self.generates(engine)
        role.close()

    def test_an_adapter_that_pauses_twice_stops_an_engine_resumed_without_it(
        self, server: BackgroundServer, owned: ExitStack
    ) -> None:
        engine, adapter = self.engine()
        if not adapter.pauses_twice:
            pytest.skip("this adapter does not support a pause during a pause")
        trainer, state = self._join(server, owned, adapter, self.deliveries[0])
        self._publish(trainer, state, adapter, 1)
        adapter.pause("abort", _SECONDS)
        adapter.pause("keep", _SECONDS)
        assert not self.generates(engine)
        self.go_on(engine)
        assert self.generates(engine)
        adapter.pause("keep", _SECONDS)
        assert not self.generates(engine)
        self._publish(trainer, state, adapter, 2)  # one resume is sufficient
        assert self._same(engine, state)
        assert self.generates(engine)

    def test_the_loader_refuses_what_it_does_not_know(self) -> None:
        if "streamed" not in self.deliveries:
            pytest.skip("this adapter has no loader")
        _, adapter = self.engine()
        adapter.pause("abort", _SECONDS)
        with pytest.raises(Exception, match="no such tensor"):
            adapter.load([("no such tensor", torch.zeros(3))])
