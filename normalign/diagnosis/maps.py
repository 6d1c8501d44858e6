"""Attention maps drawn over an image: which grid its visual tokens form, and what of the image the model saw.

Where that is not certain (tiles, padding) there is no map, rather than one in the wrong place.
"""

import base64
import io
import math
from collections.abc import Mapping
from typing import Any

from PIL import Image
from torch import Tensor

from normalign.diagnosis.attention import LastLook

MAX_SIDE = 336  # pixels of the stored image
GRID_FIELDS = ("image_grid_thw", "grid_thws")


def map_entry(
    name: str, question: str, look: LastLook, inputs: Mapping[str, Any], image: Image.Image, processor: Any
) -> dict[str, Any] | None:
    """One map as the report draws it, of a sample with one image; None where attention or grid is not known."""
    grid = token_grid(inputs, len(look.weights_P))
    seen = seen_part(image, getattr(processor, "image_processor", None))
    if look.layer is None or grid is None or seen is None:
        return None
    return {
        "id": name,
        "question": question,
        "grid": list(grid),
        "layer": look.layer,
        "map": look.map(grid),
        "image_png_base64": _png(seen),
    }


def token_grid(inputs: Mapping[str, Any], tokens: int) -> tuple[int, int] | None:
    """Rows and columns of the visual tokens of a sample with one image; None for tiles and uneven counts."""
    for name in GRID_FIELDS:
        if isinstance(inputs.get(name), Tensor):
            frames, rows, columns = inputs[name].reshape(-1, 3)[0].tolist()
            if len(inputs[name].reshape(-1, 3)) != 1 or frames != 1:
                return None
            return _grid(tokens, rows, columns)
    pixels = inputs.get("pixel_values")
    if not isinstance(pixels, Tensor) or pixels.ndim < 4 or math.prod(pixels.shape[:-3]) != 1:
        return None
    return _grid(tokens, pixels.shape[-2], pixels.shape[-1])


def _grid(tokens: int, height: int, width: int) -> tuple[int, int] | None:
    """The grid of ``tokens`` cells with the proportions of height to width, if they form one."""
    rows = math.isqrt(tokens * height // width)
    if rows and tokens % rows == 0 and rows * width == tokens // rows * height:
        return rows, tokens // rows
    return None


def seen_part(image: Image.Image, image_processor: Any) -> Image.Image | None:
    """The part of ``image`` that a model's grid covers: cut at the centre if its processor does so; None if padded."""
    width, height = image.size
    if getattr(image_processor, "do_pad", False) and width != height:
        return None
    if not getattr(image_processor, "do_center_crop", False):
        return image
    size, crop = (getattr(image_processor, name, None) or {} for name in ("size", "crop_size"))
    size, crop = dict(size), dict(crop)
    if not {"height", "width"} <= crop.keys():
        return None
    if "shortest_edge" in size:
        scale = min(width, height) / size["shortest_edge"]
        scales = (scale, scale)
    elif {"height", "width"} <= size.keys():
        scales = (width / size["width"], height / size["height"])
    else:
        return None
    across, down = (min(crop["width"] * scales[0], width), min(crop["height"] * scales[1], height))
    left, top = (width - across) / 2, (height - down) / 2
    return image.crop((round(left), round(top), round(left + across), round(top + down)))


def _png(image: Image.Image) -> str:
    small = image.copy()
    small.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode("ascii")
