"""Element types by torch's names, with their sizes in bytes."""

from __future__ import annotations

from weightsync.errors import ConfigurationError

ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Bytes of an element, by torch's attribute name (``torch.bfloat16`` is ``"bfloat16"``)."""


def itemsize(dtype: str) -> int:
    """Return the bytes of an element of ``dtype``.

    Raises:
        ConfigurationError: The name is not in :data:`ITEMSIZE`.
    """
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        raise ConfigurationError(f"unknown dtype {dtype!r}; known: {', '.join(sorted(ITEMSIZE))}") from None
