"""The few calls of the CUDA driver that sharing device memory between processes needs, through ctypes. No pickle.

A pointer is exported by the handle of the whole allocation that holds it. Handles are opened in the context of the *reader's*
device: a mapping made under the publisher's device index belongs to another context, and a kernel that touches it faults.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

from weightsync.errors import PeerLost, ProtocolError, StaleSource, TransportError, TransportUnavailable

HANDLE_BYTES = 64
"""Bytes of a CUDA IPC memory handle."""

_MEMORY_TYPE, _ON_DEVICE = 2, 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE
_BUFFER_ID, _DEVICE_ORDINAL, _IPC_CAPABLE = 7, 9, 10  # CU_POINTER_ATTRIBUTE_*
_LAZY_PEER_ACCESS = 1
_INVALID_VALUE, _NOT_FOUND, _INVALID_HANDLE, _INVALID_CONTEXT, _MAP_FAILED = 1, 500, 400, 201, 205
_PEER_UNSUPPORTED, _PEER_ENABLED = 217, 704


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@dataclass(frozen=True)
class Allocation:
    """One allocation of device memory. ``buffer_id`` is never used twice in a process, so equal ones are the same memory."""

    base: int
    nbytes: int
    buffer_id: int
    device: int
    exportable: bool
    """Whether a handle can be made: false for expandable segments and memory pools, which are mapped in another way."""

    @property
    def end(self) -> int:
        """Address of the first byte behind it."""
        return self.base + self.nbytes


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportUnavailable(f"CUDA IPC needs NVIDIA's driver on this machine: {error}") from error
    library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint)
    library.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), ctypes.c_uint64)
    library.cuIpcCloseMemHandle.argtypes = (ctypes.c_uint64,)
    library.cuMemGetAddressRange_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64)
    library.cuPointerGetAttribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    library.cuMemAlloc_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)
    library.cuMemFree_v2.argtypes = (ctypes.c_uint64,)
    library.cuCtxPushCurrent_v2.argtypes = (ctypes.c_void_p,)
    library.cuCtxEnablePeerAccess.argtypes = (ctypes.c_void_p, ctypes.c_uint)
    library.cuDevicePrimaryCtxRetain.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int)
    code = library.cuInit(0)
    if code:
        raise TransportUnavailable(f"the CUDA driver on this machine does not start: {_named(library, code)}")
    return library


def driver_problem() -> str | None:
    """Why device memory cannot be shared on this machine, or ``None``."""
    try:
        count = ctypes.c_int(0)
        _check(_driver().cuDeviceGetCount(ctypes.byref(count)), "counting the devices")
    except TransportError as error:
        return str(error)
    return None if count.value else "CUDA IPC needs a CUDA device that this process may see"


def _named(library: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(name))
    return f"{name.value.decode() if name.value else 'CUDA error'} ({code})"


def _check(code: int, what: str) -> None:
    if code:
        raise TransportError(f"{what}: {_named(_driver(), code)}")


@lru_cache(maxsize=64)
def _context(device: int) -> int:
    """The device's primary context, which torch uses too; kept for the process's life."""
    context = ctypes.c_void_p()
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"taking the context of CUDA device {device}")
    return context.value or 0


@contextmanager
def _on(device: int) -> Iterator[ctypes.CDLL]:
    library = _driver()
    _check(library.cuCtxPushCurrent_v2(_context(device)), f"entering the context of CUDA device {device}")
    try:
        yield library
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _attribute(library: ctypes.CDLL, kind: int, address: int) -> int:
    value = ctypes.c_uint64(0)
    code = library.cuPointerGetAttribute(ctypes.byref(value), kind, address)
    if code:
        raise StaleSource(f"device memory at {address:#x} is not allocated (any more): {_named(library, code)}")
    return value.value


def allocation_of(address: int, device: int) -> Allocation:
    """The allocation that holds device ``address``, as it is now.

    Raises :class:`~weightsync.errors.StaleSource` if nothing is allocated there.
    """
    base, size = ctypes.c_uint64(0), ctypes.c_size_t(0)
    with _on(device) as library:
        code = library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)
        if code in (_INVALID_VALUE, _NOT_FOUND):
            raise StaleSource(f"device memory at {address:#x} is not allocated (any more): {_named(library, code)}")
        _check(code, f"looking for the allocation of {address:#x}")
        return Allocation(
            base=base.value,
            nbytes=size.value,
            buffer_id=_attribute(library, _BUFFER_ID, address),
            device=_attribute(library, _DEVICE_ORDINAL, address) & 0xFFFFFFFF,
            exportable=bool(_attribute(library, _IPC_CAPABLE, address) & 0xFF),
        )


class DeviceMemory:
    """Memory of a CUDA device that other processes can map, whatever torch's allocator is told to do.

    Args:
        nbytes: Its size.
        device: The CUDA device, with its index.

    Raises:
        TransportUnavailable: The device has not enough memory free.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device, self.nbytes = device, nbytes
        address = ctypes.c_uint64(0)
        with _on(device.index) as library:
            code = library.cuMemAlloc_v2(ctypes.byref(address), max(nbytes, 1))
            if code:
                raise TransportUnavailable(f"{nbytes:,} bytes of {device} cannot be allocated: {_named(library, code)}")
        self.address = address.value

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """See CUDA's array interface, version 3: bytes."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def free(self) -> None:
        """Free it. Safe twice. Nothing of this process may use it; a process that has mapped it keeps it."""
        address, self.address = self.address, 0
        if address:
            with _on(self.device.index) as library:
                _check(library.cuMemFree_v2(address), "freeing device memory")


def device_at(address: int) -> int | None:
    """Return the CUDA device in whose memory ``address`` lies, or ``None`` for memory of the host."""
    if driver_problem() is not None:
        return None
    kind, device = ctypes.c_uint64(0), ctypes.c_uint64(0)
    ask = _driver().cuPointerGetAttribute
    if ask(ctypes.byref(kind), _MEMORY_TYPE, address) or kind.value & 0xFFFFFFFF != _ON_DEVICE:
        return None
    _check(ask(ctypes.byref(device), _DEVICE_ORDINAL, address), f"looking for the device of {address:#x}")
    return device.value & 0xFFFFFFFF


def still_allocated(allocations: Sequence[Allocation], device: int) -> bool:
    """Whether each of them is the allocation that it was: about a microsecond each, as a model can have ten thousand."""
    value = ctypes.c_uint64(0)
    buffer_id = ctypes.byref(value)
    with _on(device) as library:
        ask = library.cuPointerGetAttribute
        for allocation in allocations:
            if ask(buffer_id, _BUFFER_ID, allocation.base) or value.value != allocation.buffer_id:
                return False
    return True


def export_handle(allocation: Allocation) -> bytes:
    """The handle, 64 bytes, under which another process of this machine can map ``allocation``.

    A process that has it can read and write that memory. Raises :class:`~weightsync.errors.TransportUnavailable` for memory that
    has none.
    """
    handle = _Handle()
    with _on(allocation.device) as library:
        code = library.cuIpcGetMemHandle(ctypes.byref(handle), allocation.base) if allocation.exportable else _INVALID_VALUE
        if code:
            raise TransportUnavailable(
                f"device memory at {allocation.base:#x} ({allocation.nbytes:,} bytes, CUDA device {allocation.device}) cannot be "
                f"shared by CUDA IPC ({_named(library, code)}): expandable segments and memory pools cannot. Allocate weights "
                "without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True or backend:cudaMallocAsync, or use another transport"
            )
    return bytes(handle.reserved)


def open_handle(handle: bytes, device: int) -> int:
    """Map the allocation behind ``handle`` into the context of ``device``, the reader's own; its address there.

    Raises :class:`~weightsync.errors.PeerLost` if the publisher's memory is gone, and
    :class:`~weightsync.errors.TransportUnavailable` if ``device`` cannot reach it.
    """
    if len(handle) != HANDLE_BYTES:
        raise ProtocolError(f"a CUDA IPC handle has {HANDLE_BYTES} bytes, this one {len(handle)}")
    address = ctypes.c_uint64(0)
    with _on(device) as library:
        code = library.cuIpcOpenMemHandle_v2(
            ctypes.byref(address), _Handle((ctypes.c_ubyte * HANDLE_BYTES)(*handle)), _LAZY_PEER_ACCESS
        )
        if code in (_INVALID_HANDLE, _INVALID_VALUE, _MAP_FAILED):
            raise PeerLost(f"the publisher's device memory cannot be mapped (any more): {_named(library, code)}")
        if code in (_PEER_UNSUPPORTED, _INVALID_CONTEXT):
            raise TransportUnavailable(
                f"CUDA device {device} cannot reach the publisher's memory: {_named(library, code)}; use another transport"
            )
        _check(code, f"mapping the publisher's memory on CUDA device {device}")
    return address.value


def reach_device(source: int, device: int) -> None:
    """Let kernels on ``device`` read what this process has allocated on ``source``, another of its devices.

    Raises :class:`~weightsync.errors.TransportUnavailable` if the two devices cannot reach each other.
    """
    if source == device:
        return
    with _on(device) as library:
        code = library.cuCtxEnablePeerAccess(_context(source), 0)
        if code == _PEER_UNSUPPORTED:
            raise TransportUnavailable(f"CUDA device {device} cannot read memory of device {source}; use another transport")
        if code != _PEER_ENABLED:
            _check(code, f"letting CUDA device {device} read memory of device {source}")


def close_handle(address: int, device: int) -> None:
    """Unmap what :func:`open_handle` mapped. Nothing may be using it."""
    with _on(device) as library:
        _check(library.cuIpcCloseMemHandle(address), "unmapping a publisher's memory")
