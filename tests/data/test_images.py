"""Image decoding: every kind of file a data set may hold comes out as upright 8-bit RGB or is rejected by reason."""

import itertools
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

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


def png(chunks: list[tuple[bytes, bytes]]) -> bytes:
    parts = (struct.pack(">I", len(b)) + kind + b + struct.pack(">I", zlib.crc32(kind + b)) for kind, b in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


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


def ink_profile(nodes: dict[tuple[int, ...], tuple[float, float, float]]) -> bytes:
    """An ICC profile of a printer: the CIE L*a*b* colour of each combination of no ink (0) and full ink (1).

    A header, and table A2B0 as lut16Type with two grid points per ink (ICC.1:2001-04, 6.1 and 6.5.8).
    """
    matrix = struct.pack(">9i", *(65536 if i % 4 == 0 else 0 for i in range(9)))
    line = struct.pack(">2H", 0, 65535)
    grid = b"".join(
        struct.pack(">3H", *(round(v) for v in (level / 100 * 0xFF00, (a + 128) * 256, (b + 128) * 256)))
        for level, a, b in (nodes[ink] for ink in sorted(nodes))  # the last ink varies fastest
    )
    table = b"mft2" + bytes(4) + bytes([4, 3, 2, 0]) + matrix + struct.pack(">2H", 2, 2) + line * 4 + grid + line * 3
    white = b"XYZ " + bytes(4) + struct.pack(">3i", 63190, 65536, 54061)  # D50
    text = b"text" + bytes(4) + b"none\0"
    description = b"desc" + bytes(4) + struct.pack(">I", 5) + b"none\0" + bytes(78)
    content, directory = b"", b""
    first = 128 + 4 + 4 * 12
    for tag, value in ((b"desc", description), (b"cprt", text), (b"wtpt", white), (b"A2B0", table)):
        directory += tag + struct.pack(">2I", first + len(content), len(value))
        content += value + bytes(-len(value) % 4)
    header = struct.pack(">I", first + len(content)) + bytes(4) + struct.pack(">I", 0x02400000) + b"prtrCMYKLab "
    header += struct.pack(">6H", 2025, 1, 1, 0, 0, 0) + b"acsp" + bytes(28)
    header += struct.pack(">3i", 63190, 65536, 54061) + bytes(48)
    return header + struct.pack(">I", 4) + directory + content


def test_inks_look_as_their_profile_says(tmp_path: Path) -> None:
    # A printer whose cyan is a middle grey: L* = 53.585 is sRGB 128; paper is white, any other ink is black.
    nodes = dict.fromkeys(itertools.product((0, 1), repeat=4), (0.0, 0.0, 0.0))
    nodes[0, 0, 0, 0], nodes[1, 0, 0, 0] = (100.0, 0.0, 0.0), (53.585, 0.0, 0.0)
    profile = ink_profile(nodes)
    for kind, options in (("tif", {}), ("jpg", {"quality": 100})):
        for ink, expected in (((255, 0, 0, 0), 128), ((0, 0, 0, 0), 255), ((0, 255, 0, 0), 0)):
            image = Image.new("CMYK", (16, 16), ink)
            name = save(image, tmp_path, f"print.{kind}", icc_profile=profile, **options)
            assert np.allclose(pixel(name, tmp_path), (expected,) * 3, atol=2), (kind, ink)
    # Without a profile, and with one that cannot be read or is not one of inks, cyan is cyan.
    cyan = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    screen = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for other in (None, b"no profile", profile[:200], screen):
        name = save(cyan, tmp_path, "plain.tif", icc_profile=other)
        assert pixel(name, tmp_path) == (0, 255, 255)


def deep_png(levels: np.ndarray, transparent: tuple[int, ...] | None = None) -> bytes:
    """A PNG of 16 bits a channel from ``levels`` (height, width, channels): grey, grey+alpha, RGB or RGBA."""
    height, width, channels = levels.shape
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in levels)
    key = [] if transparent is None else [(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent))]
    header = (b"IHDR", struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0))
    return png([header, *key, (b"IDAT", zlib.compress(lines)), (b"IEND", b"")])


@pytest.mark.parametrize("value", [0, 128, 257, 32896, 65000, 65535])
def test_sixteen_bit_colours_keep_their_brightness_to_one_level(tmp_path: Path, value: int) -> None:
    (tmp_path / "deep.png").write_bytes(deep_png(np.array([[[value, 65535, 0]]])))
    red, green, blue = pixel("deep.png", tmp_path)
    assert abs(red - value / 257) <= 1 and (green, blue) == (255, 0)


