"""Opening images of untrusted data sets: confined to a folder, capped before decoding, always 8-bit RGB."""

import contextlib
import io
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

ImageReason = Literal["image_outside_root", "image_missing", "image_empty", "image_too_large", "image_undecodable"]

# What data sets use. Anything else stays out, above all EPS, which Pillow hands to an interpreter.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_WHITE = (255, 255, 255, 255)
_LONGEST_PATH = 4096  # characters, as many as Linux takes; what is longer is data, not a name
# TIFF tags, and the values that matter here.
_BITS, _PHOTOMETRIC, _COMPRESSION, _PLANAR = 258, 262, 259, 284
_TILE_WIDTH, _TILE_LENGTH, _TILE_OFFSETS = 322, 323, 324
_MIN_IS_WHITE, _UNCOMPRESSED, _IN_PLANES = 0, 1, 2
_GREY_STEPS = {"L;2": 85, "L;4": 17}  # what Pillow multiplies levels of 2 and 4 bits by
# In JPEG's compressed data 0xFF is followed by 0 or stands in a restart marker; any other is the next marker.
_JPEG_MARKER = re.compile(rb"\xff([^\x00\xd0-\xd7\xff])", re.DOTALL)
_JPEG_END, _JPEG_WITHOUT_LENGTH = b"\xd9", (b"\xd8", b"\x01")

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # max_pixels says what is too large


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
    if len(path) > _LONGEST_PATH:
        raise ImageRejected("image_missing", f"a path of {len(path)} characters, {path[:40]!r}...")
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
    try:
        size, handle = file.stat().st_size, file.open("rb")
    except OSError as error:  # no permission, a broken disk
        raise ImageRejected("image_missing", f"{path!r} cannot be read: {error.strerror}") from error
    with handle:
        if size == 0:
            raise ImageRejected("image_empty", f"{path!r} has no content (0 bytes)")
        return _decode(_open(handle, path, max_pixels), path)


def store_image(content: bytes, name: str, root: Path, max_pixels: int) -> str:
    """Write an image that came inside a row to ``root`` as it is, if it is one; returns its path below ``root``.

    Args:
        name: file name without extension; the content decides about that.

    Raises:
        ImageRejected: as :func:`open_image`; nothing is written then.
    """
    if not content:
        raise ImageRejected("image_empty", f"image {name!r} has no content (0 bytes)")
    image = _open(io.BytesIO(content), name, max_pixels)
    _decode(image, name)
    path = f"{name}.{(image.format or '').lower()}"
    (root / path).write_bytes(content)
    return path


def _open(handle: IO[bytes], path: str, max_pixels: int) -> Image.Image:
    """The image with its header read, complete and no larger than allowed."""
    with _verdicts(path):
        image = Image.open(handle, formats=_FORMATS)
        for width, height in (image.size, _tile_size(image)):
            if width * height > max_pixels:
                size = f"{width}×{height} = {width * height}"
                raise ImageRejected("image_too_large", f"{path!r} has {size} pixels, max_pixels is {max_pixels}")
        _require_readable(image, handle)
    return image


def _tile_size(image: Image.Image) -> tuple[int, int]:
    """What a tiled TIFF is decoded by, which may be larger than the picture; nothing for other images."""
    if not isinstance(image, TiffImageFile) or _TILE_OFFSETS not in image.tag_v2:
        return 0, 0
    return int(image.tag_v2[_TILE_WIDTH]), int(image.tag_v2[_TILE_LENGTH])


def _require_readable(image: Image.Image, handle: IO[bytes]) -> None:
    """Refuse what Pillow would decode to a wrong picture without a word."""
    if image.format in ("JPEG", "MPO"):
        place = handle.tell()
        handle.seek(0)
        complete = _reaches_its_end(handle.read())
        handle.seek(place)
        if not complete:
            raise ValueError("its end is missing; fetch it again")
    if isinstance(image, TiffImageFile):
        deep = max(image.tag_v2.get(_BITS, (1,))) > 8
        if deep and image.tag_v2.get(_PLANAR) == _IN_PLANES and image.tag_v2.get(_COMPRESSION, 1) == _UNCOMPRESSED:
            raise ValueError("more than 8 bits in uncompressed colour planes; save it compressed or pixel by pixel")


