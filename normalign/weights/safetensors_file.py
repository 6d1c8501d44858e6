"""Safetensors checkpoints, read and written tensor by tensor: a tower can be cut out of one larger than memory."""

import json
import shutil
import struct
from pathlib import Path

from normalign.embeddings.ranges import LocalFile, read_blocks
from normalign.embeddings.safetensors_header import StoredTensor, read_header

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


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in ``folder``; reads the files' headers only."""
    tensors: dict[str, StoredTensor] = {}
    for file in checkpoint_files(folder):
        tensors |= read_header(LocalFile(file))
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
            for block in read_blocks(tensor.source, tensor.start, tensor.size):
                target.write(block)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link ``source`` (symbolic links followed) as ``target``; copy where that cannot be done."""
    source = source.resolve()
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