def test_sixteen_bit_transparency_lies_over_white(tmp_path: Path) -> None:
    half = 32896  # 128 of 255
    (tmp_path / "rgba.png").write_bytes(deep_png(np.array([[[65535, 0, 0, half]]])))
    assert pixel("rgba.png", tmp_path) == (255, 127, 127)
    (tmp_path / "grey.png").write_bytes(deep_png(np.array([[[0, half]]])))
    assert pixel("grey.png", tmp_path) == (127, 127, 127)
    # One level or colour that counts as transparent, beside one that does not.
    (tmp_path / "key.png").write_bytes(deep_png(np.array([[[1000], [0]]]), (1000,)))
    assert pixel("key.png", tmp_path) == (255, 255, 255) and pixel("key.png", tmp_path, 1) == (0, 0, 0)
    colours = np.array([[[65535, 0, 514], [65535, 0, 0]]])
    (tmp_path / "keys.png").write_bytes(deep_png(colours, (65535, 0, 514)))
    assert pixel("keys.png", tmp_path) == (255, 255, 255) and pixel("keys.png", tmp_path, 1) == (255, 0, 0)


def tiff(tags: dict[int, tuple[int, ...]], *strips: bytes) -> bytes:
    """A little-endian TIFF of one picture; where its strips (or tiles) lie is filled in."""
    places = [8 + sum(map(len, strips[:i])) for i in range(len(strips))]
    tiled = 322 in tags
    tags = {**tags, 324 if tiled else 273: tuple(places), 325 if tiled else 279: tuple(map(len, strips))}
    body = b"".join(strips)
    start, entries, behind = 8 + len(body), b"", b""
    after = start + 2 + 12 * len(tags) + 4
    for tag, values in sorted(tags.items()):
        packed = struct.pack(f"<{len(values)}I", *values)
        if len(values) > 1:
            packed, behind = struct.pack("<I", after + len(behind)), behind + packed
        entries += struct.pack("<HHI", tag, 4, len(values)) + packed
    header = struct.pack("<2sHI", b"II", 42, start) + body
    return header + struct.pack("<H", len(tags)) + entries + b"\0" * 4 + behind


def size(width: int, height: int, *bits: int) -> dict[int, tuple[int, ...]]:
    """TIFF tags: size, bits of each sample, number of samples, rows in a strip."""
    return {256: (width,), 257: (height,), 258: bits, 277: (len(bits),), 278: (height,)}


@pytest.mark.parametrize("compressed", [False, True])
def test_twelve_bits_are_scaled_not_taken_for_sixteen(tmp_path: Path, compressed: bool) -> None:
    content = bytes([0x00, 0x00, 0x10, 0x80, 0x0F, 0xFF])  # levels 0, 16, 2048, 4095
    tags = size(4, 1, 12) | {262: (1,), 259: (8 if compressed else 1,)}
    (tmp_path / "deep.tif").write_bytes(tiff(tags, zlib.compress(content) if compressed else content))
    assert [pixel("deep.tif", tmp_path, x)[0] for x in range(4)] == [0, 1, 128, 255]


def test_deep_colours_in_uncompressed_planes_are_refused_and_compressed_ones_read(tmp_path: Path) -> None:
    planes = [struct.pack("<2H", *levels) for levels in ((65535, 0), (0, 32896), (0, 65535))]
    tags = size(2, 1, 16, 16, 16) | {262: (2,), 284: (2,)}
    (tmp_path / "raw.tif").write_bytes(tiff(tags | {259: (1,)}, *planes))
    assert reason("raw.tif", tmp_path) == "image_undecodable"
    (tmp_path / "deflated.tif").write_bytes(tiff(tags | {259: (8,)}, *map(zlib.compress, planes)))
    assert pixel("deflated.tif", tmp_path) == (255, 0, 0) and pixel("deflated.tif", tmp_path, 1) == (0, 128, 255)


