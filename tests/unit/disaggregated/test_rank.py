"""Holds one rank of a disaggregated update to its contract: what is late is not loaded, and a loader's work is looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from weightsync import failpoints
from weightsync.deadline import Deadline
from weightsync.engine.adapter import EngineAdapter
from weightsync.engine.engine_role import EngineRole
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import DeadlineExceeded, PeerLost, ProtocolError
from weightsync.model import Manifest, PauseMode, TensorSpec, Version
from weightsync.protocol.messages import (
    Answer,
    Body,
    Call,
    Commit,
    Done,
    Failure,
    Host,
    Move,
    Pause,
    Place,
    Quarantine,
    Resume,
    decode,
    encode,
)
from weightsync.protocol.update_messages import Digested, JoinGroup, LeaveGroup, Receive, Verify
from weightsync.tensors.digest import digest_box
from weightsync.transports.broadcast.process_groups import ProcessGroup
from weightsync_disaggregated import rank
from weightsync_disaggregated.rank import DisaggregatedRank

SECONDS = 10.0
NAMES = ("a", "b")
MANIFEST = Manifest([TensorSpec(name, (4,), "float32") for name in NAMES])


class Recording(EngineAdapter):
    """Keeps what it is given, and writes down its calls."""

    name = "recording"

    def __init__(self, *, takes: int | None = None) -> None:
        self.calls: list[str] = []
        self.held: dict[str, float] = {}
        self._takes = takes
        self.refuses_resume = False

    def manifest(self) -> Manifest:
        return MANIFEST

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self.calls.append("pause")

    def begin(self) -> None:
        self.calls.append("begin")

    def wake_weights(self) -> None:
        self.calls.append("wake_weights")

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.calls.append("load")
        if self._takes == 0:
            return
        for count, (name, tensor) in enumerate(tensors, 1):
            self.held[name] = float(tensor[0])
            if count == self._takes:
                return

    def finish(self, version: Version) -> None:
        self.calls.append("finish")

    def wake_cache(self) -> None:
        self.calls.append("wake_cache")

    def flush(self) -> bool:
        self.calls.append("flush")
        return True

    def resume(self) -> None:
        self.calls.append("resume")
        if self.refuses_resume:
            raise RuntimeError("cannot resume")


class Carrying:
    """A group over which a value comes when ``here`` is set."""

    backend = "gloo"

    def __init__(self, value: float) -> None:
        self.value, self.closed = value, False
        self.waited, self.here = threading.Event(), threading.Event()

    def broadcast(self, tensors: Sequence[torch.Tensor], deadline: Deadline) -> None:
        self.waited.set()
        assert self.here.wait(SECONDS)
        for memory in tensors:
            memory.view(torch.float32).fill_(self.value)

    def close(self) -> None:
        self.closed = True


class Driven:
    """A rank, and threads that hand it orders."""

    def __init__(self, adapter: Any) -> None:
        self.adapter, self.rank = adapter, DisaggregatedRank(adapter)
        self.pool = ThreadPoolExecutor(4)

    def group(self, name: str, value: float, *, here: bool = True) -> Carrying:
        made = Carrying(value)
        if here:
            made.here.set()
        self.rank._groups[name] = cast(ProcessGroup, made)
        return made

    def tell(self, body: Body, update: int = 0, timeout: float = SECONDS) -> Any:
        """The answer's body, or the failure."""
        frame = decode(self.rank.handle(encode(Call(0, timeout, body, update=update))))
        assert isinstance(frame, Answer | Failure)
        return frame.body if isinstance(frame, Answer) else frame

    def done(self, body: Body, update: int = 0) -> None:
        answer = self.tell(body, update)
        assert isinstance(answer, Done | Digested), answer

    def failed(self, body: Body, update: int, words: str, timeout: float = SECONDS) -> None:
        answer = self.tell(body, update, timeout)
        assert isinstance(answer, Failure), answer
        assert words in answer.message, answer

    def later(self, body: Body, update: int = 0) -> Future[Any]:
        return self.pool.submit(self.tell, body, update)


def bucket(group: str, *names: str) -> Receive:
    return Receive(group, tuple(NAMES.index(name) for name in names or NAMES))


def version(number: int) -> Version:
    return Version("run", number, MANIFEST.fingerprint, "0" * 16)


@pytest.fixture
def driven() -> Driven:
    return Driven(Recording())


