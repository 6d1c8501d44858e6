"""`normalign attach` on folders: a checkpoint with an aligner, written beside what is copied from the original.

Memory: the model in float32 (4 bytes a parameter; 8 for global_scale, whose logits are compared in float64), once at a
time; weights are copied block by block.
"""

import dataclasses
import inspect
import shutil
from pathlib import Path
from typing import Any

from normalign.anatomy import find_anatomy, load_vlm
from normalign.attach.aligned import RECORD
from normalign.attach.attach import Attachment, check_settings, plan_attachment
from normalign.attach.change import Change, logits, prepare
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
from normalign.diagnosis.pictures import Pictures
from normalign.embeddings.safetensors_header import StoredTensor
from normalign.files import atomic_directory
from normalign.weights.safetensors_file import copy_tensors, read_headers

ORIGINAL = "original_projector.safetensors"
EXACT = 1e-6  # largest difference of logits, relative to the largest logit
STATED = {"F64": EXACT, "F32": EXACT, "F16": 8 * 2**-10, "BF16": 8 * 2**-7}  # by the type that a factor is rounded to


def attach_checkpoint(
    folder: Path,
    out: Path,
    *,
    aligner: str = "layernorm",
    gwc: bool = False,
    multiple: float = 1.0,
    images: Path | None = None,
    trust_remote_code: bool = False,
    **parts: Any,
) -> dict[str, Any]:
    """Write to ``out`` the checkpoint in ``folder`` with an aligner behind its projector; returns what was done.

    Args:
        images: folder that global_scale's factor is measured on (needed for it alone).
        parts: as in :func:`normalign.anatomy.find_anatomy`.

    Raises:
        ValueError: the settings or the folder cannot be used, or the logits did not survive the round trip (then
            nothing is written).
    """
    check_settings(aligner, gwc=gwc, multiple=multiple)
    config = read_config(folder)
    refuse_out(out, folder)
    if RECORD in config:
        raise ValueError(f"{folder} has an attached aligner already; take it out with `normalign detach` first")
    if (aligner == "global_scale") != (images is not None):
        raise ValueError("--images is needed for global_scale, whose factor is measured, and for no other aligner")
    pictures = None if images is None else Pictures(images)
    stored = read_headers(folder)
    model, processor = load_vlm(folder, trust_remote_code=trust_remote_code)
    anatomy = find_anatomy(model, **parts)
    attachment = plan_attachment(anatomy, aligner, gwc=gwc, multiple=multiple)
    change = prepare(anatomy, processor, config, attachment, pictures)
    family = anatomy.family
    del model, anatomy, processor  # the written checkpoint is loaded next
    tolerance = _tolerance(folder, stored, change)
    with atomic_directory(out) as temporary:
        _write(folder, temporary, stored, change)
        error = _difference(temporary, change, trust_remote_code=trust_remote_code)
        if not error <= tolerance:
            raise ValueError(
                f"{folder}: loaded again, logits differ by {error:.2g} of the largest; {tolerance:.2g} is allowed, so "
                "nothing was written"
            )
    return {"family": family, **_summary(attachment, change), "logits": {"difference": error, "tolerance": tolerance}}


def _tolerance(folder: Path, stored: dict[str, StoredTensor], change: Change) -> float:
    missing = sorted(set(change.projector) - set(stored))
    if missing:
        raise ValueError(f"{folder}: the projector's tensors {', '.join(missing)} are not in its safetensors")
    scaled = change.fold.names if change.fold else []
    return max((STATED.get(stored[name].dtype, EXACT) for name in scaled), default=EXACT)


def _write(folder: Path, target: Path, stored: dict[str, StoredTensor], change: Change) -> None:
    copy_other_files(folder, target, without={"config.json"} | weight_files(folder))
    copy_tensors({name: stored[name] for name in change.projector}, target / ORIGINAL)
    tensors = change.added
    if change.fold is not None:
        tensors = times({name: stored[name] for name in change.fold.names}, change.fold.scale)
    scratch = target / "changed.safetensors"
    rewrite(folder, target, changed=stored_as(tensors, scratch))
    scratch.unlink()
    for name, text in change.code.items():
        (target / name).write_text(text, encoding="utf-8")
    write_config(target, change.config)


def _difference(folder: Path, change: Change, *, trust_remote_code: bool) -> float:
    """Largest difference of the written checkpoint's logits from the attached model's, over the largest of those."""
    model, processor = load_vlm(folder, trust_remote_code=trust_remote_code or bool(change.code))
    found_BLV = logits(model, processor, exactly=change.fold is not None)
    if type(model).__module__.startswith("transformers_modules."):  # a copy of the code, under the temporary name
        shutil.rmtree(Path(inspect.getfile(type(model))).parents[1])
    return ((found_BLV - change.logits_BLV).abs().max() / change.logits_BLV.abs().max()).item()


def _summary(attachment: Attachment, change: Change) -> dict[str, Any]:
    fold = change.fold
    return {
        **attachment.record,
        "loads_with": change.loads_with,
        "scale": fold and fold.scale,
        "scaled": fold.names if fold else [],
        "calibration": fold and dataclasses.asdict(fold.calibration),
        "notes": list(attachment.notes),
    }
