"""Holds that a replica that cannot take part is in every result, counts for what is required, and is warned of."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
from tests.unit.coordinator.contents import MANIFEST, SPECS
from tests.unit.coordinator.fakes import GRACE, World
from tests.virtual_time import virtual

from weightsync.config import Require, RoundSettings
from weightsync.coordinator.publish_barrier import RETURN_SECONDS
from weightsync.errors import DeadlineExceeded, ManifestMismatch
from weightsync.model import Manifest, TensorSpec, Version
from weightsync.protocol.messages import ReplicaResult, RoundResult, WaitForReplicas
from weightsync.server.metrics import CoordinatorMetrics

OTHER = Manifest([TensorSpec(spec.name, spec.shape, "int8") for spec in SPECS])


def requiring(require: Require) -> World:
    return World(RoundSettings(run="test", grace=GRACE, timeout=600.0, retry=False, require=require))


def states(result: RoundResult) -> dict[str, str]:
    return {one.name: one.state for one in result.replicas}


@pytest.mark.parametrize("first", ["trainer", "engine"])
@virtual
async def test_a_replica_that_does_not_fit_is_refused_and_counted(first: str, caplog: pytest.LogCaptureFixture) -> None:
    world = requiring("all")
    if first == "trainer":
        world.add_trainers(1)
    world.add_replica("odd", manifest=OTHER)
    world.add_replica("even")
    if first == "engine":
        world.add_trainers(1)
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "replica odd is refused" in warning
    assert "3 tensors have dtype int8 instead of uint8 (a, b, c)" in warning
    if first == "engine":  # the other is told by the Welcome
        [(_, notice)] = world.engines["odd/0"].notices
        assert notice.startswith("rounds skip this engine: ManifestMismatch")
    result = await world.publish(1)
    assert (states(result), result.ok) == ({"even": "loaded", "odd": "refused"}, False)
    assert {replica.name: replica.service for replica in result.replicas} == {"even": "serving", "odd": "refused"}
    assert "1 of 2 replicas got the version, but 2 must: odd: ManifestMismatch" in (result.error or "")
    assert "version test@1 did not reach odd (refused)" in caplog.records[-1].getMessage()
    count = len(caplog.records)
    await world.publish(2)
    assert len(caplog.records) == count, "said once, not in every round"
    assert world.states() == {"odd": ("refused", None), "even": ("loaded", 2)}
    text = CoordinatorMetrics().text(world.coordinator.gauges()).decode()
    assert 'weightsync_replica_state{replica="odd",service="refused",state="refused"} 1.0' in text
    assert 'weightsync_replicas{service="refused",state="refused"} 1.0' in text
    assert "weightsync_replicas_not_updated 1.0" in text
    assert 'weightsync_replica_staleness{replica="odd"} 2.0' in text
    world.check()


@virtual
async def test_a_lost_replica_counts_until_it_is_back_and_a_closed_one_does_not() -> None:
    world = requiring("all")
    world.add_trainers(1)
    for name in ("a", "b", "c"):
        world.add_replica(name)
    assert (await world.publish(1)).ok
    world.engines["b/0"].disconnect()
    world.coordinator.leave(world.engines["c/0"].node, "the agent left", clean=True)
    result = await world.publish(2)
    assert (states(result), result.ok) == ({"a": "loaded", "b": "lost"}, False)
    assert (world.state("b").state, world.state("c").state) == ("lost", "left"), "c was closed on purpose"
    assert result.replicas[-1].error == "PeerLost: not connected (b/0: its connection closed)"
    assert [one.staleness for one in result.replicas] == [0, 2], "who serves nothing is behind every publication"
    world.engines["b/0"].connect()
    assert (await world.publish(3)).ok
    world.coordinator.leave(world.engines["b/0"].node, "the agent left", clean=True)
    assert (await world.publish(4)).ok


@pytest.mark.parametrize(
    ("require", "back_after", "timeout", "waited"),
    [
        ("all", 0.05, 60.0, 0.05),
        ("any", 0.05, 60.0, 0.0),  # another replica is enough
        (2, 0.05, 60.0, 0.05),
        (3, 0.05, 60.0, 0.0),  # there are two: waiting would not help
        ("all", None, 60.0, RETURN_SECONDS - 1),  # it is dead
        ("all", None, 8.0, 1.5),  # a quarter of the round's time
    ],
)
@virtual
async def test_a_round_waits_for_a_replica_that_it_needs_and_whose_connection_just_broke(
    require: Require, back_after: float | None, timeout: float, waited: float
) -> None:
    world = requiring(require)
    world.add_trainers(1)
    world.add_replica("a")
    world.add_replica("b", 2)
    assert (await world.publish(1)).ok is (require != 3)
    lost = world.engines["b/1"]
    lost.disconnect()
    await asyncio.sleep(1)
    loop, since = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    if back_after is not None:
        loop.call_later(back_after, lost.connect)
    result = await world.publish(2, timeout)
    assert loop.time() - since - result.seconds == pytest.approx(waited, abs=0.1 if waited < 1 else 0.5)
    assert states(result)["b"] == ("loaded" if back_after is not None and waited else "lost")
    world.coordinator.leave(world.engines["b/0"].node, "the agent left", clean=True)
    since = loop.time()
    await world.drain(RETURN_SECONDS)
    result = await world.publish(3, 8.0)
    assert loop.time() - since - RETURN_SECONDS == pytest.approx(result.seconds), "not for ever"
    world.check()


@virtual
async def test_a_revoked_replica_is_not_missed() -> None:
    world = requiring("all")
    world.add_trainers(1)
    world.add_replica("a")
    world.add_replica("thief")
    assert (await world.publish(1)).ok
    world.coordinator.revoke("thief/0")
    assert (world.state("thief").state, world.state("thief").error) == ("left", None)
    result = await world.publish(2)
    assert (states(result), result.ok) == ({"a": "loaded"}, True)


@virtual
async def test_half_a_replica_counts() -> None:
    world = requiring("all")
    world.add_trainers(1)
    world.add_replica("a")
    world.add_engine("b", 0, 2)
    result = await world.publish(1)
    assert (states(result), result.ok) == ({"a": "loaded", "b": "registered"}, False)
    assert "rank 1 of 2 is missing" in (result.error or "")


@virtual
async def test_a_replica_whose_other_rank_was_killed_is_not_gone_on_purpose() -> None:
    world = requiring("all")
    world.add_trainers(1)
    world.add_replica("a", ranks=2)
    world.add_replica("b")
    world.engines["a/0"].disconnect()
    world.coordinator.leave(world.engines["a/1"].node, "the agent left", clean=True)
    assert states(await world.publish(1)) == {"b": "loaded", "a": "lost"}


@virtual
async def test_the_default_needs_one_replica_and_names_the_others() -> None:
    world = requiring("any")
    world.add_replica("odd", manifest=OTHER)
    world.add_trainers(1)
    result = await world.publish(1)
    assert not result.ok
    assert "odd: ManifestMismatch" in (result.error or "")
    assert "has an engine joined" not in (result.error or "")
    world.add_replica("even")
    assert (await world.publish(2)).ok


@virtual
async def test_waiting_for_replicas_is_a_call_that_is_answered() -> None:
    world = World()
    world.add_trainers(1)
    assert await world.coordinator.wait_for_replicas("trainer/0", WaitForReplicas(0), 1.0) == ()
    asking = asyncio.ensure_future(world.coordinator.wait_for_replicas("trainer/0", WaitForReplicas(2), 60.0))
    world.add_replica("a")
    world.add_engine("b", 0, 2)
    world.add_replica("odd", manifest=OTHER)
    await asyncio.sleep(3)
    assert not asking.done()
    [(when, text)] = world.trainers["trainer/0"].notices
    assert when == pytest.approx(2.0)
    assert text.startswith("waiting for 2 replicas (ready: a; b is missing rank 1 of 2; odd is refused: ManifestMismatch")
    world.add_engine("b", 1, 2)
    assert await asking == ("a", "b")
    assert asyncio.get_running_loop().time() == pytest.approx(3.0)
    assert await world.coordinator.wait_for_replicas("trainer/0", WaitForReplicas(0, ("b",)), 5.0) == ("a", "b")
    with pytest.raises(DeadlineExceeded, match=r"waited 5 s for b, c \(ready: a, b"):
        await world.coordinator.wait_for_replicas(
            "trainer/0",
            WaitForReplicas(
                1,
                (
                    "c",
                    "b",
                ),
            ),
            5.0,
        )
    with pytest.raises(DeadlineExceeded, match=r"(?s)waited 5 s for 3 replicas \(ready: a, b; odd is refused"):
        await world.coordinator.wait_for_replicas("trainer/0", WaitForReplicas(3), 5.0)
    world.engines["a/0"].disconnect()
    with pytest.raises(DeadlineExceeded, match=r"ready: b; a is lost"):
        await world.coordinator.wait_for_replicas("trainer/0", WaitForReplicas(2), 5.0)


def manifest(*dtypes: str) -> Manifest:
    return Manifest([TensorSpec(f"layers.{index}.weight", (2, 2), dtype) for index, dtype in enumerate(dtypes)])


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        (["float32"] * 21, ["bfloat16"] * 21, "21 tensors have dtype bfloat16 instead of float32 (layers.0.weight,"),
        (["float32"] * 21, ["bfloat16"] * 21, "Trainer(..., dtype=torch.bfloat16)"),
        (["float32"] * 2, ["bfloat16", "float32"], "Trainer(..., dtype={'layers.0.weight': torch.bfloat16, ...})"),
        (["float32", "int64"], ["bfloat16", "int64"], "Trainer(..., dtype=torch.bfloat16)"),
        (["float32"], ["bfloat16"], "dtype of layers.0.weight: bfloat16 instead of float32"),
    ],
)
def test_a_difference_of_dtypes_is_one_line_with_its_remedy(ours: list[str], theirs: list[str], found: str) -> None:
    with pytest.raises(ManifestMismatch) as raised:
        manifest(*ours).check_same(manifest(*theirs))
    assert found in str(raised.value)
    assert len(str(raised.value).splitlines()) == 3


def test_a_dtype_that_no_conversion_bridges_has_no_remedy() -> None:
    with pytest.raises(ManifestMismatch) as raised:
        manifest("float32").check_same(manifest("float8_e4m3fn"))
    assert "Trainer(" not in str(raised.value)


def test_a_result_reads_as_three_lines() -> None:
    def one(name: str, state: str, verified: str, error: str | None = None) -> ReplicaResult:
        return ReplicaResult(name, state, None, None, 10, "direct", (), verified, {}, 0.0, error)

    replicas = (
        one("mine-0", "loaded", "installed"), one("mine-1", "loaded", "received"), one("odd", "refused", "", "first\n  second"),
    )  # fmt: skip
    version = Version("run", 7, MANIFEST.fingerprint, "d")
    result = RoundResult(3, version, True, 30_000_000, 0.25, {}, replicas)
    first, second, third = str(result).splitlines()
    assert first == "round 3, version run@7: ok, 2 of 3 replicas, 30.0 MB in 0.250 s (0.12 GB/s), longest pause 0.0 ms"
    assert ": ok, 2 of 3 replicas, 2,720 bytes in 0.250 s, longest" in str(msgspec.structs.replace(result, nbytes=2720))
    listed = msgspec.structs.replace(result, replicas=(msgspec.structs.replace(replicas[0], base=6), *replicas[1:]))
    assert ", 30.0 MB of changes since version 6 in 0.250 s (" in str(listed)
    assert "mine-0 (installed: " in second
    assert "mine-1 (received: weaker" in second
    assert third == "  not updated: odd (refused: first; second)"
    assert "weaker" in result.replicas[1].guarantee
    assert not result.replicas[2].guarantee
    many = RoundResult(3, version, False, 0, 0.25, {}, tuple(one(f"r{index}", "lost", "", "x" * 500) for index in range(99)))
    assert len(str(many)) < 3000


def test_a_result_gives_its_figures_for_an_experiments_log() -> None:
    def one(name: str, staleness: int, paused: float, error: str | None = None) -> ReplicaResult:
        return ReplicaResult(name, "loaded", 7, "d", 10, "direct", (), "installed", {}, paused, error, staleness=staleness)

    version = Version("run", 7, MANIFEST.fingerprint, "d")
    replicas = one("a", 0, 0.125), one("b", 3, 0.5, "PeerLost: gone")
    assert RoundResult(3, version, True, 500_000_000, 0.25, {"place": 0.0625}, replicas).summary() == {
        "weightsync/update_s": 0.25,
        "weightsync/pause_s": 0.5,
        "weightsync/place_s": 0.0625,
        "weightsync/bytes": 500_000_000.0,
        "weightsync/gb_per_s": 2.0,
        "weightsync/staleness_max": 3.0,
        "weightsync/replicas_ok": 1.0,
        "weightsync/replicas_failed": 1.0,
    }
    alone = RoundResult(1, version, True, 0, 0.0, {}, ()).summary()
    assert set(alone.values()) == {0.0}
