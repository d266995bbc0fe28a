"""Every point of :mod:`weightsync.failpoints`, by the processes that reach it. The campaign fails if one is never reached."""

from __future__ import annotations

TRAINER_POINTS = (
    "trainer.publish",
    "trainer.received.place",
    "trainer.place",
    "trainer.placing",
    "trainer.placed",
    "trainer.published",
)
ENGINE_POINTS = (
    "engine.received.prepare",
    "engine.prepared",
    "engine.pausing",
    "engine.pause",
    "engine.paused",
    "engine.move",
    "engine.group",
    "engine.moved",
    "engine.finish",
    "engine.flush",
    "engine.committed",
    "engine.resume",
    "engine.resumed",
)
"""Points of every engine rank. At ``engine.received.*`` a call has arrived and nothing has changed yet."""
ENGINE_ALONE_POINTS = ("engine.received.update",)
"""Points of a rank that is its whole replica."""
ENGINE_TOGETHER_POINTS = ("engine.received.pause", "engine.received.move", "engine.received.commit", "engine.received.resume")
"""Points of a rank whose replica has several ranks."""
ENGINE_REPAIR_POINTS = ("engine.received.quarantine", "engine.received.checksources")
"""Points of a rank whose round failed, and of its re-seeding."""
COORDINATOR_POINTS = (
    "round.start",
    "round.agreed",
    "round.placed",
    "round.paused",
    "round.moved",
    "round.verified",
    "round.committed",
    "round.resumed",
    "round.end",
)

STREAM_POINTS = (
    "trainer.streaming",
    "trainer.received.window",
    "trainer.window",
    "engine.received.openstream",
    "engine.received.movewindow",
    "engine.window",
    "engine.received.endstream",
    "round.window",
)
"""Further points of a round whose source is a stream. The campaign publishes no stream; the simulation does."""

GONE_POINTS = ("engine.received.letgo",)
"""Points of engine ranks whose trainer stays away for the grace. In the campaign it does not; the simulation reaches them."""

KEYED_POINTS = ("trainer.digest",)
"""Points of trainer ranks that digest their version under a secret key, for replicas that read from other replicas."""

DELTA_POINTS = (
    "engine.received.stage",
    "engine.stage",
    "engine.staged",
    "round.staged",
    "engine.applied",
    "engine.received.revert",
    "engine.revert",
    "engine.reverted",
    "round.reverted",
)
"""Further points of a round that moves only what changed."""

MOVING_POINTS = ("engine.received.keeplayout", "engine.held")
"""Points of an engine rank whose experts move between ranks: ``tests/unit/engine/test_moving_parts.py`` has such ranks."""

AUDIT_POINTS = ("engine.received.audit", "engine.audit")
"""Points of an engine rank that has served for some seconds: the simulation reaches them, the campaign does not."""

LORA_POINTS = (
    "round.lora.agreed",
    "round.lora.staged",
    "round.lora.registered",
    "engine.lora.received.preparelora",
    "engine.lora.prepared",
    "engine.lora.received.stagelora",
    "engine.lora.received",
    "engine.lora.staged",
    "engine.lora.received.registerlora",
    "engine.lora.register",
    "engine.lora.registered",
    "engine.lora.received.droplora",
    "engine.lora.drop",
)
"""Points of the publication of a LoRA adapter: see :mod:`tests.simulation.lora_schedule`, and ``test_adapters.py``."""

SOURCE_POINTS = ("engine.received.place", "engine.place", "engine.placing", "engine.placed")
"""Further points of an engine rank that serves its weights to other replicas: see :mod:`tests.faults.sources`."""

RELAY_POINTS = ("relay.reading", "relay.read", "relay.verified", "relay.published")
"""Points of ``weightsync relay``, which reaches those of a trainer, too: see ``tests/integration/relays/test_relay_points.py``."""

STORE_POINTS = (
    "store.object",
    "store.piece",
    "store.object_written",
    "store.manifest",
    "store.manifest_written",
    "store.manifests_removed",
)
"""Points of a trainer rank that stores its version, and of garbage collection: also see ``tests/unit/store/test_crashes.py``."""

UPDATE_POINTS = (
    "rank.received.joingroup",
    "updates.begin",
    "rank.received.pause",
    "rank.paused",
    "updates.bucket",
    "rank.received.receive",
    "rank.arrived",
    "rank.load",
    "rank.answer",
    "updates.commit",
    "rank.received.verify",
    "updates.verified",
    "rank.finish",
    "rank.flush",
    "rank.committed",
    "updates.finished",
    "rank.resume",
    "rank.resumed",
    "updates.destroy",
    "rank.received.leavegroup",
)
"""Points of an update from outside (``weightsync_disaggregated``), at the server's front and its engine ranks.
``updates.abort`` and ``rank.received.quarantine`` exist too, but only a failure reaches them.
"""