def test_tiles_larger_than_the_picture_count_against_the_pixel_cap(tmp_path: Path) -> None:
    tags = size(8, 8, 8) | {262: (1,), 259: (8,), 322: (20_000,), 323: (20_000,)}
    (tmp_path / "bomb.tif").write_bytes(tiff(tags, zlib.compress(b"\0" * 1000)))
    assert reason("bomb.tif", tmp_path) == "image_too_large"
    # Without tiles the tags say nothing.
    stray = tiff(size(8, 8, 8) | {262: (1,), 259: (1,), 321: (20_000,), 320: (20_000,)}, b"\x07" * 64)
    stray = stray.replace(struct.pack("<HH", 320, 4), struct.pack("<HH", 322, 4))
    (tmp_path / "stray.tif").write_bytes(stray.replace(struct.pack("<HH", 321, 4), struct.pack("<HH", 323, 4)))
    assert pixel("stray.tif", tmp_path, 7, 7) == (7, 7, 7)
    tags = size(8, 8, 8) | {262: (1,), 259: (8,), 322: (16,), 323: (16,)}
    (tmp_path / "good.tif").write_bytes(tiff(tags, zlib.compress(b"\x07" * 256)))
    assert pixel("good.tif", tmp_path, 7, 7) == (7, 7, 7)


def test_grey_multiplied_by_its_alpha_lies_over_white(tmp_path: Path) -> None:
    tags = size(2, 1, 8, 8) | {262: (1,), 259: (1,), 338: (1,)}
    (tmp_path / "grey.tif").write_bytes(tiff(tags, bytes([64, 128, 9, 255])))
    assert np.allclose(pixel("grey.tif", tmp_path), 64 + 127, atol=1) and pixel("grey.tif", tmp_path, 1) == (9, 9, 9)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_one_grey_level_is_transparent_at_every_depth(tmp_path: Path, depth: int) -> None:
    top = (1 << depth) - 1
    for key in {0, 1, top // 2, top}:
        other = top - key if top - key != key else 0
        line = (key << (8 - depth)) | (other << (8 - 2 * depth)) if depth < 8 else (key << 8) | other
        data = line.to_bytes(1 if depth < 8 else 2, "big")
        header = (b"IHDR", struct.pack(">IIBBBBB", 2, 1, depth, 0, 0, 0, 0))
        chunks = [header, (b"tRNS", struct.pack(">H", key)), (b"IDAT", zlib.compress(b"\0" + data)), (b"IEND", b"")]
        (tmp_path / "key.png").write_bytes(png(chunks))
        assert pixel("key.png", tmp_path) == (255, 255, 255), key
        assert pixel("key.png", tmp_path, 1) == (other * 255 // top,) * 3, key


def test_a_small_sixteen_bit_key_is_not_taken_for_one_of_eight_bits(tmp_path: Path) -> None:
    colours = np.array([[[0x8000, 0, 0], [128, 0, 0]]])
    (tmp_path / "key.png").write_bytes(deep_png(colours, (128, 0, 0)))
    assert pixel("key.png", tmp_path) == (128, 0, 0) and pixel("key.png", tmp_path, 1) == (255, 255, 255)


@pytest.mark.parametrize("quality", [50, 75, 95])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_jpeg_whose_rest_was_never_written_is_rejected(tmp_path: Path, quality: int, share: float) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (200, 300, 3), dtype=np.uint8)
    for options in ({}, {"progressive": True}):
        name = save(Image.fromarray(noise), tmp_path, "photo.jpg", quality=quality, **options)
        content = (tmp_path / name).read_bytes()
        cut = int(share * len(content))
        (tmp_path / name).write_bytes(content[:cut] + b"\0" * (len(content) - cut))
        assert reason(name, tmp_path) == "image_undecodable", options
        (tmp_path / name).write_bytes(content + b"\0" * 100)  # what follows the end does not matter
        assert open_image(name, tmp_path, LIMIT).size == (300, 200)


def test_what_lies_within_or_behind_a_whole_jpeg_does_not_cost_it(tmp_path: Path) -> None:
    """Markers in thumbnails, comments and profiles, and in a film behind the picture, are not the picture's."""
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    small = Image.fromarray(noise[:16, :16])
    save(small, tmp_path, "thumbnail.jpg")
    thumbnail = (tmp_path / "thumbnail.jpg").read_bytes()
    plain = save(Image.fromarray(noise), tmp_path, "plain.jpg")
    expected = np.asarray(open_image(plain, tmp_path, LIMIT))
    content = (tmp_path / plain).read_bytes()
    spans = b"\xff\xda\xff\xd9\xff\xda" * 20
    segments = [thumbnail, thumbnail[:-2], spans, b"\xff" * 999]
    variants = [
        *(content[:2] + b"\xff\xe1" + struct.pack(">H", len(s) + 2) + s + content[2:] for s in segments),
        *(content + behind for behind in (spans, b"\xff\xda", b"\0" * 5000, thumbnail[:-30], noise.tobytes())),
    ]
    for number, variant in enumerate(variants):
        (tmp_path / "variant.jpg").write_bytes(variant)
        assert np.array_equal(np.asarray(open_image("variant.jpg", tmp_path, LIMIT)), expected), number
    for options in ({"restart_marker_blocks": 1}, {"progressive": True}, {"comment": spans}, {"icc_profile": spans}):
        assert open_image(save(Image.fromarray(noise), tmp_path, "kind.jpg", **options), tmp_path, LIMIT)


def test_a_file_that_cannot_be_opened_is_one_records_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = save(Image.new("RGB", (4, 4)), tmp_path, "locked.png")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ImageRejected, match=r"'locked\.png' cannot be read: Permission denied") as caught:
        open_image(name, tmp_path, LIMIT)
    assert caught.value.reason == "image_missing"


