"""The mean norm of a projector's visual tokens over a folder of images: what global_scale divides by."""

from collections import Counter
from collections.abc import Iterator
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
from normalign.data.images import ImageRejected, open_image

PROMPT = "Describe the image."
MAX_PIXELS = 1 << 28  # checked before decoding: a picture of 20,000 by 13,000 pixels passes


@dataclass
class Calibration:
    """Mean norm of the projector's output, and what it was taken from."""

    mean_norm: float = 0.0
    visual_tokens: int = 0
    images: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


def sample_picture(side: int = 64) -> Image.Image:
    """A picture of noise, always the same: for checks that need some image."""
    levels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def calibrate(anatomy: Anatomy, processor: Any, folder: Path) -> Calibration:
    """Send every image of ``folder`` through the model, up to its first decoder layer.

    Raises:
        ValueError: there is no usable image in the folder.
    """
    found, total = Calibration(), 0.0
    for image in _images(folder, found.skipped):
        norms_N = projector_call(anatomy, inputs_of(processor, image, PROMPT)).norms_N
        total += norms_N.sum().item()
        found.visual_tokens += norms_N.numel()
        found.images += 1
    if not found.images:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in found.skipped.items()) or "it is empty"
        raise ValueError(f"{folder} has no image that can be used ({reasons}); give a folder of pictures with --images")
    found.mean_norm = total / found.visual_tokens
    return found


def _images(folder: Path, skipped: Counter[str]) -> Iterator[Image.Image]:
    if not folder.is_dir():
        raise ValueError(f"--images {folder} is not a folder")
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    for path in tqdm(files, desc="calibrating", unit="image", leave=False):
        try:
            image = open_image(path.name, folder, MAX_PIXELS)
        except ImageRejected as rejected:
            skipped[rejected.reason] += 1
        else:
            yield image


@dataclass(frozen=True)
class ProjectorCall:
    """How the model called its projector, and the norms of the visual tokens that came out."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]
    norms_N: Tensor


def projector_call(anatomy: Anatomy, inputs: dict[str, Any]) -> ProjectorCall:
    """The projector's call on the image in ``inputs`` (floating-point ones: Ovis also looks up indicator tokens)."""
    calls: list[ProjectorCall] = []

    def note(_projector: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        given = next((value for value in (*args, *keywords.values()) if isinstance(value, Tensor)), None)
        if given is not None and given.is_floating_point():
            norms = output_of(output).double().norm(dim=-1).flatten()
            calls.append(ProjectorCall(args, keywords, norms))

    handle = anatomy.projector.register_forward_hook(note, with_kwargs=True)
    try:
        first_layer_input(anatomy, lambda: anatomy.model(**on_device(anatomy, inputs)))
    finally:
        handle.remove()
    if not calls:
        raise ValueError(
            f"{anatomy.projector_path} was not called on the image: it is not the projector; name that with --projector"
        )
    last = calls[-1]
    return ProjectorCall(last.args, last.keywords, torch.cat([call.norms_N for call in calls]))


def on_device(anatomy: Anatomy, inputs: dict[str, Any]) -> dict[str, Any]:
    """``inputs`` with its tensors where the model's are."""
    device = anatomy.embedding.weight.device
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
