"""Changing a few tensors of a checkpoint on disk: every other one is copied as it is, block by block."""

import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from normalign.embeddings.ranges import LocalFile, read_bytes
from normalign.embeddings.safetensors_header import StoredTensor, read_header
from normalign.files import read_json
from normalign.weights.safetensors_file import DTYPES, checkpoint_files, copy_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADDED = "model-aligner.safetensors"


def rewrite(
    source: Path, target: Path, *, changed: Mapping[str, StoredTensor] | None = None, dropped: Collection[str] = ()
) -> None:
    """Write the weights of the checkpoint in ``source`` to the folder ``target``; sharded or not.

    Shards in which nothing changes are copied whole, bit by bit. Memory: one block of a few MiB.

    Args:
        changed: tensors that replace those of their names; those that the checkpoint does not have are added.
        dropped: names of tensors to leave out.
    """
    added = dict(changed or {})
    files: dict[str, dict[str, StoredTensor]] = {}
    for file in checkpoint_files(source):
        before = read_header(LocalFile(file))
        after = {name: added.pop(name, tensor) for name, tensor in before.items() if name not in dropped}
        if not after:
            continue
        if after == before:
            shutil.copyfile(file, target / file.name)
        else:
            copy_tensors(after, target / file.name)
        files[file.name] = after
    if added:
        copy_tensors(added, target / ADDED)
        files[ADDED] = added
    _index(target, files)


def _index(target: Path, files: dict[str, dict[str, StoredTensor]]) -> None:
    """One file is called model.safetensors; several have an index and none of them that name, which would win."""
    if len(files) == 1:
        (only,) = files
        (target / only).rename(target / SINGLE)
        return
    if SINGLE in files:
        name = "model-00001-of-00001.safetensors"
        (target / SINGLE).rename(target / name)
        files[name] = files.pop(SINGLE)
    index = {
        "metadata": {"total_size": sum(t.size for tensors in files.values() for t in tensors.values())},
        "weight_map": {name: file for file, tensors in sorted(files.items()) for name in tensors},
    }
    (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def weight_files(folder: Path) -> set[str]:
    """Names of the files that hold the weights of the checkpoint in ``folder``, with the index."""
    return {file.name for file in checkpoint_files(folder)} | ({INDEX} if (folder / INDEX).exists() else set())


def copy_other_files(source: Path, target: Path, *, without: Collection[str]) -> None:
    """Copy what a checkpoint has besides weights: tokenizer, processor, templates, code.

    Weights in other formats are left out (they would be those of the model before), and so are hidden files.
    """
    formats = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        if not path.is_file() or hidden or path.suffix in formats or str(relative) in without:
            continue
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / relative)


def read_config(folder: Path) -> dict:
    """config.json of ``folder``.

    Raises:
        ValueError: the folder is not there, or holds no checkpoint.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give that of a checkpoint, with config.json and safetensors")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no checkpoint: config.json is missing")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} is no JSON object; fetch it again")
    return config


def refuse_out(out: Path, source: Path) -> None:
    """Raise ValueError where a checkpoint made from the one in ``source`` cannot be written to ``out``."""
    if out.is_symlink():
        raise ValueError(f"{out} is a link; give the place of the new folder itself")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty; nothing is overwritten: give a new folder")
    if source.resolve() in out.resolve().parents:
        raise ValueError(f"{out} is inside {source}, which stays as it is; give a folder outside it")
    parent = next(place for place in out.resolve().parents if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"{out} cannot be written: {parent} is no folder that can be written to; give another place")


def times(tensors: Mapping[str, StoredTensor], factor: float) -> dict[str, Tensor]:
    """The tensors times ``factor``, computed in float32 (float64 for float64) and rounded once to their own type."""
    scaled = {}
    for name, stored in tensors.items():
        content = bytearray(read_bytes(stored.source, stored.start, stored.size))
        tensor = torch.frombuffer(content, dtype=getattr(torch, DTYPES[stored.dtype])).reshape(stored.shape)
        wide = tensor if tensor.dtype.itemsize > 4 else tensor.float()
        scaled[name] = (wide * factor).to(tensor.dtype)
    return scaled


def stored_as(tensors: dict[str, Tensor], file: Path) -> dict[str, StoredTensor]:
    """Write ``tensors`` to ``file``, to be copied into checkpoints from there."""
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, file)
    return read_header(LocalFile(file))


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json to ``folder``."""
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
