"""Checkpoints to resume a training stage from: written whole or not at all."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normalign.norms.aligner import whole
from normalign.training.parallel import like

FILE = "checkpoint.pt"


def save(
    folder: Path,
    step: int,
    rows: list[dict[str, Any]],
    modules: list[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    main: bool = True,
) -> None:
    """Write step, log rows, trainable state and optimizer to ``folder``; the old file stays until then.

    Every process has to call it, since sharded tensors are gathered; the ``main`` one writes.

    Raises:
        OSError: the disk is full or not writable; the previous checkpoint is untouched.
    """

    def gather(value: Tensor) -> Tensor:
        """One tensor at a time is whole on an accelerator, and only the main process keeps it."""
        full = whole(value)
        return full.cpu() if main else full.new_empty(0)

    state = {
        "step": step,
        "rows": rows,
        "modules": [{name: gather(value) for name, value in module.state_dict().items()} for module in modules],
        "optimizer": _map_state(optimizer, optimizer.state_dict(), lambda value, _parameter: gather(value)),
    }
    if main:
        _write(folder, state)


def _write(folder: Path, state: dict[str, Any]) -> None:
    temporary = folder / f"{FILE}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as handle:
            torch.save(state, handle)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(folder / FILE)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        temporary.unlink(missing_ok=True)
        raise OSError(
            f"the checkpoint in {folder} could not be written ({error}); the previous one, if any, is whole. "
            "Free disk space and start the stage again: it goes on from there"
        ) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def restore(
    folder: Path, modules: list[nn.Module], optimizer: torch.optim.Optimizer
) -> tuple[int, list[dict[str, Any]]]:
    """Put the saved state back; returns the number of finished steps and their log rows (0 and none without a file).

    The number of processes, and how the model is spread over them, may differ from when it was saved.

    Raises:
        ValueError: the file is damaged; nothing is trained from it.
    """
    if not (folder / FILE).exists():
        return 0, []
    state = _read(folder / FILE)
    for module, saved in zip(modules, state["modules"], strict=True):
        current = module.state_dict()
        module.load_state_dict({name: like(value, current[name]) for name, value in saved.items()})
    optimizer.load_state_dict(_map_state(optimizer, state["optimizer"], like))
    return state["step"], state["rows"]


def _read(file: Path) -> dict[str, Any]:
    """What was saved, once every checksum is found right: loading alone would take a changed weight as it is."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
        return dict(torch.load(file, weights_only=True, map_location="cpu", mmap=True))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # readers of broken files raise whatever their parser stumbles over
        raise ValueError(
            f"the checkpoint {file} is damaged ({error}); delete it and start the stage again, from its beginning"
        ) from error


def _map_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], change: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Any]:
    """An optimizer's state dict with ``change(value, parameter)`` in place of every tensor of the parameter's shape."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        **state,
        "state": {
            index: {
                name: change(value, parameters[index]) if value.shape == parameters[index].shape else value
                for name, value in entries.items()
            }
            for index, entries in state["state"].items()
        },
    }