def _reaches_its_end(jpeg: bytes) -> bool:
    """Whether a JPEG has the marker that ends its (first) picture; thumbnails lie within segments and do not count."""
    place = 0
    while found := _JPEG_MARKER.search(jpeg, place):
        place = found.end()
        if found[1] == _JPEG_END:
            return True
        if found[1] not in _JPEG_WITHOUT_LENGTH:
            place += int.from_bytes(jpeg[place : place + 2], "big")
    return False


def _decode(image: Image.Image, path: str) -> Image.Image:
    with _verdicts(path):
        _scale_key(image)
        image.load()
        return _to_rgb(_upright(_eight_bits(image)))


@contextlib.contextmanager
def _verdicts(path: str) -> Iterator[None]:
    """What decoders raise, as a verdict on the image ``path``."""
    try:
        yield
    except (MemoryError, ImageRejected):
        raise
    except Image.DecompressionBombError as error:
        raise ImageRejected("image_too_large", f"{path!r}: {error}") from error
    except UnidentifiedImageError as error:
        kinds = ", ".join(_FORMATS)
        raise ImageRejected("image_undecodable", f"{path!r} is none of {kinds}, or its beginning is broken") from error
    except Exception as error:  # decoders of broken files raise whatever their parser stumbles over
        raise ImageRejected("image_undecodable", f"{path!r} cannot be decoded: {error}") from error


def _scale_key(image: Image.Image) -> None:
    """Bring the transparent colour of a PNG, which Pillow leaves at the file's depth, to 8 bits, as it does pixels.

    Of 16-bit colours Pillow keeps the high bytes alone: a colour that shares them with the key is transparent too.
    """
    key, tiles = image.info.get("transparency"), getattr(image, "tile", [])
    depth = tiles[0].args if tiles else None
    if depth == "RGB;16B" and isinstance(key, tuple):
        image.info["transparency"] = tuple(level >> 8 for level in key)
    elif depth in _GREY_STEPS and isinstance(key, int):
        image.info["transparency"] = key * _GREY_STEPS[depth]


def _eight_bits(image: Image.Image) -> Image.Image:
    """A grey image of 12 or 16 bits scaled to 8, its transparent level as alpha; any other image as it is.

    Pillow's own conversion would clip at 255.
    """
    if not image.mode.startswith("I;16"):
        return image
    key = image.info.get("transparency")
    levels, top = np.asarray(image).astype(np.uint32), 65535
    if isinstance(image, TiffImageFile):
        top = (1 << image.tag_v2[_BITS][0]) - 1
        if image.tag_v2.get(_PHOTOMETRIC) == _MIN_IS_WHITE:
            levels = top - levels
    grey = Image.fromarray(((levels * 255 + top // 2) // top).astype(np.uint8))
    if isinstance(key, int):
        grey.putalpha(Image.fromarray(np.where(levels == key, 0, 255).astype(np.uint8)))
    grey.info.update({name: value for name, value in image.info.items() if name != "transparency"})
    return grey


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its EXIF orientation says; a broken EXIF block does not cost the picture."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # the EXIF parser raises many kinds of error on broken blocks
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F"):
        raise ValueError(f"pixel mode {image.mode} has no standard range; save it with 8 or 16 bits per channel")
    if image.mode == "CMYK":
        return _from_cmyk(image)
    if image.mode == "La":  # grey multiplied by its alpha, which Pillow converts to no other mode but this
        image = image.convert("LA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image)
    return image.convert("RGB")


def _from_cmyk(image: Image.Image) -> Image.Image:
    """Inks as their profile says they look; without one that can be read, as (255 − ink)(255 − black)/255."""
    profile = image.info.get("icc_profile")
    if profile:
        with contextlib.suppress(ImageCms.PyCMSError, OSError):
            inks = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            converted = ImageCms.profileToProfile(image, inks, ImageCms.createProfile("sRGB"), outputMode="RGB")
            if converted is not None:
                return converted
    return image.convert("RGB")
