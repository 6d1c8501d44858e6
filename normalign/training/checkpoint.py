"""Checkpoints to resume a training stage from: written whole or not at all."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

FILE = "checkpoint.pt"


def save(
    folder: Path,
    step: int,
    rows: list[dict[str, Any]],
    modules: list[nn.Module],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write step, log rows, trainable state, optimizer and random state to ``folder``; the old file stays until then.

    Raises:
        OSError: the disk is full or not writable; the previous checkpoint is untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{FILE}.part"
    state = {
        "step": step,
        "rows": rows,
        "modules": [module.state_dict() for module in modules],
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
    }
    try:
        with temporary.open("wb") as handle:
            torch.save(state, handle)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(folder / FILE)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def restore(
    folder: Path, modules: list[nn.Module], optimizer: torch.optim.Optimizer
) -> tuple[int, list[dict[str, Any]]]:
    """Put the saved state back; returns the number of finished steps and their log rows (0 and none without a file)."""
    if not (folder / FILE).exists():
        return 0, []
    state = torch.load(folder / FILE, weights_only=True, map_location="cpu")
    for module, saved in zip(modules, state["modules"], strict=True):
        module.load_state_dict(saved)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return state["step"], state["rows"]
