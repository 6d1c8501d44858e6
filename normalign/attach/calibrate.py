"""The mean norm of a projector's visual tokens over a folder of images: what global_scale divides by."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from normalign.anatomy import Anatomy, inputs_of, visual_mask
from normalign.anatomy.search import input_embedding
from normalign.attach.fold import output_of
from normalign.attach.merge import Merge, first_layer_input
from normalign.diagnosis.capture import first_tensor
from normalign.diagnosis.pictures import Pictures
from normalign.diagnosis.tokens import exact

PROMPT = "Describe the image."
MERGE_TOLERANCE = 0.1  # a placeholder's embedding to which tokens are added is not quite orthogonal to them


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


def calibrate(anatomy: Anatomy, processor: Any, pictures: Pictures) -> Calibration:
    """Send every one of ``pictures`` through the model, up to its first decoder layer.

    Raises:
        ValueError: none is a usable image, or the mean norm is 0 or not finite.
    """
    found, total = Calibration(), 0.0
    for _, image in tqdm(pictures, desc="calibrating", unit="file", leave=False):
        norms_N = projector_call(anatomy, inputs_of(processor, image, PROMPT)).norms_N
        total += norms_N.sum().item()
        found.visual_tokens += norms_N.numel()
        found.images += 1
    if not found.images:
        raise pictures.none_usable()
    found.mean_norm, found.skipped = total / found.visual_tokens, dict(pictures.skipped)
    if not 0 < found.mean_norm < math.inf:
        raise ValueError(
            f"the mean norm of what {anatomy.projector_path} makes of the images is {found.mean_norm}: these weights "
            "cannot be used; fetch them again"
        )
    return found


@dataclass(frozen=True)
class ProjectorCall:
    """How the model called its projector, the norms of what came out, and what then entered the first decoder layer."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]
    norms_N: Tensor
    entering_BLD: Tensor


def projector_call(anatomy: Anatomy, inputs: dict[str, Any]) -> ProjectorCall:
    """The projector's call on the image in ``inputs`` (floating-point ones: Ovis also looks up indicator tokens).

    Raises:
        ValueError: what was named as projector is none.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Tensor]] = []
    model, path = anatomy.model, anatomy.projector_path

    def note(_projector: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        given = first_tensor((*args, *keywords.values()))  # some are given a list, a tensor for each image
        if given is not None and given.is_floating_point():
            calls.append((args, keywords, output_of(output)))

    handle = anatomy.projector.register_forward_hook(note, with_kwargs=True)
    try:
        entering_BLD = first_layer_input(anatomy, lambda: model(**on_device(model, inputs), use_cache=False))
    finally:
        handle.remove()
    if not calls:
        raise ValueError(f"{path} was not called on the image: it is not the projector; name that with --projector")
    args, keywords, output = calls[-1]
    if output.shape[-1] != anatomy.width:
        raise ValueError(
            f"{path} makes vectors of {output.shape[-1]}, the text embeddings have {anatomy.width}: it is not the "
            "projector; name that with --projector"
        )
    norms_N = torch.cat([exact(output).norm(dim=-1).flatten() for _, _, output in calls])
    return ProjectorCall(args, keywords, norms_N, entering_BLD)


def check_merge(anatomy: Anatomy, merge: Merge, inputs: dict[str, Any]) -> None:
    """See in a forward pass that the projector's output enters the first decoder layer as ``merge`` says.

    Medians are compared, since some families put learned tokens between the projector's.

    Raises:
        ValueError: it does not, so that a norm set at the projector would be another one at the layer.
    """
    call = projector_call(anatomy, inputs)
    visual_BL = visual_mask(anatomy, inputs["input_ids"]).to(call.entering_BLD.device)
    if not visual_BL.any():
        raise ValueError(
            f"no token of a sample with an image has the id {anatomy.image_token_id}: it is not the image "
            "placeholder's; give that with --image-token-id"
        )
    leaving = call.norms_N.median().item()
    entering = exact(call.entering_BLD[visual_BL]).norm(dim=-1).median().item()
    expected = merge.norm_of(leaving)
    if not abs(entering - expected) <= MERGE_TOLERANCE * expected:
        raise ValueError(
            f"visual tokens leave {anatomy.projector_path} at norm {leaving:.4g} and enter the first decoder layer at "
            f"{entering:.4g} instead of {expected:.4g}: something lies in between, or the weights cannot be used; name "
            "the last module before the language model with --projector"
        )


def on_device(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """``inputs`` with its tensors where the model's embedding is."""
    device = input_embedding(model).weight.device
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
