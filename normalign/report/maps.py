"""Attention maps: every image once, shrunk to a budget, and a small translucent map per variant."""

import base64
import io
from typing import Any

import numpy as np
from matplotlib import colormaps
from PIL import Image

from normalign.report.blocks import Gallery, MapItem, MapPanel
from normalign.report.inputs import ReportInputs, dig

IMAGE_BUDGET = 2_500_000  # characters of base64: keeps the page below 5 MB with all its charts
SIDES = (336, 224, 160, 112)

Key = tuple[str, str]


def attention_gallery(inputs: ReportInputs) -> Gallery:
    """The maps of a profile's variants."""
    return map_gallery({variant.name: variant.attention or [] for variant in inputs.variants})


def map_gallery(found: dict[str, list[dict[str, Any]]]) -> Gallery:
    """All items that any model has a map of, in the order of the entries, within the image budget.

    An entry has id, question, grid, layer, map and image_png_base64; a benchmark's also task, answer and prediction.
    """
    keyed = {name: _by_key(entries) for name, entries in found.items()}
    first: dict[Key, dict[str, Any]] = {}
    for entries in keyed.values():
        for key, entry in entries.items():
            first.setdefault(key, entry)
    images = _fitting_images({key: entry["image_png_base64"] for key, entry in first.items()})
    items = []
    for index, (key, (uri, width, height)) in enumerate(images.items()):
        shown = [_panel(name, entries.get(key)) for name, entries in keyed.items()]
        entry = first[key]
        task, question, answer = (str(entry.get(field, "")) for field in ("task", "question", "answer"))
        items.append(MapItem(f"image-{index}", task, question, answer, uri, width, height, shown))
    return Gallery(items)


def overlay_png(weights: list[list[float]]) -> bytes:
    """A map (rows × columns, any scale) as a PNG of that many pixels: brighter is more attention.

    The browser enlarges it over the image; each map is scaled to its own maximum.
    """
    share = np.asarray(weights, dtype=np.float64)
    share = share / max(float(share.max()), 1e-30)
    pixels = np.asarray(colormaps["inferno"](share), dtype=np.float64)
    pixels[..., 3] = 0.35 + 0.4 * share
    return _png(Image.fromarray(np.round(pixels * 255).astype(np.uint8), "RGBA"))


def _panel(variant: str, entry: dict[str, Any] | None) -> MapPanel:
    if entry is None:
        return MapPanel(variant, None, "", "")
    rows, columns = entry["grid"]
    peak = max(max(row) for row in entry["map"])
    caption = f"layer {entry['layer'] + 1}; strongest of {rows * columns} tokens: {100 * peak:.1f} %"
    return MapPanel(variant, _uri(overlay_png(entry["map"])), caption, str(entry.get("prediction", "")))


def _by_key(entries: list[dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    """Entries by task and item; a text item has no image to draw on."""
    return {(str(e.get("task", "")), str(e["id"])): e for e in entries if dig(e, "image_png_base64") and e.get("map")}


def _fitting_images(encoded: dict[Key, str]) -> dict[Key, tuple[str, int, int]]:
    """Images as data URIs at the largest side that fits the budget; at the smallest, the first ones."""
    images: dict[Key, tuple[str, int, int]] = {}
    for side in SIDES:
        images = {key: _shrunk(data, side) for key, data in encoded.items()}
        if sum(len(uri) for uri, _, _ in images.values()) <= IMAGE_BUDGET:
            return images
    kept: dict[Key, tuple[str, int, int]] = {}
    used = 0
    for key, image in images.items():
        used += len(image[0])
        if used <= IMAGE_BUDGET:
            kept[key] = image
    return kept


def _shrunk(data: str, side: int) -> tuple[str, int, int]:
    """The image with its longer side at most ``side`` pixels, as a data URI with its width and height."""
    with Image.open(io.BytesIO(base64.b64decode(data))) as opened:
        image = opened.convert("RGB")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return _uri(_png(image)), image.width, image.height


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
