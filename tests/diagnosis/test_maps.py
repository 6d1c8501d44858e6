"""Attention maps: the grid of visual tokens and the part of the image it covers, or none where that is not certain."""

import base64
import io
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from normalign.diagnosis.attention import LastLook
from normalign.diagnosis.maps import map_entry, seen_part, token_grid


@pytest.mark.parametrize(
    ("shape", "tokens", "grid"),
    [
        ((1, 3, 28, 28), 16, (4, 4)),
        ((1, 3, 56, 56), 9, (3, 3)),
        ((1, 1, 3, 28, 56), 8, (2, 4)),
        ((1, 3, 28, 28), 5, None),
        ((4, 3, 28, 28), 16, None),  # tiles
        ((1, 4, 3, 28, 28), 16, None),
        ((24, 588), 16, None),  # loose patches without a grid beside them
    ],
)
def test_a_single_picture_gives_the_grid_of_its_proportions(
    shape: tuple[int, ...], tokens: int, grid: tuple[int, int] | None
) -> None:
    assert token_grid({"pixel_values": torch.zeros(shape)}, tokens) == grid


@pytest.mark.parametrize(
    ("thw", "tokens", "grid"),
    [([[1, 4, 6]], 6, (2, 3)), ([[1, 4, 6]], 24, (4, 6)), ([[1, 4, 6]], 7, None), ([[1, 2, 2], [1, 2, 2]], 2, None)],
)
def test_a_stated_grid_is_reduced_by_the_merge(thw: list[list[int]], tokens: int, grid: tuple[int, int] | None) -> None:
    assert token_grid({"image_grid_thw": torch.tensor(thw), "pixel_values": torch.zeros(24, 588)}, tokens) == grid


def test_a_processor_that_cuts_at_the_centre_shows_the_centre() -> None:
    image = Image.new("RGB", (300, 100), "red")
    image.paste("blue", (100, 0, 200, 100))
    cuts = SimpleNamespace(
        do_center_crop=True, do_pad=False, size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
    )
    seen = seen_part(image, cuts)
    assert seen is not None and seen.size == (100, 100) and seen.getcolors() == [(10000, (0, 0, 255))]
    cuts.crop_size = {"height": 168, "width": 168}
    seen = seen_part(image, cuts)
    assert seen is not None and seen.size == (50, 50)


def test_what_is_padded_has_no_map_and_what_is_stretched_is_seen_whole() -> None:
    image = Image.new("RGB", (30, 10))
    assert seen_part(image, SimpleNamespace(do_pad=True)) is None
    assert seen_part(image, SimpleNamespace(do_pad=None, do_center_crop=None)) is image


def test_an_entry_has_what_the_page_draws() -> None:
    look = LastLook()
    weights = torch.tensor([[[0.0] * 5] * 4 + [[0.1, 0.2, 0.3, 0.2, 0.2]]])
    visual = torch.tensor([True] * 4 + [False])
    look.add(2, weights, visual, ~visual)
    image = Image.new("RGB", (1000, 500), "green")
    inputs = {"pixel_values": torch.zeros(1, 3, 28, 28)}
    entry = map_entry("a.png", "What?", look, inputs, image, SimpleNamespace(image_processor=None))
    assert entry is not None
    assert (entry["id"], entry["question"], entry["grid"], entry["layer"]) == ("a.png", "What?", [2, 2], 2)
    assert entry["map"] == [[0.125, 0.25], [0.375, 0.25]]
    shown = Image.open(io.BytesIO(base64.b64decode(entry["image_png_base64"])))
    assert shown.size == (336, 168)
    assert map_entry("a.png", "What?", LastLook(), inputs, image, None) is None
