"""Whole rounds between Trainer and Engine objects whose parameters are on GPUs, over a real coordinator, in place and by copies.

With two GPUs or more the engine has another device than the trainer, with one the same.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from tests.gpu.engine_process import Model, fingerprint
from tests.gpu.processes import Joined, change, far, fingerprint_of
from tests.processes import ChildProcess

from weightsync import failpoints
from weightsync.config import ServerSettings
from weightsync.engine.fill.streamed import DeviceStreamed
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ConfigurationError, LayoutError, RoundFailed, TransportUnavailable
from weightsync.server.server import BackgroundServer
from weightsync.transports.cuda.driver import allocation_of
from weightsync.transports.host.region import EMPTY

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default::DeprecationWarning")]
pytest.importorskip("triton", reason="needs Triton")


@pytest.fixture
def joined() -> Iterator[Joined]:
    with BackgroundServer(ServerSettings.load({}, port=0)) as server, ExitStack() as owned:
        yield Joined(server, owned)


@pytest.fixture
def source() -> Model:
    model = Model().to("cuda:0")
    change(model, 0)
    return model


@pytest.fixture
def target() -> Model:
    return Model().to(far())


def test_reader_killed_in_the_middle_holds_up_neither_the_trainer_nor_the_others(
    joined: Joined, source: Model, target: Model
) -> None:
    trainer = joined.trainer(source)
    joined.engine(ModuleAdapter(target), "good")
    for number, stop in enumerate(("pause", "finish"), 1):
        victim = joined.process(f"victim-{stop}", stop)
        change(source, number)
        with ExitStack() as killing:

            def kill(victim: ChildProcess = victim, stop: str = stop) -> None:
                victim.expect(stop)
                victim.kill()

            killer = threading.Thread(target=kill)
            killer.start()
            killing.callback(killer.join, 20)
            result = trainer.publish(number, timeout=30)
        outcome = {replica.name: replica for replica in result.replicas}
        assert outcome["good"].version == number
        assert outcome[f"victim-{stop}"].version is None
        assert fingerprint(target) == fingerprint(source)
    change(source, 9)
    assert trainer.publish(9, timeout=30).ok
    assert fingerprint(target) == fingerprint(source)


def test_three_changed_versions_in_one_process(joined: Joined, source: Model, target: Model) -> None:
    trainer = joined.trainer(source)
    adapter = ModuleAdapter(target)
    engine = joined.engine(adapter)
    for number in (1, 2, 5):
        change(source, number)
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.fill_(7)  # what was right before must not help
        result = trainer.publish(number, timeout=30)
        (replica,) = result.replicas
        assert (replica.version, replica.delivery, replica.transports, replica.verified) == (
            number,
            "direct",
            ("cuda_ipc",),
            "installed",
        )
        assert replica.digest == result.version.digest
        assert fingerprint(target) == fingerprint(source)
        with adapter.in_use() as version:
            assert version == result.version == engine.serving


def test_three_changed_versions_in_two_processes(joined: Joined, source: Model) -> None:
    trainer = joined.trainer(source)
    other = joined.process("other")
    for number in (1, 2, 5):
        change(source, number)
        (replica,) = trainer.publish(number, timeout=30).replicas
        assert (replica.version, replica.transports, replica.verified) == (number, ("cuda_ipc",), "installed")
        assert fingerprint_of(other) == fingerprint(source)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_shards_that_were_given_other_memory_are_exported_anew(joined: Joined, source: Model, elsewhere: bool) -> None:
    trainer = joined.trainer(source)
    other = joined.process("other")
    assert trainer.publish(1, timeout=30).ok
    for number in (2, 3):
        with torch.no_grad():
            for parameter in (source.large, source.up.weight):
                old = parameter.data
                parameter.data = torch.randn_like(old)
                del old
        if elsewhere:
            torch.cuda.empty_cache()  # so that the old memory is really unmapped
        change(source, number)
        assert trainer.publish(number, timeout=30).ok
        assert fingerprint_of(other) == fingerprint(source)


def test_parameters_that_were_given_other_memory_are_written_where_they_are(joined: Joined, source: Model, target: Model) -> None:
    trainer = joined.trainer(source)
    joined.engine(ModuleAdapter(target))
    assert trainer.publish(1, timeout=30).ok
    target.large.data = torch.zeros_like(target.large.data)
    change(source, 2)
    assert trainer.publish(2, timeout=30).ok
    assert fingerprint(target) == fingerprint(source)


def test_parameters_that_move_while_a_round_waits_are_written_where_they_are(
    joined: Joined, source: Model, target: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, adapter, waits = joined.trainer(source), ModuleAdapter(target), threading.Event()
    joined.engine(adapter)
    change(source, 1)
    assert trainer.publish(1, timeout=30).ok
    change(source, 2)
    old = [parameter.data for parameter in (target.large, target.up.weight)]
    before = [value.cpu() for value in old]
    monkeypatch.setattr(failpoints, "_gate", lambda name: waits.set() if name == "engine.pause" else None)
    with ThreadPoolExecutor(1) as pool:
        with adapter.in_use():
            coming = pool.submit(trainer.publish, 2, timeout=30)
            assert waits.wait(30)
            for parameter in (target.large, target.up.weight):
                parameter.data = parameter.data.clone()
        assert coming.result(60).ok
    assert fingerprint(target) == fingerprint(source)
    torch.cuda.synchronize(target.large.device)
    for value, kept in zip(old, before, strict=True):
        assert torch.equal(value.cpu().view(torch.uint8), kept.view(torch.uint8)), (
            "the old memory is the program's: a cache, perhaps"
        )


def test_parameters_that_are_read_in_another_way_are_not_called_installed(joined: Joined, source: Model, target: Model) -> None:
    target.large = torch.nn.Parameter(torch.zeros(2048, 2048, dtype=torch.bfloat16, device=target.large.device))
    source.large = torch.nn.Parameter(torch.zeros(2048, 2048, dtype=torch.bfloat16, device=source.large.device))
    trainer = joined.trainer(source)
    joined.engine(ModuleAdapter(target))
    change(source, 1)
    assert trainer.publish(1, timeout=30).ok
    target.large.data = target.large.data.t()  # the same address
    change(source, 2)
    with pytest.raises(RoundFailed, match=r"restart this rank's weightsync\.Engine"):
        trainer.publish(2, timeout=30)


def test_a_shard_of_another_form_is_refused(joined: Joined, source: Model, target: Model) -> None:
    trainer = joined.trainer(source)
    joined.engine(ModuleAdapter(target))
    before = fingerprint(target)
    source.turned.data = source.turned.data.contiguous()
    with pytest.raises(LayoutError, match=r"turned.*make a new weightsync\.Trainer"):
        trainer.publish(1, timeout=30)
    source.turned.data = source.turned.data.cpu()
    with pytest.raises(LayoutError, match="turned"):
        trainer.publish(2, timeout=30)
    assert fingerprint(target) == before  # nothing was paused or written


def test_nothing_is_read_after_publish_returned(joined: Joined, source: Model, target: Model) -> None:
    trainer = joined.trainer(source)
    joined.engine(ModuleAdapter(target), "early")
    change(source, 1)
    expected = fingerprint(source)
    assert trainer.publish(1, timeout=30).ok
    change(source, 2)  # the next optimizer step
    assert fingerprint(target) == expected
    assert trainer._role.region.version == EMPTY
    late = joined.process("late")  # a joiner is not seeded from memory that is being trained
    assert fingerprint_of(late) not in (expected, fingerprint(source))
    change(source, 3)
    result = trainer.publish(3, timeout=30)
    assert {replica.name: replica.version for replica in result.replicas} == {"early": 3, "late": 3}
    assert fingerprint_of(late) == fingerprint(target) == fingerprint(source)


def test_work_that_is_still_queued_on_another_stream_is_waited_for(joined: Joined, source: Model, target: Model) -> None:
    trainer = joined.trainer(source)
    joined.engine(ModuleAdapter(target))
    stream = torch.cuda.Stream("cuda:0")  # type: ignore[no-untyped-call]
    for number in (1, 2):
        new = torch.randn_like(source.large)
        stream.wait_stream(torch.cuda.current_stream(0))
        with torch.cuda.stream(stream), torch.no_grad():
            torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # about half a second
            source.large.copy_(new)
        assert trainer.publish(number, timeout=30).ok
        assert torch.equal(target.large.cpu(), new.cpu())


def test_a_snapshot_needs_a_copy(joined: Joined, source: Model, target: Model) -> None:
    with joined.trainer(source) as trainer, pytest.raises(ConfigurationError, match="shared_memory"):
        trainer.publish_async(1)
    trainer = joined.trainer(source, transports=["shared_memory"])
    joined.engine(ModuleAdapter(target), delivery="streamed", bucket_bytes=1 << 20)
    expected = fingerprint(source)
    future = trainer.publish_async(1, timeout=30)
    change(source, 2)
    (replica,) = future.result(30).replicas
    assert (replica.delivery, replica.transports, replica.verified) == ("streamed", ("shared_memory",), "installed")
    assert fingerprint(target) == expected


@pytest.fixture
def masters() -> torch.nn.Sequential:
    """Float32 parameters, one of which is a view of a larger tensor."""
    first = torch.nn.Linear(40, 30)
    model = torch.nn.Sequential(first, torch.nn.LayerNorm(30), torch.nn.Linear(30, 513, bias=False)).to("cuda:0")
    first.weight = torch.nn.Parameter(torch.randn(40, 60, device="cuda:0")[:, ::2].t())
    change(model, 0)
    return model


def served(masters: torch.nn.Module) -> torch.nn.Module:
    layers = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.LayerNorm(30), torch.nn.Linear(30, 513, bias=False))
    return layers.to(far(), torch.bfloat16)


def is_rounded(target: torch.nn.Module, masters: torch.nn.Module) -> bool:
    pairs = zip(target.parameters(), masters.parameters(), strict=True)
    return all(torch.equal(own.cpu(), master.to(torch.bfloat16).cpu()) for own, master in pairs)


@pytest.mark.parametrize("delivery", ["direct", "streamed"])
def test_what_is_converted_is_copied_on_its_gpu(joined: Joined, masters: torch.nn.Sequential, delivery: str) -> None:
    target = served(masters)
    trainer = joined.trainer(masters, dtype=torch.bfloat16)
    assert not trainer.in_place
    joined.engine(ModuleAdapter(target), delivery=delivery)
    for number in (1, 2, 3):
        change(masters, number)
        (replica,) = trainer.publish(number, timeout=30).replicas
        assert (replica.delivery, replica.transports, replica.verified) == (delivery, ("cuda_ipc",), "installed")
        assert is_rounded(target, masters)
        if number == 1:
            last = next(reversed(list(masters.parameters())))
            last.data = last.data.clone()  # other memory
        if number == 2:
            masters.to("cpu")  # offloaded
            masters.to("cuda:0")


def test_the_copy_of_a_version_is_read_while_the_optimizer_steps(joined: Joined, masters: torch.nn.Module) -> None:
    early, late = served(masters), served(masters)
    trainer = joined.trainer(masters, dtype=torch.bfloat16)
    joined.engine(ModuleAdapter(early), "early")
    expected = served(masters)
    with torch.no_grad():
        for own, master in zip(expected.parameters(), masters.parameters(), strict=True):
            own.copy_(master)
    future = trainer.publish_async(1, timeout=30)
    change(masters, 2)
    assert future.result(30).ok
    assert fingerprint(early) == fingerprint(expected)
    engine = joined.engine(ModuleAdapter(late), "late")  # a joiner is seeded from the copy
    engine.wait_for_version(1, timeout=30)
    assert fingerprint(late) == fingerprint(expected)


def test_offloaded_masters_are_copied_to_the_gpu(joined: Joined, masters: torch.nn.Module) -> None:
    target = served(masters)
    trainer = joined.trainer(masters, dtype=torch.bfloat16)
    joined.engine(ModuleAdapter(target))
    masters.to("cpu")
    (replica,) = trainer.publish(1, timeout=30).replicas
    assert (replica.transports, replica.verified) == (("cuda_ipc",), "installed")
    assert is_rounded(target, masters)


@pytest.fixture
def expandable() -> Iterator[None]:
    """New tensors on the first GPU are in expandable segments: what is free in ordinary ones, and would come first, is taken."""
    gc.collect()
    torch.cuda.empty_cache()  # keeps segments of which a part is in use, and the allocator prefers their rest to a new segment
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    taken: list[torch.Tensor] = []
    try:
        while allocation_of((block := torch.empty_like(Model().large, device="cuda:0")).data_ptr(), 0).exportable:
            taken.append(block)
            assert len(taken) < 64, "the allocator's settings have no effect: it goes on to make ordinary segments"
        del block
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.usefixtures("expandable")
def test_memory_that_cannot_be_shared_is_copied_on_its_gpu(joined: Joined, target: Model) -> None:
    source = Model().to("cuda:0")
    assert not allocation_of(source.large.data_ptr(), 0).exportable, "the test needs memory that cannot be shared"
    trainer = joined.trainer(source)
    joined.engine(ModuleAdapter(target))
    change(source, 1)
    (replica,) = trainer.publish(1, timeout=30).replicas
    assert (replica.transports, replica.verified, trainer.in_place) == (("cuda_ipc",), "installed", False)
    assert fingerprint(target) == fingerprint(source)


def test_a_copy_that_does_not_fit_goes_through_the_host(
    joined: Joined, masters: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 37))
    target = served(masters)
    trainer = joined.trainer(masters, dtype=torch.bfloat16)
    joined.engine(ModuleAdapter(target), delivery="streamed")
    (replica,) = trainer.publish(1, timeout=30).replicas
    assert replica.transports == ("inproc",)
    assert is_rounded(target, masters)
    with pytest.raises(TransportUnavailable, match=r"takes a copy; cuda:0 has 1,048,576 bytes free"):
        joined.trainer(masters, dtype=torch.bfloat16, transports=["cuda_ipc"], run="another")


def test_the_experts_of_a_packed_parameter_are_published_in_place(joined: Joined) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs Transformers 5, which packs experts")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    mixture = {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2, "mlp_only_layers": []}
    config = transformers.Qwen3MoeConfig(**sizes, **mixture, head_dim=8, intermediate_size=32)
    source, target = (transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16) for _ in range(2))
    source, target = source.to("cuda:0"), target.to(far())
    trainer = joined.trainer(source)
    joined.engine(ModuleAdapter(target))
    assert trainer.in_place
    for number in (1, 2):
        change(source, number)
        (replica,) = trainer.publish(number, timeout=30).replicas
        assert (replica.delivery, replica.transports, replica.verified) == ("direct", ("cuda_ipc",), "installed")
        assert fingerprint(target) == fingerprint(source)
        packed = source.model.layers[1].mlp.experts.gate_up_proj
        packed.data = packed.data.clone()


def test_an_engine_in_host_memory_reads_the_copy_of_a_trainer_on_a_gpu(joined: Joined, source: Model) -> None:
    target = Model()
    trainer = joined.trainer(source, transports=["shared_memory", "tcp"])
    joined.engine(ModuleAdapter(target))
    for number in (1, 2):
        change(source, number)
        (replica,) = trainer.publish(number, timeout=30).replicas
        assert (replica.delivery, replica.transports) == ("direct", ("shared_memory",))
        assert fingerprint(target) == fingerprint(source)


def test_who_cannot_reach_the_other_is_told_what_to_change(joined: Joined, source: Model, target: Model) -> None:
    refused = pytest.raises(RoundFailed, match=r"transports=\['shared_memory', 'tcp'\]")
    with joined.trainer(source) as trainer, joined.engine(ModuleAdapter(Model()), "in host memory"), refused:
        trainer.publish(1, timeout=30)
    with joined.trainer(source, transports=["shared_memory"]) as trainer:
        refused = pytest.raises(RoundFailed, match=r"delivery='streamed'")
        with joined.engine(ModuleAdapter(target), "on a GPU", delivery="direct"), refused:
            trainer.publish(2, timeout=30)


def test_an_engine_on_a_gpu_is_streamed_to_where_nothing_is_served_in_place(joined: Joined, source: Model, target: Model) -> None:
    trainer = joined.trainer(source, transports=["shared_memory"])
    joined.engine(ModuleAdapter(target))
    (replica,) = trainer.publish(1, timeout=30).replicas
    assert (replica.delivery, replica.transports, replica.verified) == ("streamed", ("shared_memory",), "installed")
    assert fingerprint(target) == fingerprint(source)


class Loading(ModuleAdapter):
    """An engine with its own loader only, which looks at nothing but what it is handed; ``device`` is where it computes."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.buckets: list[int] = []

    def shards(self) -> None:  # type: ignore[override]
        return None

    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.module.state_dict())
        held = list(tensors)
        assert all(tensor.device == self.device() for _, tensor in held)
        self.buckets.append(len(held))
        for name, tensor in held:
            torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call]  # a slow loader: what is lent must stay
            own[name].copy_(tensor)


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("own_loader", [False, True])
def test_streamed_through_gpu_memory(joined: Joined, source: Model, target: Model, buffers: int, own_loader: bool) -> None:
    trainer = joined.trainer(source)
    adapter = Loading(target) if own_loader else ModuleAdapter(target)
    engine = joined.engine(adapter, delivery="streamed", bucket_bytes=2048, staging_buckets=buffers)
    for number in (1, 2, 5):
        change(source, number)
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.fill_(7)
        (replica,) = trainer.publish(number, timeout=30).replicas
        assert (replica.version, replica.delivery, replica.transports) == (number, "streamed", ("cuda_ipc",))
        assert replica.verified == ("received" if own_loader else "installed")
        assert fingerprint(target) == fingerprint(source)
    filler = engine._role._filler
    assert isinstance(filler, DeviceStreamed)
    assert filler.device == torch.device(far())
    assert 0 < filler._staging.nbytes <= buffers * (6001 * 2048 * 2) + 2048
    if isinstance(adapter, Loading):
        assert len(adapter.buckets) >= 9  # three rounds of several buckets


