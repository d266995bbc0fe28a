"""Checks of ``weightsync doctor``: this machine, the coordinator, optional packages. Changes nothing and never fails."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec.structs import replace

from weightsync.config import ClientSettings
from weightsync.errors import TransportUnavailable
from weightsync.model import milliseconds
from weightsync.protocol.tokens import is_loopback
from weightsync.releases import releases_tested
from weightsync.server.findings import Finding, ask_coordinator, find_release
from weightsync.transports.hostinfo import own_address, reachable_address

_GIB = 1 << 30
_FEW_FILES = 4096
_LITTLE_SHARED_MEMORY = 1 * _GIB
_MAPPED_LOOPBACK = "::ffff:127.0.0.1"
_SLOW_LOOKUP, _LONGEST_LOOKUP = 0.5, 2.0  # seconds


def examine(settings: ClientSettings) -> list[Finding]:
    """Run all checks. A check that raises becomes a finding with status ``unknown``."""
    findings: list[Finding] = []
    network: dict[str, Callable[[str], Finding]] = {name: partial(check, settings=settings) for name, check in _NETWORK.items()}
    for name, check in {**_CHECKS, **network}.items():
        try:
            findings.append(check(name))
        except Exception as error:  # noqa: BLE001 - reported as a finding
            findings.append(Finding(name, "unknown", f"{type(error).__name__}: {error}", "the check failed; please report this"))
    return findings


def _size(nbytes: float) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / 2**20:.0f} MiB"


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _python(name: str) -> Finding:
    description = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Finding(name, "limited", description, "shared memory between processes and GPU transports need Linux; TCP works")
    return Finding(name, "ok", description)


def _torch(name: str) -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding(
            name, "missing", "not installed", "only the coordinator can run here, no trainer or engine: pip install torch"
        )
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding(name, "ok", f"{torch.__version__} ({build})")


def _cores(name: str) -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _text("/sys/fs/cgroup/cpu.max")
    limit = ""
    if quota and not quota.startswith("max"):
        allowed, period = (int(part) for part in quota.split()[:2])
        limit = f", limited to {allowed / period:g} by the container"
    return (
        Finding(name, "ok", f"{cores}{limit}")
        if cores > 1
        else Finding(name, "limited", f"{cores}{limit}", "ranks on this machine copy and digest one after the other")
    )


def _memory(name: str) -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _text("/sys/fs/cgroup/memory.max") or _text("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    if limit and limit.isdigit() and int(limit) < total:
        return Finding(
            name, "ok", f"{_size(total)}, limited to {_size(int(limit))} by the container",
            "the published version (one copy of each trainer rank's shards) counts towards this limit",
        )  # fmt: skip
    return Finding(name, "ok", _size(total))


def _memfd(name: str) -> Finding:
    cost = "shards are placed in /dev/shm instead, whose size is limited"
    if not hasattr(os, "memfd_create"):
        return Finding(name, "missing", "not on this system", cost)
    try:
        os.close(os.memfd_create("weightsync-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return Finding(name, "missing", error.strerror or str(error), cost)
    return Finding(name, "ok", "available: shared memory is limited by memory alone")


def _shared_memory(name: str) -> Finding:
    try:
        stats = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding(
            name, "limited", f"/dev/shm: {error.strerror}", "needed only if memfd is missing, and by torch's data loaders"
        )
    total, free = stats.f_frsize * stats.f_blocks, stats.f_frsize * stats.f_bavail
    description = f"/dev/shm: {_size(total)}, {_size(free)} free"
    if free < _LITTLE_SHARED_MEMORY:
        return Finding(
            name, "limited", description, "matters only if memfd is missing; then enlarge it (docker run --shm-size=...)"
        )
    return Finding(name, "ok", description)


def _gpus(name: str) -> Finding:
    cost = "weights stay in CPU memory: only shared memory and TCP are available"
    if importlib.util.find_spec("torch") is None:
        return Finding(name, "missing", "cannot check without torch", cost)
    import torch

    if not torch.cuda.is_available():
        return Finding(name, "missing", "none", cost)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    kinds = ", ".join(f"{names.count(kind)} x {kind}" for kind in sorted(set(names)))
    return Finding(name, "ok", f"{kinds}; driver: {_driver()}")


def _driver() -> str:
    return (_text("/proc/driver/nvidia/version") or "unknown").splitlines()[0]


def _peer_access(name: str) -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding(name, "missing", "cannot check without torch", "GPUs on one host exchange weights through CPU memory")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return Finding(name, "missing", "fewer than two GPUs", "nothing to exchange between GPUs")
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    able = sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
    description = f"{able} of {len(pairs)} ordered pairs"
    if able < len(pairs):
        return Finding(
            name, "limited", description, "the other pairs exchange weights through CPU memory (about 55 GB/s instead of 390)"
        )
    return Finding(name, "ok", description)


def _nccl(name: str) -> Finding:
    cost = "transport nccl, which connects GPUs of several hosts, is unavailable"
    if importlib.util.find_spec("torch") is None:
        return Finding(name, "missing", "cannot check without torch", cost)
    import torch
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available() and torch.cuda.is_available()):
        return Finding(name, "missing", "not in this build of torch, or no GPU", cost)
    release: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return Finding(name, "ok", ".".join(map(str, release)))


def _nixl(name: str) -> Finding:
    cost = "transport nixl, which reads memory of other hosts by RDMA, is unavailable"
    if importlib.util.find_spec("torch") is None:
        return Finding(name, "missing", "cannot check without torch", cost)
    from weightsync.transports.nixl.agent import nixl_problem, rdma_devices

    problem = nixl_problem()
    if problem is not None:
        return Finding(name, "missing", problem, cost)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = rdma_devices()
    if not devices:
        return Finding(name, "limited", "no RDMA device has a link", "between hosts NIXL uses TCP; transport tcp is faster")
    description = f"RDMA: {', '.join(devices)}"
    if not Path("/sys/module/nvidia_peermem").exists():
        return Finding(name, "limited", description, "GPU memory crosses host memory (no GPUDirect): modprobe nvidia_peermem")
    if soft != resource.RLIM_INFINITY:
        return Finding(name, "limited", description, f"only {soft:,} bytes may be registered: ulimit -l unlimited")
    return Finding(name, "ok", description)


def _open_files(name: str) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    description = f"{soft} (up to {hard})"
    if soft < _FEW_FILES:
        return Finding(
            name, "limited", description, "a coordinator needs one per agent, a TCP reader one per trainer rank: ulimit -n 65536"
        )
    return Finding(name, "ok", description)


def _bind(name: str, family: socket.AddressFamily, host: str, cost: str) -> Finding:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            probe.listen(1)
    except OSError as error:
        return Finding(name, "missing", f"{host}: {error.strerror}", cost)
    return Finding(name, "ok", f"can listen on {host}")


def _reverse_lookup(name: str) -> Finding:
    """Time the lookup that torch makes for each connection of a process group."""
    over, started = threading.Event(), time.monotonic()

    def look_up() -> None:
        with suppress(OSError):
            socket.getnameinfo((_MAPPED_LOOPBACK, 0), 0)
        over.set()

    threading.Thread(target=look_up, daemon=True).start()
    over.wait(_LONGEST_LOOKUP)
    seconds = time.monotonic() - started
    if seconds > _SLOW_LOOKUP:
        return Finding(
            name, "limited", f"{_MAPPED_LOOPBACK} takes {'' if over.is_set() else 'more than '}{seconds:.1f} s",
            "torch makes such a lookup for each connection of a process group, so joins over gloo or NCCL wait for it: add "
            f"`{_MAPPED_LOOPBACK} localhost` to /etc/hosts, and such a line for each host of the run, or use a faster DNS resolver",
        )  # fmt: skip
    return Finding(name, "ok", f"{_MAPPED_LOOPBACK} takes {milliseconds(seconds)}")


def _package(name: str, cost: str) -> Finding:
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return Finding(name, "missing", "not installed", cost)


def _vllm(name: str) -> Finding:
    found = find_release(name)
    needless = f"needed only to serve with vLLM; tested: {releases_tested(name)}"
    return found if found.status != "missing" else replace(found, value="not installed", cost=needless)


def _data_interface(name: str, settings: ClientSettings) -> Finding:
    """Find the address at which a trainer rank of this machine would serve its shards over TCP, as the trainer does."""
    where = settings.coordinator
    try:
        if settings.data_host is not None:
            return Finding(name, "ok", f"{own_address(settings.data_host)} (WEIGHTSYNC_DATA_HOST={settings.data_host})")
        if is_loopback(where.host):
            return Finding(
                name, "ok", "127.0.0.1, because the coordinator is on loopback: reachable by engines of this machine only. For "
                "other engines set WEIGHTSYNC_DATA_HOST to an interface or address",
            )  # fmt: skip
        address = reachable_address(where.host, where.port)
    except TransportUnavailable as error:
        return Finding(name, "missing", str(error), "a trainer here cannot serve engines over TCP: set WEIGHTSYNC_DATA_HOST")
    return Finding(name, "ok", f"{address}, which has the route to {where.host}; WEIGHTSYNC_DATA_HOST selects another")


_CHECKS: dict[str, Callable[[str], Finding]] = {
    "python": _python,
    "torch": _torch,
    "cpu cores": _cores,
    "memory": _memory,
    "memfd": _memfd,
    "shared memory": _shared_memory,
    "gpus": _gpus,
    "peer access": _peer_access,
    "nccl": _nccl,
    "nixl": _nixl,
    "open files": _open_files,
    "loopback": partial(
        _bind, family=socket.AF_INET, host="127.0.0.1", cost="the coordinator cannot listen, so nothing works on this machine alone"
    ),
    "reverse lookup": _reverse_lookup,
    "ipv6": partial(_bind, family=socket.AF_INET6, host="::1", cost="coordinator and ranks need IPv4 addresses"),
    "numba": partial(_package, cost="digests and copies on the CPU cannot be compiled: pip install numba"),
    "ray": partial(_package, cost="needed only for weightsync.ray: pip install '.[ray]' in a clone of weightsync"),
    "vllm": _vllm,
}

_NETWORK: dict[str, Callable[..., Finding]] = {
    "coordinator": ask_coordinator,
    "data interface": _data_interface,
}