def test_sixteen_bit_tiff_may_count_from_white(tmp_path: Path) -> None:
    image = Image.fromarray(np.full((4, 4), 65535 - 32896, dtype=np.uint16))
    name = save(image, tmp_path, "negative.tif", tiffinfo={262: 0})
    assert pixel(name, tmp_path) == (128, 128, 128)


def test_sixteen_bit_images_are_turned_upright_too(tmp_path: Path) -> None:
    levels = np.zeros((2, 4), dtype=np.uint16)
    levels[:, :2] = 65535
    exif = Image.Exif()
    exif[0x0112] = 6  # the left half becomes the top
    for kind in ("png", "tif"):
        name = save(Image.fromarray(levels), tmp_path, f"turned.{kind}", exif=exif)
        assert open_image(name, tmp_path, LIMIT).size == (2, 4)
        assert pixel(name, tmp_path, 0, 0) == (255, 255, 255) and pixel(name, tmp_path, 0, 3) == (0, 0, 0)


def test_palette_without_transparency_gives_its_colours(tmp_path: Path) -> None:
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    for kind in ("png", "gif", "bmp"):
        assert pixel(save(palette, tmp_path, f"palette.{kind}"), tmp_path) == (10, 20, 30)


def test_grey_with_alpha_and_a_transparent_grey_lie_over_white(tmp_path: Path) -> None:
    assert pixel(save(Image.new("LA", (4, 4), (0, 128)), tmp_path, "la.png"), tmp_path) == (127, 127, 127)
    grey = Image.new("L", (2, 1), 5)
    grey.putpixel((1, 0), 6)
    name = save(grey, tmp_path, "key.png", transparency=5)
    assert pixel(name, tmp_path) == (255, 255, 255) and pixel(name, tmp_path, 1) == (6, 6, 6)


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
    for kind, options in {"gif": {}, "png": {}, "webp": {"lossless": True}, "tif": {}}.items():
        name = save(frames[0], tmp_path, f"moving.{kind}", save_all=True, append_images=frames[1:], **options)
        assert pixel(name, tmp_path) == (255, 0, 0), kind


def test_picture_of_several_views_gives_the_first(tmp_path: Path) -> None:
    views = [Image.new("RGB", (16, 16), color) for color in ((255, 0, 0), (0, 255, 0))]  # as telephones save them
    name = save(views[0], tmp_path, "views.jpg", format="MPO", save_all=True, append_images=views[1:])
    assert np.allclose(pixel(name, tmp_path), (255, 0, 0), atol=6)


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
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return png([(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")])


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_001, 50_000])
def test_pixel_cap_is_checked_on_the_header_alone(tmp_path: Path, side: int) -> None:
    (tmp_path / "bomb.png").write_bytes(png_header(side, side))
    assert reason("bomb.png", tmp_path) == "image_too_large"  # decoding would have said undecodable


def test_pixel_cap_is_inclusive(tmp_path: Path) -> None:
    name = save(Image.new("RGB", (10, 10)), tmp_path, "ten.png")
    assert open_image(name, tmp_path, 100).size == (10, 10)
    assert reason(name, tmp_path, 99) == "image_too_large"
