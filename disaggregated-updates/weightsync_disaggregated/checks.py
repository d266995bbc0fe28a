"""What is refused before any collective begins: pure functions of a request and the engine's manifest.

A trainer broadcasts while its request runs, so a request that would fail half way leaves it waiting. Everything that can be known
from the request alone is looked at here, sizes included, before anything is allocated.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import numpy as np

from weightsync.arrays import Bools, UInt64
from weightsync.errors import ConfigurationError, ManifestMismatch, VerificationError, few
from weightsync.model import FIRST_EPOCH, ITEMSIZE, Manifest, Version, parse_label
from weightsync.model.version import fold
from weightsync_disaggregated.requests import InitGroupRequest, Tensors, UpdateRequest

Packing = Literal["elements", "bytes"]
"""How a flattened bucket is laid out: LMDeploy's, of one dtype, or SGLang's, of bytes. See :func:`check_bucket`."""


def check_group(request: InitGroupRequest, ranks: int, known: Collection[str], backends: Collection[str]) -> None:
    """Raise :class:`~weightsync.errors.ConfigurationError` for a group that cannot come about."""
    if request.group_name in known:
        raise ConfigurationError(f"group {request.group_name!r} is already initialized; destroy it first, or use another name")
    if request.backend not in backends:
        raise ConfigurationError(f"backend {request.backend!r} is not available here; available: {', '.join(sorted(backends))}")
    if request.rank_offset + ranks > request.world_size:
        raise ConfigurationError(
            f"{ranks} engine ranks from rank {request.rank_offset} on do not fit {request.group_name!r}, a world of "
            f"{request.world_size}"
        )


def check_networks(networks: Iterable[str]) -> None:
    """Raise :class:`~weightsync.errors.ConfigurationError` for what is no network, as ``192.0.2.0/24`` is one."""
    for network in networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise ConfigurationError(f"{network!r} is not a network: {error}; write it as 192.0.2.0/24") from None


def check_address(address: str, networks: Collection[str]) -> None:
    """Raise :class:`~weightsync.errors.ConfigurationError` unless ``address`` is in one of ``networks``; without any, all are fine.

    With networks a name is refused too: who owns it decides where it leads.
    """
    if not networks:
        return
    try:
        place = ipaddress.ip_address(address)
    except ValueError:
        raise ConfigurationError(
            f"master_address {address[:200]!r} is a name; this server takes addresses, in {', '.join(networks)}"
        ) from None
    if not any(place in ipaddress.ip_network(network) for network in networks):
        raise ConfigurationError(f"master_address {place} is in none of the networks that this server takes: {', '.join(networks)}")


def check_bucket(update: UpdateRequest, manifest: Manifest, max_bytes: int, packing: Packing) -> tuple[int, ...]:
    """Check a bucket's tensors. Returns their indices in ``manifest``. One tensor may have more than ``max_bytes``, several not.

    A flattened bucket of ``elements`` is a vector of one dtype, with offsets in elements: mixed dtypes are refused. One of
    ``bytes`` is a vector of uint8 without padding, with offsets in bytes. With one dtype they are the same bytes on the wire.
    Raises :class:`~weightsync.errors.ConfigurationError` or :class:`~weightsync.errors.ManifestMismatch`.
    """
    if not update.names and not update.finished:
        raise ConfigurationError("an update without tensors does nothing; with finished=true it would finalize")
    indices = _indices(update, manifest)
    dtypes = set(update.dtypes)
    if update.load_format == "flattened_bucket" and packing == "elements" and len(dtypes) > 1:
        raise ConfigurationError(f"a flattened bucket holds one dtype, not {', '.join(sorted(dtypes))}; send one bucket for each")
    total = sum(manifest[index].nbytes for index in indices)
    if total > max_bytes and len(indices) > 1:
        raise ConfigurationError(f"a bucket of {total:,} bytes; this server stages {max_bytes:,} at most: send smaller ones")
    return indices


def check_tensors(tensors: Tensors, manifest: Manifest, *, partial: bool) -> None:
    """Raise unless an update of ``tensors`` fits ``manifest``, and is complete or ``partial``. Nothing is paused for this.

    Raises :class:`~weightsync.errors.ConfigurationError` or :class:`~weightsync.errors.ManifestMismatch`.
    """
    known = np.zeros(len(manifest), np.bool_)
    known[list(_indices(tensors, manifest))] = True
    missing = [manifest[int(index)].name for index in np.flatnonzero(~known)]
    if missing and not partial:
        raise ManifestMismatch(f"{len(missing)} of the engine's {len(manifest)} tensors are not there to be sent: {few(missing)}")
    if not known.any():
        raise ConfigurationError("an update without tensors does nothing")


def _indices(tensors: Tensors, manifest: Manifest) -> tuple[int, ...]:
    names, dtypes, shapes = tensors.names, tensors.dtypes, tensors.shapes
    if not len(names) == len(dtypes) == len(shapes):
        raise ConfigurationError(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: there must be as many of each"
        )
    if len(set(names)) != len(names):
        raise ConfigurationError(f"a tensor is named twice: {few([n for n, count in Counter(names).items() if count > 1])}")
    unknown = [name for name in names if name not in manifest.index]
    if unknown:
        raise ManifestMismatch(f"{len(unknown)} tensors are unknown to the engine: {few(unknown)}")
    bad = sorted(set(dtypes) - set(ITEMSIZE))
    if bad:
        raise ConfigurationError(f"unknown dtypes {few(bad)}; known: {', '.join(sorted(ITEMSIZE))}")
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        spec = manifest[manifest.index[name]]
        if tuple(shape) != spec.shape:
            raise ManifestMismatch(f"shape of {name}: {shape} sent, the engine has {list(spec.shape)}")
        if dtype != spec.dtype:
            raise ManifestMismatch(f"dtype of {name}: {dtype} sent, the engine has {spec.dtype}; convert it before sending")
    return tuple(manifest.index[name] for name in names)


def parse_version(label: str | None, run: str, last: int, epoch: int = FIRST_EPOCH) -> tuple[str, int, int]:
    """Run, number and epoch of a label: ``"7"``, ``"my-run@7"``, ``"my-run.2@7"``.

    Without a label it is the number after ``last``. What the label does not say is ``run`` and ``epoch``.

    Raises :class:`~weightsync.errors.ConfigurationError` for anything else.
    """
    if label is None:
        return run, last + 1, epoch
    parsed = parse_label(label) if re.fullmatch(r"(?:[A-Za-z0-9_.:/-]{1,200}@)?[0-9]{1,18}", label) else None
    if parsed is None or parsed[0] == "":
        raise ConfigurationError(f"{label!r} is not a version; write a number, RUN@NUMBER or RUN.EPOCH@NUMBER")
    named, parsed_number, number = parsed
    return (run, number, epoch) if named is None else (named, number, parsed_number)


def check_digests(
    manifest: Manifest,
    held: UInt64,
    known: Bools,
    digest: str | None,
    digests: Mapping[str, str] | None,
) -> None:
    """Compare the digests that a rank holds with what the sender says, by tensor, as a whole, or both.

    ``known[i]`` says whether tensor ``i`` was received. Raises :class:`~weightsync.errors.VerificationError` naming what differs,
    :class:`~weightsync.errors.ConfigurationError` for digests that do not speak of exactly the tensors that were received.
    """
    if digests is not None:
        check_named(manifest, known, digests)
        wrong = sorted(name for name, text in digests.items() if int(held[manifest.index[name]]) != int(text, 16))
        if wrong:
            raise VerificationError(f"{len(wrong)} of {len(digests)} tensors are not what was sent: {few(wrong)}")
    if digest is not None and fold(held[known]) != digest:
        raise VerificationError(f"the tensors fold to {fold(held[known])}, not to {digest}: they are not what was sent")


class Committed:
    """The digest of every tensor of the last committed version, so that a partial update can name the whole."""

    def __init__(self) -> None:
        self._digests = np.zeros(0, np.uint64)
        self._verified = np.zeros(0, np.bool_)

    def complete(self, manifest: Manifest, held: UInt64, known: Bools) -> UInt64:
        """The digests of all tensors: of those that were sent as they are ``held``, of the others as they were committed.

        Raises :class:`~weightsync.errors.VerificationError` if a tensor that was not sent could be read back and has changed.
        """
        if known.all():
            return held
        before = self._digests
        changed = np.flatnonzero(~known & (held != 0) & (held != before))
        if len(changed):
            names = [manifest[int(index)].name for index in changed]
            raise VerificationError(f"{len(names)} tensors changed that were not sent: {few(names)}; send all tensors")
        return np.where(known, held, before)

    def describe_rest(self, known: Bools, last: Version | None, *, read_again: bool) -> str:
        """For people: what is known of the tensors that were not sent; empty if all were."""
        rest = int((~known).sum())
        if not rest:
            return ""
        how = "read again and unchanged" if read_again else "not read again"
        bare = int((~known & ~self._verified).sum())
        return f"; the other {rest} are those of {last}, {how}" + (f", {bare} of them never verified" if bare else "")

    def take(self, digests: UInt64, known: Bools, *, verified: bool) -> None:
        """These ``digests`` are committed; ``known`` says which tensors were sent."""
        before = self._verified if len(self._verified) else np.zeros(len(known), np.bool_)
        self._digests, self._verified = digests, np.where(known, verified, before)


def check_named(manifest: Manifest, known: Bools, digests: Mapping[str, str]) -> None:
    """Raise :class:`~weightsync.errors.ConfigurationError` unless ``digests`` names each received tensor, and no other."""
    named = np.zeros(len(manifest), np.bool_)
    for name in digests:
        index = manifest.index.get(name)
        if index is None or not known[index]:
            raise ConfigurationError(f"there is a digest for {name!r}, which was not received")
        named[index] = True
    bare = [manifest[int(i)].name for i in np.flatnonzero(known & ~named)]
    if bare:
        raise ConfigurationError(f"there is no digest for {len(bare)} received tensors: {few(bare)}")
