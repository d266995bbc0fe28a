"""Messages from agents: a Hello becomes a validated rank, and a call reaches the coordinator. Nothing is trusted unchecked."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable

from msgspec import structs

from weightsync.config import ROUTED_URL
from weightsync.coordinator.coordinator import Coordinator
from weightsync.coordinator.publish_barrier import OutOfCount
from weightsync.coordinator.rank_handle import RoundDeadline
from weightsync.coordinator.ranks import AdapterRank, EngineRank, PublishingRank, TrainerRank, known_as
from weightsync.errors import AuthenticationError, ConfigurationError, MembershipError, ProtocolError, readable
from weightsync.model import Layout, Manifest
from weightsync.model.lora import check_adapter_name
from weightsync.protocol import messages
from weightsync.protocol.lora_messages import LorasRefused, RetireLora
from weightsync.protocol.store_messages import ManifestStored, RelayFailing, StorePart

TRAINER = "trainer"
"""Name under which trainer ranks connect. No replica may use it."""

_ADAPTERS = "adapters:"
"""Begins the names under which the ranks that publish LoRA adapters connect."""
_MOST_RANKS = {"trainer": 1 << 16, "engine": 1 << 12, "adapters": 1 << 16}
_MOST_BUCKET = 1 << 40
_DEFAULT_BUCKET = 256 << 20
_LONGEST = 200
_LONGEST_SHOWN = 60
_FEWEST_WINDOWS = 2
_HEX = re.compile(r"[0-9a-f]{0,128}")


def rank_of(hello: messages.Hello, run: str, limits: str = "") -> TrainerRank | EngineRank:
    """Return the rank described by ``hello``, for the coordinator of ``run``. Its member name is ``name/rank``.

    With ``limits`` it may publish adapters of these names only, and shares no source with ranks of other limits.

    Raises:
        AuthenticationError: ``limits`` do not admit to a rank of this role.
        ProtocolError: The protocol version differs, or a number or text is out of range.
        MembershipError: The rank belongs to another run, or uses a reserved name.
        ConfigurationError: The manifest is impossible, or a trainer gives no layout or no address.
        LayoutError: The layout is invalid.
    """
    if hello.protocol != messages.PROTOCOL:
        raise ProtocolError(
            f"the agent speaks protocol {hello.protocol}, the coordinator {messages.PROTOCOL}: install the same weightsync on both"
        )
    if hello.run != run:
        raise MembershipError(f"the agent belongs to run {hello.run!r}, but this coordinator serves run {run!r}")
    for what, text in (("name", hello.name), ("session", hello.session)):
        if not text or len(text) > _LONGEST or not text.isprintable() or "/" in text:
            raise ProtocolError(f"an agent's {what} must be 1 to {_LONGEST} printable characters without '/', not {text[:40]!r}")
    if ((hello.name == TRAINER), hello.name.startswith(_ADAPTERS)) != (hello.role == "trainer", hello.role == "adapters"):
        raise MembershipError(f"{hello.name!r} cannot be the name of an agent of role {hello.role}")
    if limits:
        if hello.role != "adapters":
            raise AuthenticationError(
                f"this token admits to publishing the adapters {limits} only, not to a rank of role {hello.role}"
            )
        shown = limits.replace("/", ":") if len(limits) <= _LONGEST_SHOWN else known_as(limits)[:32]
        hello = structs.replace(hello, name=f"{hello.name} ({shown})")
        if len(hello.name) > _LONGEST:
            raise ProtocolError(
                f"a source's name and the limits of its token have {len(hello.name)} characters; {_LONGEST} are allowed"
            )
    if not (0 <= hello.rank < hello.world_size <= _MOST_RANKS[hello.role]):
        most = _MOST_RANKS[hello.role]
        raise ProtocolError(f"{hello.name} reports rank {hello.rank} of {hello.world_size}; at most {most:,} ranks are allowed")
    if not 0 <= hello.bucket_bytes <= _MOST_BUCKET:
        raise ProtocolError(f"{hello.name} asks for buckets of {hello.bucket_bytes} bytes; at most {_MOST_BUCKET} are allowed")
    _check_texts(hello)
    member = f"{hello.name}/{hello.rank}"
    manifest = Manifest(hello.manifest)
    if len(manifest) and (hello.window_bytes or hello.takes_any):
        raise ConfigurationError(f"{member} lists tensors, but says that they are not known before a stream")
    if bool(hello.window_bytes) != bool(hello.windows) or (hello.windows and (hello.windows < _FEWEST_WINDOWS or not hello.live)):
        raise ConfigurationError(f"{member} cannot publish streams with {hello.windows} windows of {hello.window_bytes} bytes")
    if hello.role == "adapters" and (hello.windows or hello.new_epoch or not len(manifest)):
        raise ConfigurationError(f"{member} publishes adapters: it has tensors, no windows and no epochs")
    publishes = hello.role != "engine"
    source_layout = hello.layout if publishes else hello.source_layout
    if (source_layout is None) != (not hello.offers) or (hello.role == "engine" and hello.offers and not len(manifest)):
        raise ConfigurationError(f"{member} must send the layout of what others read from it and at least one transport offer")
    if publishes and source_layout is None:
        raise ConfigurationError(f"{member} must send the layout of its shards and at least one transport offer")
    hello = structs.replace(
        hello,
        session=known_as(hello.session),
        credential=known_as(hello.credential),
        no_layout=readable(hello.no_layout, 1000),
        refuted=readable(hello.refuted),
        bucket_bytes=hello.bucket_bytes or _DEFAULT_BUCKET,
        adapter=hello.adapter or "custom",
    )
    layout = None if hello.layout is None else Layout.from_columns(manifest, hello.layout)
    if publishes and layout is not None:
        return TrainerRank(hello, manifest, layout) if hello.role == "trainer" else AdapterRank(hello, manifest, layout, limits)
    served = None if source_layout is None else PublishingRank(hello, manifest, Layout.from_columns(manifest, source_layout))
    return EngineRank(hello, manifest, layout, served)


def _check_texts(hello: messages.Hello) -> None:
    """Reject texts that must not appear in status and logs.

    Raises:
        ProtocolError: A text is not printable, or a version is malformed.
    """
    hosts = [hello.host, *(offer.host for offer in hello.offers)]
    texts = [hello.adapter, *hello.transports, *(text for host in hosts for text in (host.name, host.memory))]
    texts += [text for offer in hello.offers for text in (offer.scheme, offer.address)]
    for text in texts:
        if not text.isprintable():
            raise ProtocolError(f"{hello.name} sent a text that is not printable: {text[:40]!r}")
    if hello.url and ROUTED_URL.fullmatch(hello.url) is None:
        raise ProtocolError(f"{hello.name} sent a URL that no router can use: {hello.url[:80]!r}")
    loras = [version for held in hello.loras for version in (held.version, held.spec.base)]
    for name in (*(held.version.run for held in hello.loras), *hello.taken_loras):
        check_adapter_name(name)
    for version in (hello.serving, hello.version, *loras):
        if version is None:
            continue
        hexadecimal = _HEX.fullmatch(version.manifest) and _HEX.fullmatch(version.digest)
        if not (hexadecimal and version.run.isprintable() and len(version.run) <= _LONGEST):
            raise ProtocolError(f"{hello.name} reports a malformed version: digests are hexadecimal digits")


def _adapter_of(body: messages.Publish | messages.CannotPublish) -> str:
    named = body.adapter
    return named if isinstance(named, str) else "" if named is None else named.name


def answer_agent(
    coordinator: Coordinator, rank: TrainerRank | EngineRank
) -> Callable[[messages.Body, float], Awaitable[messages.Body]]:
    """Return the handler for calls of this rank's agent: the ``handle`` of its :class:`~weightsync.protocol.calls.Calls`."""

    async def handle(body: messages.Body, timeout: float) -> messages.Body:
        try:
            return await answer(body, timeout)
        except OutOfCount as others:
            return messages.CountOn(others.count)

    async def answer(body: messages.Body, timeout: float) -> messages.Body:
        waits = isinstance(body, messages.WaitForReplicas)
        if isinstance(rank, AdapterRank) and (rank.limits or not waits):  # what replicas lack is none of a tenant's business
            if isinstance(body, RetireLora):
                rank.check(body.name)
            elif isinstance(body, messages.Publish | messages.CannotPublish):
                rank.check(_adapter_of(body))
                if isinstance(body, messages.Publish) and body.adapter is not None:
                    rank.check_scalings(body.adapter.config)
            return await coordinator.loras.handle(rank.member, body, timeout)
        match rank, body:
            case EngineRank(), LorasRefused():
                coordinator.loras.refused(rank, body)
            case EngineRank(), messages.Refuted():
                coordinator.refuted(rank.member, body.version, readable(body.reason))
            case TrainerRank(), messages.Publish():
                return messages.Published(await coordinator.publish(rank.member, body, timeout))
            case TrainerRank(), messages.CannotPublish():
                why = readable(f"{body.kind}: {body.message}")
                coordinator.cannot_publish(rank.member, body.number, why, body.step, body.count)
            case TrainerRank(), messages.EndCall():
                await coordinator.end_call(body, timeout)
            case TrainerRank(), messages.WaitForReplicas():
                return messages.ReplicaList(await coordinator.wait_for_replicas(rank.member, body, timeout))
            case TrainerRank(), StorePart():
                return await coordinator.stored.part(rank.member, body, RoundDeadline(timeout))
            case TrainerRank(), ManifestStored():
                await coordinator.stored.written(rank.member, body, RoundDeadline(timeout))
            case TrainerRank(), RelayFailing():
                link = coordinator.link_of(rank.member)
                link.failing = (readable(body.reason), link.failing[1] if link.failing else time.time()) if body.reason else None
            case _:
                raise ProtocolError(f"{rank.member} may not send {type(body).__name__} to the coordinator")
        return messages.Done()

    return handle
