"""A vision tower on its own, out of any checkpoint folder, and which of its tokens is what.

Shape suffixes: B images, L tokens of an image, E vision width, N tokens of all images.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModel

from normalign.anatomy.load import REMOTE_VLMS, first_line, is_vlm, load_weights, model_class, read_config
from normalign.anatomy.modules import block_list, common
from normalign.anatomy.own_inputs import OwnInputs, makes_own_inputs
from normalign.anatomy.search import find_language, find_tower

PATCH, CLS, REGISTER, PADDING = range(4)
UNKNOWN = -1  # row and column of a token whose place is not known
WIDEST = 16  # aspect ratio above which what a centre crop would remove is removed before resizing
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_PADDING_MASKS = ("pixel_attention_mask", "patch_attention_mask")


@dataclass(frozen=True)
class Tower:
    """A vision tower in float32, and how to run an image through it."""

    name: str
    family: str
    module: Any
    images: Any
    """The image processor of the checkpoint."""
    run: Callable[..., Any]
    """What takes the image processor's output and runs the tower: itself, or the whole model's image features."""

    def inputs(self, image: Image.Image) -> dict[str, Any]:
        """What ``run`` takes for one RGB image."""
        made = dict(self.images(images=[_narrowed(image, self.images)], return_tensors="pt"))
        accepted = inspect.signature(getattr(self.run, "forward", self.run)).parameters
        inputs = {name: made[name] for name in made if name in accepted}
        short = {name.removeprefix("image_"): made[name] for name in made if name not in accepted}
        inputs |= {name: value for name, value in short.items() if name in accepted}
        if "pixel_values" not in accepted:  # towers of the Qwen-VL line call pixels hidden states
            inputs[next(iter(accepted))] = made["pixel_values"]
        return inputs


def load_tower(folder: Path, *, trust_remote_code: bool = False) -> Tower:
    """The tower of a checkpoint folder of a tower alone, of a pair such as CLIP, or of a vision-language model.

    Raises:
        ValueError: no checkpoint, no vision tower in it, or no image processor; the message says what to do.
    """
    config = read_config(folder, trust_remote_code=trust_remote_code)
    images = _image_processor(folder, config.model_type, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{folder}: the weights are quantised, and norms are measured in float32; give the original")
    kind = _class(config, folder, trust_remote_code=trust_remote_code)
    whole = kind is not AutoModel
    dtype = "auto" if whole else torch.float32  # of a whole model only the vision part is made float32
    model = load_weights(kind, folder, config, dtype=dtype, trust_remote_code=trust_remote_code)
    language = find_language(model)[0] if whole else None
    path = find_tower(model, language)
    tower = model.get_submodule(path)
    run: Any = tower
    if language is not None:
        core = model.get_submodule(common(path, language))
        _empty(model.get_submodule(language))
        run = getattr(core.float().eval(), "get_image_features", tower)
        images = OwnInputs(model) if run is tower and makes_own_inputs(model) else images
    return Tower(folder.resolve().name, str(config.model_type), tower.float().eval(), images, run)


def _class(config: Any, folder: Path, *, trust_remote_code: bool) -> Any:
    """The auto class of a vision-language model, or the one of anything else.

    A tower's own code has a class for AutoModel alone; that of a vision-language model names one that writes text too.
    """
    own = getattr(config, "auto_map", None) or {"AutoModel": ""}
    if is_vlm(config) or "AutoModel" not in own or any(name in own for name in REMOTE_VLMS):
        return model_class(config, folder, trust_remote_code=trust_remote_code)
    return AutoModel


def _empty(language: nn.Module) -> None:
    """Drop the decoder layers, which image features do not need: most of the memory."""
    layers = block_list(language, direct=True)
    assert layers is not None
    del layers[:]


def _image_processor(folder: Path, model_type: str, *, trust_remote_code: bool) -> Any:
    if not any((folder / name).is_file() for name in _PROCESSOR_FILES):
        raise ValueError(
            f"{folder}: model type {model_type!r} comes with no image processor ({_PROCESSOR_FILES[0]} is missing); a "
            "text-only model has no vision tower, beside a tower's weights put the file it was published with"
        )
    try:
        return AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # damaged files make a library raise whatever it stumbles over
        raise ValueError(f"{folder}: its image processor cannot be loaded: {first_line(error)}") from error


def _narrowed(image: Image.Image, images: Any) -> Image.Image:
    """The middle of an extremely long image, where the processor resizes its short side and then crops the centre.

    The crop sees the same pixels; resizing the whole first would need gigabytes.
    """
    size = getattr(images, "size", None) or {}
    short_side = size.get("shortest_edge") if hasattr(size, "get") else getattr(size, "shortest_edge", None)
    short, long = sorted(image.size)
    if not (short_side and getattr(images, "do_center_crop", False)) or long <= WIDEST * short:
        return image
    kept = WIDEST * short - (long - WIDEST * short) % 2  # as much from either end
    before = (long - kept) // 2
    box = (before, 0, before + kept, short) if image.width == long else (0, before, short, before + kept)
    return image.crop(box)


@dataclass(frozen=True)
class Tokens:
    """What each token (N,) is (PATCH, CLS, REGISTER or PADDING), and its row and column on its image."""

    kind_N: Tensor
    row_N: Tensor
    column_N: Tensor


def concatenate(tokens: list[Tokens]) -> Tokens:
    """The tokens of several passes, in order."""
    return Tokens(
        torch.cat([t.kind_N for t in tokens]),
        torch.cat([t.row_N for t in tokens]),
        torch.cat([t.column_N for t in tokens]),
    )


class TowerCall:
    """While entered: keeps what the tower was called with, by the names of its parameters."""

    def __init__(self, tower: nn.Module) -> None:
        self.tower = tower
        self.given: dict[str, Any] = {}
        self.first = ""

    def __enter__(self) -> "TowerCall":
        signature = inspect.signature(self.tower.forward)
        self.first = next(iter(signature.parameters))

        def keep(_module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            bound = signature.bind_partial(*inputs, **keywords).arguments
            self.given = bound | bound.pop("kwargs", {})

        self._handle = self.tower.register_forward_pre_hook(keep, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def tokens(self, count: int) -> Tokens:
        """What the ``count`` tokens of the blocks were in that call."""
        grids = self._grids()
        if grids is not None:
            return concatenate([_grid(int(h), int(w), known=known) for h, w, known in grids])
        masks = [self.given[name] for name in _PADDING_MASKS if self.given.get(name) is not None]
        pixels = self.given.get("pixel_values", self.given.get(self.first))
        assert isinstance(pixels, Tensor)
        images = len(pixels)
        shapes = self.given.get("spatial_shapes")
        if shapes is None:
            height, width = self._patches(pixels)
            each = [_leading(count // images, height, width)] * images
        else:
            each = [_trailing(count // images, int(h), int(w)) for h, w in shapes]
        tokens = concatenate(each)
        if masks and masks[0].numel() == count:
            tokens.kind_N[~masks[0].flatten().bool().cpu()] = PADDING
        return tokens

    def _grids(self) -> list[tuple[int, int, bool]] | None:
        """(rows, columns, in raster order) of each image in a packed sequence of patches; None if it is not packed."""
        name = next((name for name in self.given if "grid" in name and self.given[name] is not None), None)
        if name is None:
            return None
        # Where patches are merged they come in blocks of these; some code keeps their size in its configuration alone.
        stride = getattr(getattr(self.tower, "config", None), "hidden_stride", 1)
        merge = getattr(self.tower, "spatial_merge_size", stride)
        found = []
        for entry in self.given[name].tolist():
            time, (height, width) = (entry[0] if len(entry) == 3 else 1), entry[-2:]
            found += [(height, width, merge == 1)] * time
        return found

    def _patches(self, pixels_BCHW: Tensor) -> tuple[int, int]:
        """Rows and columns of patches of a batch of pixels, or of one of patches (B, P, ·), taken as a square."""
        if pixels_BCHW.dim() == 3:
            side = round(pixels_BCHW.shape[1] ** 0.5)
            return (side, side) if side * side == pixels_BCHW.shape[1] else (0, 0)
        patch = getattr(self.tower.config, "patch_size", None)
        sides = (patch, patch) if isinstance(patch, int) else tuple(patch or (0, 0))[-2:]
        if not all(sides):
            return 0, 0
        return pixels_BCHW.shape[-2] // sides[0], pixels_BCHW.shape[-1] // sides[1]


def _grid(height: int, width: int, *, known: bool = True) -> Tokens:
    row_HW, column_HW = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    rows, columns = row_HW.flatten(), column_HW.flatten()
    unknown = torch.full_like(rows, UNKNOWN)
    return Tokens(torch.full_like(rows, PATCH), rows if known else unknown, columns if known else unknown)


def _unplaced(kinds: list[int]) -> Tokens:
    unknown = torch.full((len(kinds),), UNKNOWN)
    return Tokens(torch.tensor(kinds, dtype=torch.long), unknown, unknown)


def _leading(length: int, height: int, width: int) -> Tokens:
    """One image's tokens: CLS and registers, then the grid; where that does not fit, patches without places."""
    extra = length - height * width
    if height * width == 0 or extra < 0:
        return _unplaced([PATCH] * length)
    return concatenate([_unplaced(([CLS] + [REGISTER] * (extra - 1))[:extra]), _grid(height, width)])


def _trailing(length: int, height: int, width: int) -> Tokens:
    """One image's tokens where images of several shapes share a batch: the grid of patches, then padding."""
    return concatenate([_grid(height, width), _unplaced([PADDING] * (length - height * width))])