def commit(driven: Driven, update: int) -> None:
    driven.done(Verify(), update)
    driven.done(Commit(version(update)), update)
    driven.done(Resume(), update)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[threading.Event, threading.Event]]:
    """Stop the first thread that comes to a point; other threads, and later ones, go on."""

    def made(point: str) -> tuple[threading.Event, threading.Event]:
        reached, release, once = threading.Event(), threading.Event(), threading.Lock()

        def gate(name: str) -> None:
            if name == point and once.acquire(blocking=False):
                reached.set()
                assert release.wait(SECONDS)

        monkeypatch.setattr(failpoints, "_gate", gate)
        return reached, release

    return made


@pytest.mark.parametrize("point", ["rank.arrived", "rank.load"])
def test_a_bucket_of_an_ended_update_is_not_loaded_into_the_next(
    driven: Driven, hold: Callable[[str], tuple[threading.Event, threading.Event]], point: str
) -> None:
    """Also if the front gave up while this rank still digested it: its group is open, and only the update has changed."""
    driven.group("old", 1.0)
    driven.group("new", 2.0)
    reached, release = hold(point)
    driven.done(Pause("abort"), 1)
    late = driven.later(bucket("old", "a"), 1)
    assert reached.wait(SECONDS)
    driven.done(Pause("abort"), 2)
    driven.done(bucket("new"), 2)
    release.set()
    answer = late.result(SECONDS)
    assert isinstance(answer, Failure)
    assert "an update that ended" in answer.message
    assert driven.adapter.held == {"a": 2.0, "b": 2.0}
    commit(driven, 2)
    assert driven.adapter.calls.count("load") == 1


@pytest.mark.parametrize("after", [Verify(), Quarantine("late")], ids=["verify", "quarantine"])
def test_nothing_is_loaded_between_verify_and_finish_or_after_a_quarantine(driven: Driven, after: Body) -> None:
    """Not even of the same update: what was verified is what is served."""
    slow = driven.group("slow", 1.0, here=False)
    driven.group("new", 2.0)
    driven.done(Pause("abort"), 2)
    late = driven.later(bucket("slow", "a"), 2)
    assert slow.waited.wait(SECONDS)
    driven.done(bucket("new"), 2)
    driven.done(after, 2)
    slow.here.set()
    assert isinstance(late.result(SECONDS), Failure)
    assert driven.adapter.held == {"a": 2.0, "b": 2.0}


def test_what_arrives_after_its_group_was_destroyed_is_not_loaded(driven: Driven) -> None:
    slow = driven.group("slow", 1.0, here=False)
    driven.group("new", 2.0)
    driven.done(Pause("abort"), 1)
    late = driven.later(bucket("slow", "a"), 1)
    assert slow.waited.wait(SECONDS)
    driven.done(LeaveGroup("slow"))
    driven.done(bucket("new"), 1)
    slow.here.set()
    answer = late.result(SECONDS)
    assert isinstance(answer, Failure)
    assert "destroyed" in answer.message
    assert driven.adapter.held == {"a": 2.0, "b": 2.0}


