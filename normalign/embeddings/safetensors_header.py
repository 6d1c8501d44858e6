"""The header of a safetensors file: 8 bytes of little-endian length, then JSON that long, then the tensors' bytes."""

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

from normalign.embeddings.ranges import ByteSource, read_bytes

MAX_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: ``size`` bytes from byte ``start`` of ``source``."""

    source: ByteSource
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(source: ByteSource) -> dict[str, StoredTensor]:
    """Name, type, shape and place of every tensor in ``source``; reads the header only.

    Raises:
        ValueError: not a safetensors file, or one that was cut short.
    """
    (length,) = struct.unpack("<Q", read_bytes(source, 0, 8))
    try:
        if not 2 <= length <= min(source.size - 8, MAX_HEADER):
            raise ValueError(f"header length {length} in a file of {source.size} bytes")
        header = json.loads(read_bytes(source, 8, length))
        header.pop("__metadata__", None)
        tensors = {name: _placed(source, 8 + length, entry) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{source.name} is not a whole safetensors file ({error}); fetch it again") from error
    for name, tensor in tensors.items():
        if not 8 + length <= tensor.start <= tensor.start + tensor.size <= source.size:
            raise ValueError(f"{source.name} is cut short: {name} ends beyond the file; fetch it again")
    return tensors


def _placed(source: ByteSource, data: int, entry: dict[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"a tensor of type {dtype!r} and shape {list(shape)} at {begin!r} to {end!r}")
    return StoredTensor(source, dtype, shape, data + begin, end - begin)
