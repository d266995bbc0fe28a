"""Element types by torch's names, with their sizes in bytes and their names in files."""

from __future__ import annotations

from weightsync.errors import ConfigurationError

ITEMSIZE: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64"), 8),
}
"""Bytes of an element, by torch's attribute name (``torch.bfloat16`` is ``"bfloat16"``)."""
SAFETENSORS_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "int16": "I16",
    "float16": "F16", "bfloat16": "BF16", "int32": "I32", "float32": "F32", "int64": "I64", "float64": "F64",
}  # fmt: skip
"""The name of each in a safetensors file."""


def itemsize(dtype: str) -> int:
    """Return the bytes of an element of ``dtype``.

    Raises:
        ConfigurationError: The name is not in :data:`ITEMSIZE`.
    """
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        raise ConfigurationError(f"unknown dtype {dtype!r}; known: {', '.join(sorted(ITEMSIZE))}") from None