def test_a_bucket_of_another_group_may_come_while_one_is_loaded(
    driven: Driven, hold: Callable[[str], tuple[threading.Event, threading.Event]]
) -> None:
    """Groups side by side: the second bucket arrives meanwhile, and is loaded after the first."""
    driven.group("one", 1.0)
    driven.group("two", 2.0)
    driven.done(Pause("abort"), 1)
    reached, release = threading.Event(), threading.Event()
    load = driven.adapter.load

    def slow(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        driven.adapter.load = load
        reached.set()
        assert release.wait(SECONDS)
        load(tensors)

    driven.adapter.load = slow
    first = driven.later(bucket("one", "a"), 1)
    assert reached.wait(SECONDS)
    arrived, go_on = hold("rank.arrived")
    second = driven.later(bucket("two", "b"), 1)
    assert arrived.wait(SECONDS), second.result(0)
    go_on.set()
    release.set()
    assert [isinstance(one.result(SECONDS), Done) for one in (first, second)] == [True, True]
    assert driven.adapter.held == {"a": 1.0, "b": 2.0}
    commit(driven, 1)


@pytest.mark.parametrize("body", [bucket("g"), Verify(), Commit(version(1)), Resume()], ids=lambda body: type(body).__name__)
def test_a_late_call_of_an_ended_update_does_nothing(driven: Driven, body: Body) -> None:
    driven.group("g", 2.0)
    states: dict[type[Any], list[Body]] = {
        Receive: [],
        Verify: [bucket("g")],
        Commit: [bucket("g"), Verify()],
        Resume: [bucket("g"), Verify(), Commit(version(2))],
    }
    driven.done(Pause("abort"), 2)
    for before in states[type(body)]:
        driven.done(before, 2)
    calls = driven.adapter.calls.copy()
    driven.failed(body, 1, "an update that ended")
    assert driven.adapter.calls == calls


@pytest.mark.parametrize("takes", [0, 1])
def test_a_loader_that_leaves_tensors_fails_and_the_rank_commits_nothing_of_it(takes: int) -> None:
    driven = Driven(Recording(takes=takes))
    driven.group("g", 1.0)
    driven.done(Pause("abort"), 1)
    driven.failed(bucket("g"), 1, f"took {takes} of the 2 tensors")
    driven.failed(Verify(), 1, "quarantined")
    driven.failed(Commit(version(1)), 1, "quarantined")
    driven.failed(Resume(), 1, "quarantined")
    assert "finish" not in driven.adapter.calls


def test_a_tied_tensor_sent_under_its_other_name_is_loaded_under_the_one_that_the_loader_knows() -> None:
    module = torch.nn.Module()
    module.embed = module.lm_head = torch.nn.Parameter(torch.zeros(4))
    driven = Driven(ModuleAdapter(module))
    assert driven.rank.manifest[0] == TensorSpec("embed", (4,), "float32", ("lm_head",))
    driven.group("g", 3.0)
    driven.done(Pause("abort"), 1)
    driven.done(Receive("g", (0,)), 1)
    answer = driven.tell(Verify(), 1)
    assert isinstance(answer, Digested)
    assert answer.installed
    assert module.embed.tolist() == [3.0] * 4


def test_a_sleeping_engine_is_woken_as_in_a_round(driven: Driven) -> None:
    driven.group("g", 1.0)
    driven.done(Pause("abort"), 1)
    driven.done(bucket("g"), 1)
    commit(driven, 1)
    assert driven.adapter.calls == ["pause", "begin", "wake_weights", "load", "finish", "wake_cache", "flush", "resume"]


def test_an_engine_that_is_paused_is_not_paused_again(driven: Driven) -> None:
    driven.group("g", 1.0)
    driven.done(Pause("abort"), 1)
    driven.done(Quarantine("late"), 1)
    driven.done(Pause("abort"), 2)
    driven.done(bucket("g"), 2)
    driven.done(Verify(), 2)
    driven.done(Commit(version(2)), 2)
    assert driven.adapter.calls.count("pause") == 1
    driven.adapter.refuses_resume = True
    driven.failed(Resume(), 2, "cannot resume")
    driven.done(Quarantine("late"), 2)  # it may have begun to generate
    assert driven.adapter.calls.count("pause") == 2


def test_a_quarantine_that_a_newer_update_overtakes_does_not_spoil_it(
    driven: Driven, hold: Callable[[str], tuple[threading.Event, threading.Event]]
) -> None:
    """It waited behind a resume that hung, and whoever came next had its turn first."""
    driven.group("g", 1.0)
    driven.done(Pause("abort"), 1)
    driven.done(bucket("g"), 1)
    commit(driven, 1)
    reached, release = hold("rank.received.quarantine")
    late = driven.later(Quarantine("late"), 1)
    assert reached.wait(SECONDS)
    driven.done(Pause("abort"), 2)
    release.set()
    assert isinstance(late.result(SECONDS), Done)
    driven.done(bucket("g"), 2)
    commit(driven, 2)


def test_a_rank_whose_pause_failed_is_quarantined_with_that_update(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(mode: PauseMode, timeout: float) -> None:
        raise RuntimeError("cannot pause")

    with monkeypatch.context() as patched:
        patched.setattr(driven.adapter, "pause", fails)
        driven.failed(Pause("abort"), 1, "cannot pause")
    driven.done(Quarantine("late"), 1)
    assert driven.adapter.calls == ["pause"]


def test_an_order_behind_a_loader_that_hangs_ends_in_time_and_its_quarantine_is_carried_out(driven: Driven) -> None:
    """As in a round: nobody waits longer than an order says, and a quarantine that gave up is not forgotten."""
    reached, release, load = threading.Event(), threading.Event(), driven.adapter.load

    def hanging(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        reached.set()
        assert release.wait(SECONDS)
        load(tensors)

    driven.adapter.load = hanging
    driven.group("g", 1.0)
    driven.done(Pause("abort"), 1)
    late = driven.later(bucket("g"), 1)
    assert reached.wait(SECONDS)
    driven.failed(Verify(), 1, "is inside Recording.load() for", 0.05)
    driven.failed(Quarantine("late"), 1, "never resumed", 0.05)
    release.set()
    answer = late.result(SECONDS)
    assert isinstance(answer, Failure)
    assert answer.kind == "Aborted", "the quarantine ended what arrived before it"
    driven.failed(Verify(), 1, "quarantined")
    driven.adapter.load = load
    driven.done(Pause("abort"), 2)
    driven.done(bucket("g"), 2)
    commit(driven, 2)


def test_parameters_that_are_loaded_late_are_not_read_back_before() -> None:
    module = torch.nn.Module()
    module.a, module.b = (torch.nn.Parameter(torch.zeros(4)) for _ in NAMES)
    adapter = ModuleAdapter(module)
    adapter.loads_late = True
    late = Driven(adapter)
    late.group("g", 3.0)
    late.done(Pause("abort"), 1)
    late.done(bucket("g"), 1)
    answer = late.tell(Verify(), 1)
    assert isinstance(answer, Digested)
    assert not answer.installed


def test_digests_are_of_what_was_received_in_this_update(driven: Driven) -> None:
    driven.group("g", 3.0)
    driven.done(Pause("abort"), 1)
    driven.done(bucket("g"), 1)
    driven.done(Pause("abort"), 2)
    driven.done(bucket("g", "b"), 2)
    answer = driven.tell(Verify(), 2)
    assert isinstance(answer, Digested)
    wanted = digest_box(torch.full((4,), 3.0), (4,), [0])
    assert [int.from_bytes(answer.digests[place : place + 8], "little") for place in (0, 8)] == [0, wanted]


def test_a_tensor_that_came_under_both_of_its_names_is_digested_once(driven: Driven) -> None:
    module = torch.nn.Module()
    module.embed = module.lm_head = torch.nn.Parameter(torch.zeros(4))
    adapter = ModuleAdapter(module)
    adapter.loads_late = True  # so that what was received is reported
    tied = Driven(adapter)
    tied.group("g", 3.0)
    tied.done(Pause("abort"), 1)
    tied.done(Receive("g", (0, 0)), 1)
    answer = tied.tell(Verify(), 1)
    assert isinstance(answer, Digested)
    assert int.from_bytes(answer.digests, "little") == digest_box(torch.full((4,), 3.0), (4,), [0])


@pytest.mark.parametrize("close", [False, True], ids=["left", "closed"])
def test_a_group_that_comes_about_after_it_was_left_is_closed(driven: Driven, monkeypatch: pytest.MonkeyPatch, close: bool) -> None:
    """The front gave up waiting for it. Kept, the group would be in the way of every later one of its name."""
    made, meeting, met = Carrying(1.0), threading.Event(), threading.Event()

    def meets_late(*_: object, **__: object) -> ProcessGroup:
        meeting.set()
        assert met.wait(SECONDS)
        return cast(ProcessGroup, made)

    monkeypatch.setattr(rank, "init_custom_process_group", meets_late)
    join = JoinGroup("g", "gloo", "127.0.0.1", 1, 1, 2)
    late = driven.later(join)
    assert meeting.wait(SECONDS)
    if close:
        driven.rank.close()
    else:
        driven.done(LeaveGroup("g"))
    met.set()
    answer = late.result(SECONDS)
    assert isinstance(answer, Failure)
    assert "was destroyed while this rank joined it" in answer.message
    assert made.closed
    driven.done(join)


@pytest.mark.parametrize("error", [PeerLost("connection refused by 192.0.2.7:22"), DeadlineExceeded("192.0.2.7:443 is silent")])
def test_every_failure_to_join_has_the_same_answer(driven: Driven, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Whoever may name an address must not learn from the answer what listens there."""

    def fails(*_: object, **__: object) -> ProcessGroup:
        raise error

    monkeypatch.setattr(rank, "init_custom_process_group", fails)
    answer = driven.tell(JoinGroup("g", "gloo", "192.0.2.7", 22, 1, 2), timeout=3.0)
    assert answer == Failure(0, "PeerLost", "group 'g' did not come about within 3 s; the log of this engine rank says why")


@pytest.mark.parametrize("body", [Move(1), Place(1), LeaveGroup("g")], ids=lambda body: type(body).__name__)
def test_each_driver_of_an_engine_rank_refuses_the_calls_of_the_other(driven: Driven, body: Body) -> None:
    """A coordinator cannot make an engine rank join or leave groups, nor a server's front make it read from trainers."""
    role = EngineRole(driven.adapter, None, Host("here", "here"))
    words = f"does not understand {type(body).__name__}"
    if isinstance(body, LeaveGroup):
        with pytest.raises(ProtocolError, match=words):
            role.handle(body, SECONDS)
    else:
        driven.failed(body, 0, words)
