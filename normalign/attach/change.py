"""What `normalign attach` changes in a checkpoint, worked out on the loaded model before anything is written.

Shape suffixes: B batch, L sequence length, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from normalign.anatomy import Anatomy, inputs_of
from normalign.attach.aligned import NAME, RECORD
from normalign.attach.attach import Attachment, put
from normalign.attach.calibrate import (
    PROMPT,
    Calibration,
    calibrate,
    check_merge,
    on_device,
    projector_call,
    sample_picture,
)
from normalign.attach.fold import foldable_parameters
from normalign.attach.remote_code import aligned_config, code_files
from normalign.diagnosis.pictures import Pictures


@dataclass(frozen=True)
class Fold:
    """A factor that goes into the projector's own tensors, ``names`` in the files."""

    scale: float
    names: list[str]
    calibration: Calibration


@dataclass(frozen=True)
class Change:
    """What sets the attached checkpoint apart from the original one; tensors by their names in the files."""

    config: dict[str, Any]
    added: dict[str, Tensor]
    code: dict[str, str]
    projector: list[str]
    fold: Fold | None
    loads_with: str
    logits_BLV: Tensor


def prepare(
    anatomy: Anatomy, processor: Any, config: dict[str, Any], attachment: Attachment, pictures: Pictures | None
) -> Change:
    """Put the aligner into the live model, and collect what a checkpoint of it needs.

    Args:
        config: config.json of the original.
        pictures: what the factor of global_scale is measured on; with them, the factor is folded.
    """
    model: Any = anatomy.model
    original, configuration = type(model), type(model.config)
    record, prefix = attachment.record, anatomy.projector_path
    projector = list(_in_files(model, prefix, anatomy.projector.state_dict()))
    inputs = inputs_of(processor, sample_picture(), PROMPT)
    check_merge(anatomy, attachment.merge, inputs)
    fold = None if pictures is None else _measure(anatomy, processor, pictures, record["target"])
    put(anatomy, dataclasses.replace(attachment, record=dict(record)))
    inserted: Any = anatomy.projector.get_submodule(NAME)
    added, code = {}, {}
    if fold is None:
        loads_with = "transformers, trust_remote_code=True"
        added = _in_files(model, f"{prefix}.{NAME}", inserted.state_dict())
        code = code_files(original, configuration)
        config = aligned_config(config, record, original, configuration)
    else:
        loads_with = "transformers" if original.__module__.startswith("transformers.") else "what loads the original"
        inserted.running_norm.fill_(fold.calibration.mean_norm)
        config = config | {RECORD: record | {"scale": fold.scale, "scaled": fold.names}}
    check_merge(anatomy, attachment.merge, inputs)  # once more: at other norms what lies in between acts differently
    logits_BLV = logits(model, processor, exactly=fold is not None)
    return Change(config, added, code, projector, fold, loads_with, logits_BLV)


def logits(model: Any, processor: Any, *, exactly: bool) -> Tensor:
    """Logits (B, L, V) of one made-up sample; ``exactly``: in float64, where only the weights' own rounding shows."""
    if exactly:
        model.double()
        model.set_experts_implementation("eager")  # the grouped kernel of mixtures of experts has no float64
    inputs = on_device(model, inputs_of(processor, sample_picture(), PROMPT))
    floats = {name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()}
    with torch.no_grad():
        return (
            model(**inputs | {name: inputs[name].to(model.dtype) for name in floats}, use_cache=False)
            .logits.double()
            .cpu()
        )


def _in_files(model: Any, prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their names in the checkpoint's files: transformers renames many when it loads them."""
    return revert_weight_conversion(model, {f"{prefix}.{name}": tensor.clone() for name, tensor in tensors.items()})


def _measure(anatomy: Anatomy, processor: Any, pictures: Pictures, target: float) -> Fold:
    calibration = calibrate(anatomy, processor, pictures)
    call = projector_call(anatomy, inputs_of(processor, sample_picture(), PROMPT))
    names = foldable_parameters(anatomy.projector, call.args, call.keywords)
    scaled = {name: anatomy.projector.get_parameter(name) for name in names}
    mean_norm = torch.tensor(calibration.mean_norm, dtype=torch.float32).item()  # as the aligner stores it
    return Fold(target / mean_norm, list(_in_files(anatomy.model, anatomy.projector_path, scaled)), calibration)
