"""Checks of ``weightsync doctor``: this machine, the coordinator, optional packages. Changes nothing and never fails."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from weightsync.config import ClientSettings
from weightsync.daemon_threads import in_daemon_thread
from weightsync.distributions import how_to_install
from weightsync.errors import TransportUnavailable
from weightsync.model import milliseconds
from weightsync.protocol.round_log import size
from weightsync.protocol.tokens import is_loopback
from weightsync.releases import releases_tested
from weightsync.server.findings import Finding, Status, ask_coordinator, find_release
from weightsync.transports import registry
from weightsync.transports.hostinfo import own_address, reachable_address, text_of

_FEW_FILES = 4096
_LITTLE_SHARED_MEMORY = 1 << 30
_MAPPED_LOOPBACK = "::ffff:127.0.0.1"
_SLOW_LOOKUP, _LONGEST_LOOKUP = 0.5, 2.0  # seconds


_Outcome = tuple[Status, str] | tuple[Status, str, str]
"""Status, what was found, and its impact, where that is not the one in the table of checks."""


def examine(settings: ClientSettings) -> list[Finding]:
    """Run all checks. A check that raises becomes a finding with status ``unknown``."""
    findings: list[Finding] = []
    added = set(registry.known()) - set(registry.BUILT_IN) - set(_CHECKS)
    checks = dict(_CHECKS)
    checks |= {name: (partial(_transport, name), f"transport {name} is unavailable") for name in sorted(added)}
    for name, (check, cost) in checks.items():
        outcome: _Outcome = "missing", "cannot check without torch"
        try:
            if name not in _WITH_TORCH or importlib.util.find_spec("torch") is not None:
                outcome = check(settings) if name in _WITH_SETTINGS else check()
        except Exception as error:  # noqa: BLE001 - reported as a finding
            outcome = "unknown", f"{type(error).__name__}: {error}", "the check failed; please report this"
        status, value, *impact = outcome
        findings.append(Finding(name, status, value, impact[0] if impact else "" if status == "ok" else cost))
    return findings


def _outcome(finding: Finding) -> _Outcome:
    return finding.status, finding.value, finding.cost


def _python() -> _Outcome:
    description = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return "limited", description, "shared memory between processes and GPU transports need Linux; TCP works"
    return "ok", description


def _torch() -> _Outcome:
    if importlib.util.find_spec("torch") is None:
        return "missing", "not installed"
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return "ok", f"{torch.__version__} ({build})"


def _cores() -> _Outcome:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = text_of("/sys/fs/cgroup/cpu.max")
    limit = ""
    if quota and not quota.startswith("max"):
        allowed, period = (int(part) for part in quota.split()[:2])
        limit = f", limited to {allowed / period:g} by the container"
    return "ok" if cores > 1 else "limited", f"{cores}{limit}"


def _memory() -> _Outcome:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = text_of("/sys/fs/cgroup/memory.max") or text_of("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    if limit and limit.isdigit() and int(limit) < total:
        counts = "the published version (one copy of each trainer rank's shards) counts towards this limit"
        return "ok", f"{size(total)}, limited to {size(int(limit))} by the container", counts
    return "ok", size(total)


def _memfd() -> _Outcome:
    if not hasattr(os, "memfd_create"):
        return "missing", "not on this system"
    try:
        os.close(os.memfd_create("weightsync-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return "missing", error.strerror or str(error)
    return "ok", "available: shared memory is limited by memory alone"


def _shared_memory() -> _Outcome:
    try:
        stats = os.statvfs("/dev/shm")
    except OSError as error:
        return "limited", f"/dev/shm: {error.strerror}", "needed only if memfd is missing, and by torch's data loaders"
    total, free = stats.f_frsize * stats.f_blocks, stats.f_frsize * stats.f_bavail
    description = f"/dev/shm: {size(total)}, {size(free)} free"
    return "ok" if free >= _LITTLE_SHARED_MEMORY else "limited", description


def _gpus() -> _Outcome:
    import torch

    if not torch.cuda.is_available():
        return "missing", "none"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    kinds = ", ".join(f"{names.count(kind)} x {kind}" for kind in sorted(set(names)))
    driver = (text_of("/proc/driver/nvidia/version") or "unknown").splitlines()[0]
    return "ok", f"{kinds}; driver: {driver}"


def _peer_access() -> _Outcome:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return "missing", "fewer than two GPUs", "nothing to exchange between GPUs"
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    able = sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
    description = f"{able} of {len(pairs)} ordered pairs"
    if able < len(pairs):
        return "limited", description, "the other pairs exchange weights through CPU memory (about 55 GB/s instead of 390)"
    return "ok", description


def _nccl() -> _Outcome:
    import torch
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available() and torch.cuda.is_available()):
        return "missing", "not in this build of torch, or no GPU"
    release: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return "ok", ".".join(map(str, release))


def _transport(name: str) -> _Outcome:
    try:
        examined = registry.transport(name)
    except TransportUnavailable as error:
        return "missing", str(error)
    problem = examined.unavailable()
    if problem is not None:
        return "missing", problem
    description, limit = examined.condition()
    return ("limited", description, limit) if limit else ("ok", description)


def _open_files() -> _Outcome:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return "ok" if soft >= _FEW_FILES else "limited", f"{soft} (up to {hard})"


def _bind(family: socket.AddressFamily, host: str) -> _Outcome:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            probe.listen(1)
    except OSError as error:
        return "missing", f"{host}: {error.strerror}"
    return "ok", f"can listen on {host}"


def _reverse_lookup() -> _Outcome:
    """Time the lookup that torch makes for each connection of a process group."""
    started = time.monotonic()
    lookup = in_daemon_thread(partial(socket.getnameinfo, (_MAPPED_LOOPBACK, 0), 0), "weightsync-lookup")
    wait([lookup], _LONGEST_LOOKUP)
    seconds = time.monotonic() - started
    if seconds > _SLOW_LOOKUP:
        return "limited", f"{_MAPPED_LOOPBACK} takes {'' if lookup.done() else 'more than '}{seconds:.1f} s"
    return "ok", f"{_MAPPED_LOOPBACK} takes {milliseconds(seconds)}"


def _package(name: str) -> _Outcome:
    try:
        return "ok", version(name)
    except PackageNotFoundError:
        return "missing", "not installed"


def _vllm() -> _Outcome:
    found = find_release("vllm")
    return _outcome(found) if found.status != "missing" else ("missing", "not installed")


def _data_interface(settings: ClientSettings) -> _Outcome:
    """Find the address at which a trainer rank of this machine would serve its shards over TCP, as the trainer does."""
    where = settings.coordinator
    try:
        if settings.data_host is not None:
            return "ok", f"{own_address(settings.data_host)} (WEIGHTSYNC_DATA_HOST={settings.data_host})"
        if is_loopback(where.host):
            return (
                "ok", "127.0.0.1, because the coordinator is on loopback: reachable by engines of this machine only. For "
                "other engines set WEIGHTSYNC_DATA_HOST to an interface or address",
            )  # fmt: skip
        address = reachable_address(where.host, where.port)
    except TransportUnavailable as error:
        return "missing", str(error), "a trainer here cannot serve engines over TCP: set WEIGHTSYNC_DATA_HOST"
    return "ok", f"{address}, which has the route to {where.host}; WEIGHTSYNC_DATA_HOST selects another"


_CHECKS: dict[str, tuple[Callable[..., _Outcome], str]] = {
    "python": (_python, ""),
    "torch": (_torch, "only the coordinator can run here, no trainer or engine: pip install torch"),
    "cpu cores": (_cores, "ranks on this machine copy and digest one after the other"),
    "memory": (_memory, ""),
    "memfd": (_memfd, "shards are placed in /dev/shm instead, whose size is limited"),
    "shared memory": (_shared_memory, "matters only if memfd is missing; then enlarge it (docker run --shm-size=...)"),
    "gpus": (_gpus, "weights stay in CPU memory: only shared memory and TCP are available"),
    "peer access": (_peer_access, "GPUs on one host exchange weights through CPU memory"),
    "nccl": (_nccl, "transport nccl, which connects GPUs of several hosts, is unavailable"),
    "nixl": (partial(_transport, "nixl"), "transport nixl, which reads memory of other hosts by RDMA, is unavailable"),
    "open files": (_open_files, "a coordinator needs one per agent, a TCP reader one per trainer rank: ulimit -n 65536"),
    "loopback": (
        partial(_bind, socket.AF_INET, "127.0.0.1"), "the coordinator cannot listen, so nothing works on this machine alone"
    ),
    "reverse lookup": (
        _reverse_lookup,
        "torch makes such a lookup for each connection of a process group, so joins over gloo or NCCL wait for it: add "
        f"`{_MAPPED_LOOPBACK} localhost` to /etc/hosts, and such a line for each host of the run, or use a faster DNS resolver",
    ),
    "ipv6": (partial(_bind, socket.AF_INET6, "::1"), "coordinator and ranks need IPv4 addresses"),
    "numba": (partial(_package, "numba"), "digests and copies on the CPU cannot be compiled: pip install numba"),
    "ray": (partial(_package, "ray"), f"needed only for weightsync-ray: {how_to_install('weightsync_ray')}"),
    "vllm": (_vllm, f"needed only to serve with vLLM; tested: {releases_tested('vllm')}"),
    "coordinator": (lambda settings: _outcome(ask_coordinator("coordinator", settings)), ""),
    "data interface": (_data_interface, ""),
}  # fmt: skip
"""Each check, and the impact if its status is not ``ok``."""
_WITH_TORCH, _WITH_SETTINGS = ("gpus", "peer access", "nccl", "nixl"), ("coordinator", "data interface")
"""Checks that need torch, and those that are given the settings."""
