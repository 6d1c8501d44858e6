"""The safetensors format: 8 bytes of little-endian length, a JSON header that long, the tensors' bytes.

Read and written here without loading tensors: a tower can be cut out of a checkpoint larger than memory.
"""

import json
import math
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BLOCK = 1 << 22
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: ``size`` bytes from byte ``start`` of ``file``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of the checkpoint in ``folder``: the index's shards, or ``model.safetensors``.

    Raises:
        FileNotFoundError: the folder has neither, or a shard is missing.
        ValueError: the index names a file outside the folder.
    """
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index}: shard {name!r} is not a plain file name; refused")
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder / name} is missing; only safetensors are read (pickled .bin and .pt never), "
                "so the folder needs model.safetensors or all shards of model.safetensors.index.json"
            )
    return [folder / name for name in names]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Name, type, shape and place of every tensor in ``file``; reads the header only."""
    with file.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= file.stat().st_size - 8:
            raise ValueError(f"{file} is not a safetensors file (header length {length}); fetch it again")
        header = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= file.stat().st_size - 8 - length:
            raise ValueError(f"{file} is cut short: {name} ends beyond the file; fetch it again")
        tensors[name] = StoredTensor(file, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
    return tensors


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """``read_header`` over all files of the checkpoint in ``folder``."""
    tensors: dict[str, StoredTensor] = {}
    for file in checkpoint_files(folder):
        tensors |= read_header(file)
    return tensors


def copy_tensors(tensors: dict[str, StoredTensor], path: Path) -> None:
    """Write ``tensors`` under their keys to ``path``, one at a time, with one block in memory."""
    # Widest types first keeps every tensor aligned to its own element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].size // max(item[1].numel, 1), item[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (offset, offset + tensor.size),
        }
        offset += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as target:
        target.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            with tensor.file.open("rb") as source:
                source.seek(tensor.start)
                _copy_exactly(source, target, tensor.size)


def _copy_exactly(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size:
        block = source.read(min(BLOCK, size))
        if not block:
            raise ValueError(f"{source.name} ended early; fetch it again")
        target.write(block)
        size -= len(block)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link ``source`` (symbolic links followed) as ``target``; copy where that cannot be done."""
    source = source.resolve()
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
