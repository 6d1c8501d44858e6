"""Opening images of untrusted data sets: confined to a folder, capped before decoding, always 8-bit RGB."""

from pathlib import Path
from typing import IO, Literal

import numpy as np
from PIL import Image, ImageOps

ImageReason = Literal["image_outside_root", "image_missing", "image_empty", "image_too_large", "image_undecodable"]

# What data sets use. Anything else stays out, above all EPS, which Pillow hands to an interpreter.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_WHITE = (255, 255, 255, 255)


class ImageRejected(ValueError):  # noqa: N818 (a verdict on the data, not a fault of the program)
    """An image that cannot be used; ``reason`` is the category under which it is counted."""

    def __init__(self, reason: ImageReason, message: str) -> None:
        super().__init__(message)
        self.reason: ImageReason = reason


def confine(path: str, root: Path) -> Path:
    """The file ``root / path``, links resolved.

    Raises:
        ImageRejected: ``image_outside_root`` if it leaves ``root`` (absolute, ``..`` or a link),
            ``image_missing`` if there is no such file.
    """
    if "\0" in path:
        raise ImageRejected("image_missing", f"{path!r} is no file name")
    relative = Path(path)
    if relative.is_absolute() or ".." in relative.parts:
        raise ImageRejected("image_outside_root", f"{path!r} leaves the image root; use a path relative to it")
    try:
        resolved = (root / relative).resolve()
        inside, exists = resolved.is_relative_to(root.resolve()), resolved.is_file()
    except (OSError, RuntimeError) as error:  # a loop of links, a name that is too long
        raise ImageRejected("image_missing", f"{path!r} cannot be resolved: {error}") from error
    if not inside:
        raise ImageRejected("image_outside_root", f"{path!r} is a link that leaves the image root")
    if not exists:
        raise ImageRejected("image_missing", f"{path!r} is not a file under the image root")
    return resolved


def open_image(path: str, root: Path, max_pixels: int) -> Image.Image:
    """Decode ``root / path`` completely and return it as 8-bit RGB, upright, transparency over white.

    The content decides about the format, not the file's extension; of an animation it is the first frame.

    Args:
        max_pixels: largest width × height; compared with the header before anything is decoded.

    Raises:
        ImageRejected: the file is missing, empty, outside ``root``, too large, truncated or not an image.
    """
    file = confine(path, root)
    if file.stat().st_size == 0:
        raise ImageRejected("image_empty", f"{path!r} has no content (0 bytes)")
    with file.open("rb") as handle:
        return _decode(handle, path, max_pixels)


def _decode(handle: IO[bytes], path: str, max_pixels: int) -> Image.Image:
    try:
        image = Image.open(handle, formats=_FORMATS)
        pixels = image.width * image.height
        if pixels > max_pixels:
            size = f"{image.width}×{image.height} = {pixels}"
            raise ImageRejected("image_too_large", f"{path!r} has {size} pixels, max_pixels is {max_pixels}")
        image.load()
        return _to_rgb(_upright(image))
    except ImageRejected:
        raise
    except Image.DecompressionBombError as error:
        raise ImageRejected("image_too_large", f"{path!r}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # decoders of broken files raise whatever their parser stumbles over
        raise ImageRejected("image_undecodable", f"{path!r} cannot be decoded: {error}") from error


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its EXIF orientation says; a broken EXIF block does not cost the picture."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # the EXIF parser raises many kinds of error on broken blocks
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # convert() would clip at 255 instead of scaling
        values = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"pixel mode {image.mode} has no standard range; save it with 8 or 16 bits per channel")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image)
    return image.convert("RGB")