def test_streamed_loader_that_raises_leaves_the_replica_out_until_it_works(joined: Joined, source: Model, target: Model) -> None:
    trainer = joined.trainer(source)

    class Refusing(Loading):
        broken = True

        def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            if self.broken and self.buckets:
                raise RuntimeError("on purpose")
            super().load(tensors)

    adapter = Refusing(target)
    engine = joined.engine(adapter, delivery="streamed", bucket_bytes=2048)
    with pytest.raises(RoundFailed, match="on purpose"):
        trainer.publish(1, timeout=30)
    assert engine.serving is None
    adapter.broken = False
    change(source, 2)
    assert trainer.publish(2, timeout=30).ok
    assert fingerprint(target) == fingerprint(source)


def test_streamed_reader_in_another_process_that_is_killed_hurts_nobody(joined: Joined, source: Model, target: Model) -> None:
    trainer = joined.trainer(source)
    joined.engine(Loading(target), delivery="streamed", bucket_bytes=1 << 20)
    victim = joined.process("victim", "finish", "streamed")
    change(source, 1)
    killer = threading.Thread(target=lambda: victim.kill() if victim.line() == "finish" else None)
    killer.start()
    result = trainer.publish(1, timeout=30)
    killer.join(20)
    assert {replica.name: replica.version for replica in result.replicas} == {"here": 1, "victim": None}
    assert fingerprint(target) == fingerprint(source)
    other = joined.process("other", "", "streamed")
    change(source, 2)
    outcome = {replica.name: replica for replica in trainer.publish(2, timeout=30).replicas}
    assert outcome["other"].transports == ("cuda_ipc",)
    assert fingerprint_of(other) == fingerprint(source)
