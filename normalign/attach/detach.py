"""`normalign detach` on folders: the checkpoint without its aligner, a plain one of its family."""

import math
from pathlib import Path
from typing import Any

from normalign.attach.aligned import NAME, RECORD
from normalign.attach.checkpoint import ORIGINAL
from normalign.attach.remote_code import MODELING, plain_config
from normalign.attach.weights import (
    copy_other_files,
    read_config,
    refuse_out,
    rewrite,
    stored_as,
    times,
    weight_files,
    write_config,
)
from normalign.embeddings.ranges import LocalFile, read_bytes
from normalign.embeddings.safetensors_header import StoredTensor, read_header
from normalign.files import atomic_directory
from normalign.weights.safetensors_file import read_headers


def detach_checkpoint(folder: Path, out: Path, *, restore_projector: bool = False) -> dict[str, Any]:
    """Write to ``out`` the checkpoint in ``folder`` without its aligner; returns what was done.

    As long as nothing was trained, that is the checkpoint from before `normalign attach`, every tensor bit by bit. Of a
    trained one every weight stays as trained (a folded factor is divided out of the projector): visual tokens then
    enter at the norm that the trained projector gives them, which the trained language model has not seen, so it is
    a start for further training and no finished model.

    Args:
        restore_projector: put the projector from before `normalign attach` in the place of a trained one.

    Raises:
        ValueError: nothing is attached, or the original projector is asked for and not in the folder.
    """
    config = read_config(folder)
    refuse_out(out, folder)
    if RECORD not in config:
        raise ValueError(
            f"{folder} has no attached aligner (config.json has no {RECORD!r}): neither `normalign attach` wrote it, "
            "nor was it trained from what that wrote"
        )
    record = config[RECORD]
    _refuse_foreign(folder, record)
    stored = read_headers(folder)
    original = read_header(LocalFile(folder / ORIGINAL)) if (folder / ORIGINAL).exists() else {}
    if restore_projector:
        _refuse_others(folder, stored, original)
    trained, folded = projector_trained(record, stored, original), "scale" in record
    inserted = {name: tensor for name, tensor in stored.items() if NAME in name.split(".")}
    with atomic_directory(out) as temporary:
        changed: dict[str, StoredTensor] = {}
        scratch = temporary / "changed.safetensors"
        if restore_projector or (folded and trained is False):
            changed = original
        elif folded:
            changed = stored_as(times({name: stored[name] for name in record["scaled"]}, 1 / record["scale"]), scratch)
        rewrite(folder, temporary, changed=changed, dropped=inserted)
        scratch.unlink(missing_ok=True)
        copy_other_files(folder, temporary, without={"config.json"} | weight_files(folder) | _code(folder))
        write_config(temporary, plain_config(config))
    return {
        "aligner": record["settings"]["aligner"],
        "removed": sorted(inserted),
        "trained": True if _gain_trained(record, inserted) else trained,
        "projector": _verdict(trained, restored=restore_projector),
    }


def _refuse_foreign(folder: Path, record: Any) -> None:
    fields = ("settings", "width", "target", "projector")
    missing = [name for name in fields if name not in record] if isinstance(record, dict) else list(fields)
    if missing:
        raise ValueError(
            f"{folder / 'config.json'}: {RECORD!r} has no {', '.join(missing)}: not what `normalign attach` wrote; "
            "restore it from the folder that was attached"
        )


def _refuse_others(folder: Path, stored: dict[str, StoredTensor], original: dict[str, StoredTensor]) -> None:
    if not original:
        raise ValueError(
            f"{folder / ORIGINAL} is missing, which training does not carry along; copy it from the folder that "
            "`normalign attach` wrote"
        )
    missing = original.keys() - stored.keys()
    if missing:
        raise ValueError(
            f"{folder / ORIGINAL} has tensors that the weights do not have, such as {min(missing)}; it belongs to "
            "another checkpoint"
        )


def _gain_trained(record: dict[str, Any], inserted: dict[str, StoredTensor]) -> bool:
    """Whether what an aligner learns (or, global_scale, has measured) is no longer what it was started at."""
    initial = {"weight": record["target"] / math.sqrt(record["width"]), "bias": 0.0, "running_norm": 0.0}
    current = times(inserted, 1.0)
    return any(not tensor.eq(initial[name.split(".")[-1]]).all() for name, tensor in current.items())


def projector_trained(
    record: dict[str, Any], stored: dict[str, StoredTensor], original: dict[str, StoredTensor]
) -> bool | None:
    """Whether the projector differs from what `normalign attach` wrote; None where its original is not at hand."""
    if not original:
        return None
    scaled = {name: original[name] for name in record.get("scaled", ()) if name in original}
    expected = times(scaled, record.get("scale", 1.0))
    current = times({name: stored[name] for name in scaled if name in stored}, 1.0)
    if any(name not in stored for name in original):
        return True
    if any(not expected[name].equal(current[name]) for name in scaled):
        return True
    return any(_bytes(original[name]) != _bytes(stored[name]) for name in original if name not in scaled)


def _bytes(tensor: StoredTensor) -> bytes:
    return read_bytes(tensor.source, tensor.start, tensor.size)


def _code(folder: Path) -> set[str]:
    return {f"{MODELING}.py"} | {path.name for path in folder.glob("normalign_*.py")}


def _verdict(trained: bool | None, *, restored: bool) -> str:
    if trained is False:
        return "as before attach, bit by bit"
    if restored:
        return "the one from before attach, in the place of the trained one"
    if trained:
        return "as trained, without the aligner"
    return f"as it is in the folder, without the aligner (no {ORIGINAL} there to compare it with)"
