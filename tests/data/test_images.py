"""Image decoding: every kind of file a data set may hold comes out as upright 8-bit RGB or is rejected by reason."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from normalign.data.images import ImageRejected, open_image

LIMIT = 100_000_000


def save(image: Image.Image, folder: Path, name: str, **options: object) -> str:
    image.save(folder / name, **options)  # type: ignore[arg-type]
    return name


def pixel(path: str, folder: Path, x: int = 0, y: int = 0) -> tuple[int, ...]:
    image = open_image(path, folder, LIMIT)
    assert image.mode == "RGB"
    value = image.getpixel((x, y))
    assert isinstance(value, tuple)
    return tuple(int(channel) for channel in value)


def reason(path: str, folder: Path, limit: int = LIMIT) -> str:
    with pytest.raises(ImageRejected) as caught:
        open_image(path, folder, limit)
    return caught.value.reason


def test_photograph_sized_jpeg_is_decoded(tmp_path: Path) -> None:
    name = save(Image.new("RGB", (4000, 3000), (10, 200, 30)), tmp_path, "photo.jpg")
    image = open_image(name, tmp_path, LIMIT)
    assert image.size == (4000, 3000)
    assert np.allclose(pixel(name, tmp_path, 3999, 2999), (10, 200, 30), atol=3)


def test_greyscale_repeats_its_level_in_each_channel(tmp_path: Path) -> None:
    assert pixel(save(Image.new("L", (4, 4), 77), tmp_path, "grey.png"), tmp_path) == (77, 77, 77)


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (257, 1), (32896, 128), (65535, 255)])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path, value: int, expected: int) -> None:
    image = Image.fromarray(np.full((4, 4), value, dtype=np.uint16))
    assert pixel(save(image, tmp_path, "deep.png"), tmp_path) == (expected,) * 3


def test_cmyk_jpeg_keeps_its_colour(tmp_path: Path) -> None:
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    assert np.allclose(pixel(save(red, tmp_path, "print.jpg"), tmp_path), (255, 0, 0), atol=6)


def test_transparency_lies_over_white(tmp_path: Path) -> None:
    half_black = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert pixel(save(half_black, tmp_path, "half.png"), tmp_path) == (127, 127, 127)
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 0, 0, 255])
    palette.putpixel((0, 0), 0)
    name = save(palette, tmp_path, "palette.png", transparency=0)
    assert pixel(name, tmp_path) == (255, 255, 255)
    assert pixel(name, tmp_path, 1, 1) == (0, 0, 255)


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (32, 16), (255, 255, 255))
    image.paste((255, 0, 0), (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned 90° clockwise: the left half becomes the top
    name = save(image, tmp_path, "turned.jpg", exif=exif)
    assert open_image(name, tmp_path, LIMIT).size == (16, 32)
    assert np.allclose(pixel(name, tmp_path, 8, 4), (255, 0, 0), atol=6)
    assert np.allclose(pixel(name, tmp_path, 8, 28), (255, 255, 255), atol=6)


def test_animation_gives_its_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ((255, 0, 0), (0, 255, 0))]
    name = save(frames[0], tmp_path, "moving.gif", save_all=True, append_images=frames[1:])
    assert pixel(name, tmp_path) == (255, 0, 0)


def test_content_decides_and_not_the_extension(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), (1, 2, 3)).save(tmp_path / "picture.jpg", format="PNG")
    assert pixel("picture.jpg", tmp_path) == (1, 2, 3)


def test_broken_files_are_rejected_by_reason(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    for name in ("whole.jpg", "whole.png"):
        Image.fromarray(noise).save(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        (tmp_path / f"cut-{name}").write_bytes(content[: len(content) // 2])
        assert reason(f"cut-{name}", tmp_path) == "image_undecodable"
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "vector.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    (tmp_path / "zero.png").touch()
    assert reason("text.png", tmp_path) == "image_undecodable"
    assert reason("vector.eps", tmp_path) == "image_undecodable"
    assert reason("zero.png", tmp_path) == "image_empty"
    assert reason("none.png", tmp_path) == "image_missing"
    assert reason("nul\0.png", tmp_path) == "image_missing"


def test_nothing_outside_the_root_is_opened(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    save(Image.new("RGB", (4, 4)), tmp_path, "secret.png")
    save(Image.new("RGB", (4, 4)), root, "own.png")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "good-link.png").symlink_to(root / "own.png")
    (root / "loop.png").symlink_to(root / "loop.png")
    assert reason("../secret.png", root) == "image_outside_root"
    assert reason("inner/../../secret.png", root) == "image_outside_root"
    assert reason(str(tmp_path / "secret.png"), root) == "image_outside_root"
    assert reason("link.png", root) == "image_outside_root"
    assert reason("loop.png", root) == "image_missing"
    assert open_image("good-link.png", root, LIMIT).size == (4, 4)


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_001, 50_000])
def test_pixel_cap_is_checked_on_the_header_alone(tmp_path: Path, side: int) -> None:
    (tmp_path / "bomb.png").write_bytes(png_header(side, side))
    assert reason("bomb.png", tmp_path) == "image_too_large"  # decoding would have said undecodable


def test_pixel_cap_is_inclusive(tmp_path: Path) -> None:
    name = save(Image.new("RGB", (10, 10)), tmp_path, "ten.png")
    assert open_image(name, tmp_path, 100).size == (10, 10)
    assert reason(name, tmp_path, 99) == "image_too_large"
