"""`normalign attach` on folders: a checkpoint with an aligner, written beside what is copied from the original.

Memory: the model in float32 (4 bytes a parameter; 8 for global_scale, whose logits are compared in float64), once at a
time; weights are copied block by block.
"""

import dataclasses
import inspect
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from normalign.anatomy import Anatomy, find_anatomy, inputs_of, load_vlm
from normalign.attach.aligned import NAME, RECORD
from normalign.attach.attach import plan_attachment, put
from normalign.attach.calibrate import PROMPT, Calibration, calibrate, on_device, projector_call, sample_picture
from normalign.attach.fold import foldable_parameters
from normalign.attach.remote_code import aligned_config, code_files
from normalign.attach.weights import (
    copy_other_files,
    read_config,
    refuse_full,
    rewrite,
    stored_as,
    times,
    weight_files,
    write_config,
)
from normalign.embeddings.safetensors_header import StoredTensor
from normalign.files import atomic_directory
from normalign.norms.aligner import GlobalScaleAligner
from normalign.weights.safetensors_file import copy_tensors, read_headers

ORIGINAL = "original_projector.safetensors"
EXACT = 1e-6  # largest difference of logits, relative to the largest logit
STATED = {"F64": EXACT, "F32": EXACT, "F16": 8 * 2**-10, "BF16": 8 * 2**-7}  # by the type that a factor is rounded to


@dataclass(frozen=True)
class Change:
    """What sets the attached checkpoint apart from the original one; tensors by their names in the files."""

    family: str
    record: dict[str, Any]
    notes: tuple[str, ...]
    config: dict[str, Any]
    code: dict[str, str]
    added: dict[str, Tensor]
    projector: list[str]
    scale: float | None
    scaled: list[str]
    calibration: Calibration | None
    logits: Tensor


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
    config = read_config(folder)
    refuse_full(out)
    if RECORD in config:
        raise ValueError(f"{folder} has an attached aligner already; take it out with `normalign detach` first")
    if (aligner == "global_scale") != (images is not None):
        raise ValueError("--images is needed for global_scale, whose factor is measured, and for no other aligner")
    stored = read_headers(folder)
    model, processor = load_vlm(folder, trust_remote_code=trust_remote_code)
    anatomy = find_anatomy(model, **parts)
    change = _change(anatomy, processor, config, (aligner, gwc, multiple), images)
    del model, anatomy  # the written checkpoint is loaded next
    _check_names(folder, stored, change.projector)
    tolerance = max(STATED.get(stored[name].dtype, EXACT) for name in change.scaled) if change.scaled else EXACT
    with atomic_directory(out) as temporary:
        _write(folder, temporary, stored, change)
        error = _difference(temporary, change, trust_remote_code=trust_remote_code)
        if not error <= tolerance:
            raise ValueError(
                f"{folder}: loaded again, logits differ by {error:.2g} of the largest; {tolerance:.2g} is allowed, so "
                "nothing was written"
            )
    return _summary(change, error, tolerance)


def _change(
    anatomy: Anatomy, processor: Any, config: dict[str, Any], settings: tuple[str, bool, float], images: Path | None
) -> Change:
    aligner, gwc, multiple = settings
    model: Any = anatomy.model
    original, configuration = type(model), type(model.config)
    attachment = plan_attachment(anatomy, aligner, gwc=gwc, multiple=multiple)
    inputs = on_device(model, inputs_of(processor, sample_picture(), PROMPT))
    prefix = anatomy.projector_path
    projector = {f"{prefix}.{name}": tensor for name, tensor in anatomy.projector.state_dict().items()}
    names = list(revert_weight_conversion(model, projector))
    record = attachment.record
    calibration, scale, scaled = None, None, []
    if images is not None:
        call = projector_call(anatomy, inputs)
        parameters = [f"{prefix}.{name}" for name in foldable_parameters(anatomy.projector, call.args, call.keywords)]
        scaled = list(revert_weight_conversion(model, {name: projector[name] for name in parameters}))
        calibration = calibrate(anatomy, processor, images)
    put(anatomy, dataclasses.replace(attachment, record=dict(record)))
    inserted = anatomy.projector.get_submodule(NAME)
    added: dict[str, Tensor] = {}
    if calibration is not None:
        assert isinstance(inserted, GlobalScaleAligner)
        inserted.running_norm.fill_(calibration.mean_norm)
        scale = record["target"] / inserted.running_norm.item()  # as the aligner divides: in float32
        changed = config | {RECORD: record | {"scale": scale, "scaled": scaled}}
        code = {}
    else:
        tensors = {f"{prefix}.{NAME}.{name}": tensor.clone() for name, tensor in inserted.state_dict().items()}
        added = revert_weight_conversion(model, tensors)
        changed = aligned_config(config, record, original, configuration)
        code = code_files(original, configuration)
    logits = _logits(model, processor, exactly=scale is not None)
    return Change(
        anatomy.family, record, attachment.notes, changed, code, added, names, scale, scaled, calibration, logits
    )


def _check_names(folder: Path, stored: dict[str, StoredTensor], names: Iterable[str]) -> None:
    missing = sorted(set(names) - set(stored))
    if missing:
        raise ValueError(f"{folder}: the projector's tensors {', '.join(missing)} are not in its safetensors")


def _write(folder: Path, target: Path, stored: dict[str, StoredTensor], change: Change) -> None:
    copy_other_files(folder, target, without={"config.json"} | weight_files(folder))
    copy_tensors({name: stored[name] for name in change.projector}, target / ORIGINAL)
    tensors = change.added
    if change.scale is not None:
        tensors = times({name: stored[name] for name in change.scaled}, change.scale)
    scratch = target / "changed.safetensors"
    rewrite(folder, target, changed=stored_as(tensors, scratch))
    scratch.unlink()
    for name, text in change.code.items():
        (target / name).write_text(text, encoding="utf-8")
    write_config(target, change.config)


def _logits(model: Any, processor: Any, *, exactly: bool) -> Tensor:
    """Logits of one made-up sample; ``exactly``: computed in float64, where only the weights' own rounding shows."""
    if exactly:
        model.double()
        model.set_experts_implementation("eager")  # the grouped kernel of mixtures of experts has no float64
    inputs = on_device(model, inputs_of(processor, sample_picture(), PROMPT))
    floats = {name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()}
    with torch.no_grad():
        return model(**inputs | {name: inputs[name].to(model.dtype) for name in floats}).logits.double().cpu()


def _difference(folder: Path, change: Change, *, trust_remote_code: bool) -> float:
    """Largest difference of the written checkpoint's logits from the attached model's, over the largest of those."""
    model, processor = load_vlm(folder, trust_remote_code=trust_remote_code or bool(change.code))
    if change.code:  # transformers keeps a copy of the code under the temporary folder's name
        shutil.rmtree(Path(inspect.getfile(type(model))).parents[1])
    found = _logits(model, processor, exactly=change.scale is not None)
    return ((found - change.logits).abs().max() / change.logits.abs().max()).item()


def _summary(change: Change, error: float, tolerance: float) -> dict[str, Any]:
    found = change.calibration
    return {
        **change.record,
        "family": change.family,
        "loads_with": "transformers, trust_remote_code=True" if change.code else "transformers",
        "scale": change.scale,
        "scaled": change.scaled,
        "calibration": found and dataclasses.asdict(found),
        "logits": {"difference": error, "tolerance": tolerance},
        "notes": list(change.notes),
    }
