"""Checkpoints of a few rows with known norms."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

NAME = "model.embed_tokens.weight"
ROWS = torch.tensor([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0], [0.0, 2.0]])
NORMS = [5.0, 0.0, 10.0, 2.0]
T = 17 / 3  # of the three rows that are not zero


def checkpoint(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> Path:
    """One safetensors file in ``folder``, and a config.json if there is a ``config``."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def sharded(folder: Path, shards: list[Mapping[str, Tensor]], missing: tuple[str, ...] = ()) -> Path:
    """A checkpoint in several files; its index also names tensors in a file that is ``missing``."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = dict.fromkeys(missing, "model-missing.safetensors")
    for number, tensors in enumerate(shards):
        file = f"model-{number}.safetensors"
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
