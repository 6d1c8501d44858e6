"""The mean norm of a projector's visual tokens over a folder of images: what global_scale divides by."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from normalign.anatomy import Anatomy, inputs_of
from normalign.attach.fold import output_of
from normalign.attach.merge import first_layer_input
from normalign.diagnosis.pictures import Pictures

PROMPT = "Describe the image."


@dataclass
class Calibration:
    """Mean norm of the projector's output, and what it was taken from."""

    mean_norm: float = 0.0
    visual_tokens: int = 0
    images: int = 0
    skipped: dict[str, int] = field(default_factory=dict)


def sample_picture(side: int = 64) -> Image.Image:
    """A picture of noise, always the same: for checks that need some image."""
    levels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def calibrate(anatomy: Anatomy, processor: Any, folder: Path) -> Calibration:
    """Send every image of ``folder`` through the model, up to its first decoder layer.

    Raises:
        ValueError: there is no usable image in the folder.
    """
    pictures, found, total = Pictures(folder), Calibration(), 0.0
    for _, image in tqdm(pictures, desc="calibrating", unit="file", leave=False):
        norms_N = projector_call(anatomy, inputs_of(processor, image, PROMPT)).norms_N
        total += norms_N.sum().item()
        found.visual_tokens += norms_N.numel()
        found.images += 1
    if not found.images:
        raise pictures.none_usable()
    found.mean_norm, found.skipped = total / found.visual_tokens, dict(pictures.skipped)
    return found


@dataclass(frozen=True)
class ProjectorCall:
    """How the model called its projector, and the norms of the visual tokens that came out."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]
    norms_N: Tensor


def projector_call(anatomy: Anatomy, inputs: dict[str, Any]) -> ProjectorCall:
    """The projector's call on the image in ``inputs`` (floating-point ones: Ovis also looks up indicator tokens)."""
    calls: list[ProjectorCall] = []
    model = anatomy.model

    def note(_projector: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        given = next((value for value in (*args, *keywords.values()) if isinstance(value, Tensor)), None)
        if given is not None and given.is_floating_point():
            norms = output_of(output).double().norm(dim=-1).flatten()
            calls.append(ProjectorCall(args, keywords, norms))

    handle = anatomy.projector.register_forward_hook(note, with_kwargs=True)
    try:
        first_layer_input(anatomy, lambda: model(**on_device(model, inputs)))
    finally:
        handle.remove()
    if not calls:
        raise ValueError(
            f"{anatomy.projector_path} was not called on the image: it is not the projector; name that with --projector"
        )
    last = calls[-1]
    return ProjectorCall(last.args, last.keywords, torch.cat([call.norms_N for call in calls]))


def on_device(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """``inputs`` with its tensors where the model's embedding is."""
    device = model.get_input_embeddings().weight.device
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
