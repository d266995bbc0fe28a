"""Engines whose GPU memory other engines read in place, without a trainer: the parameters themselves are what is published.

With two GPUs or more the source has another device than the trainer and the late engines, with one the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from tests.gpu.engine_process import Model, fingerprint
from tests.gpu.processes import Joined, change, far, fingerprint_of

from weightsync import failpoints
from weightsync.config import ClientSettings, Secret, ServerSettings
from weightsync.coordinator.events import RoundEnded
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import DeadlineExceeded
from weightsync.protocol.messages import Delivery, ReplicaResult
from weightsync.server.client import Client
from weightsync.server.server import BackgroundServer
from weightsync_nixl.agent import nixl_problem

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default::DeprecationWarning")]
pytest.importorskip("triton", reason="needs Triton")

needs_nixl = pytest.mark.skipif(nixl_problem() is not None, reason=nixl_problem() or "")
over_each_transport = pytest.mark.parametrize("transport", ["cuda_ipc", pytest.param("nixl", marks=needs_nixl)])
in_each_way = pytest.mark.parametrize("delivery", ["auto", "streamed"])

Interrupt = Callable[[Callable[[], object]], None]


class Run(Joined):
    """Also knows what seeding led to."""

    @contextmanager
    def seeding(self) -> Iterator[Callable[[], ReplicaResult]]:
        """What is yielded waits for the end of the next round, and returns the result of its only replica."""
        settings = ClientSettings.load({}, coordinator=self.server.url, token=Secret(self.server.token))
        with Client(settings) as client, client.events() as events:

            def seeded() -> ReplicaResult:
                result = next(event.result for event in events if isinstance(event, RoundEnded))
                assert result is not None
                (replica,) = result.replicas
                return replica

            yield seeded


@pytest.fixture
def run() -> Iterator[Run]:
    with BackgroundServer(ServerSettings.load({}, port=0)) as server, ExitStack() as owned:
        yield Run(server, owned)


@pytest.fixture
def trained() -> Model:
    model = Model().to("cuda:0")
    change(model, 1)
    return model


@pytest.fixture
def while_read(monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    """Do something once, when an engine of this process has launched what it reads and before it says that it has ended."""

    def interrupt(act: Callable[[], object]) -> None:
        acts = [act]

        def gate(name: str) -> None:
            if name == "engine.group" and acts:
                acts.pop()()

        monkeypatch.setattr(failpoints, "_gate", gate)

    return interrupt


@over_each_transport
@in_each_way
def test_a_late_engine_reads_the_parameters_of_another_when_the_trainer_is_gone(
    run: Run, trained: Model, transport: str, delivery: str
) -> None:
    trainer = run.trainer(trained, transports=[transport])
    source = run.process("source", "", delivery, transport, serve=True)
    assert trainer.publish(3, timeout=30).ok
    trainer.close()
    expected = fingerprint(trained)
    change(trained, 2)
    with run.seeding() as ended:
        late = run.process("late", "", delivery, transport, device="cuda:0")
        seeded = ended()
    assert late.ask("wait 3") == "3"
    assert fingerprint_of(late) == fingerprint_of(source) == expected
    assert (seeded.name, seeded.source, seeded.transports, seeded.verified) == ("late", "source", (transport,), "installed")
    assert seeded.delivery == ("streamed" if delivery == "streamed" else "direct")


def test_a_source_serves_the_next_version_and_parameters_that_moved(run: Run, trained: Model) -> None:
    trainer = run.trainer(trained)
    model = Model().to(far())
    run.engine(ModuleAdapter(model), "source", serve_weights=True)
    for number in (1, 2):
        model.large.data = torch.zeros_like(model.large.data)
        change(trained, number)
        assert trainer.publish(number, timeout=30).ok
        late = run.process(f"late {number}", device="cuda:0")  # its trainer's memory may have changed since
        assert late.ask(f"wait {number}") == str(number)
        assert fingerprint_of(late) == fingerprint(model) == fingerprint(trained)


@over_each_transport
@in_each_way
def test_a_source_that_is_updated_while_it_is_read_is_noticed(
    run: Run, trained: Model, while_read: Interrupt, transport: str, delivery: Delivery
) -> None:
    trainer = run.trainer(trained, transports=[transport])
    source = run.process("source", "", delivery, transport, serve=True)
    assert trainer.publish(1, timeout=30).ok
    trainer.close()
    while_read(lambda: source.ask("take"))
    target = Model().to("cuda:0")
    with run.seeding() as ended:
        late = run.engine(ModuleAdapter(target), "late", transports=[transport], delivery=delivery)
        seeded = ended()
    assert (seeded.state, seeded.version) == ("dirty", None)
    assert "StaleSource" in (seeded.error or "")
    assert late.serving is None
    with pytest.raises(DeadlineExceeded):
        late.wait_for_version(1, 0.2)
    change(trained, 2)
    trainer = run.trainer(trained, transports=[transport])
    assert trainer.publish(2, timeout=30).ok
    assert fingerprint(target) == fingerprint_of(source) == fingerprint(trained)


@over_each_transport
def test_a_source_that_dies_while_it_is_read_is_replaced_by_another(
    run: Run, trained: Model, while_read: Interrupt, transport: str
) -> None:
    trainer = run.trainer(trained, transports=[transport])
    dying = run.process("a", "", "auto", transport, serve=True)
    run.process("b", "", "auto", transport, serve=True)
    assert trainer.publish(1, timeout=30).ok
    trainer.close()
    while_read(dying.close)
    target = Model().to("cuda:0")
    with run.seeding() as ended:
        late = run.engine(ModuleAdapter(target), "late", transports=[transport])
        seeded = ended()
    assert late.wait_for_version(1, 30).number == 1
    assert fingerprint(target) == fingerprint(trained)
    assert (seeded.name, seeded.source, seeded.error) == ("late", "b", None)
