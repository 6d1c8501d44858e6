"""Scenes of coloured shapes or of two words: their description, their picture and the questions they answer.

A scene is drawn from a seeded generator of its own, so it never depends on how many others there are. Which
split may hold it follows from its description alone (:func:`split_of`): none is in both.
"""

import random
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

Split = Literal["train", "validation", "held_out"]

COLORS = {
    "red": (220, 20, 30),
    "green": (25, 160, 60),
    "blue": (35, 80, 235),
    "yellow": (255, 215, 20),
    "purple": (150, 40, 190),
    "orange": (255, 125, 0),
}
SHAPES = ("circle", "square", "triangle", "star")
# Centres in units of the image's side.
POSITIONS = {"left": (0.2, 0.5), "right": (0.8, 0.5), "top": (0.5, 0.2), "bottom": (0.5, 0.8)}
COUNTS = ("one", "two", "three", "four")
# Two light, two dark, in turn with the splits (see split_of): each split meets both.
BACKGROUNDS = ((252, 252, 252), (222, 222, 222), (14, 14, 14), (56, 56, 56))
_FIRST_DARK = 2
WORDS = ("sun", "fish", "moon", "book", "milk", "tree", "king", "house")

_HALF_SIDE = {"circle": 0.165, "square": 0.14, "triangle": 0.18, "star": 0.185}
_JITTER = 0.01
_OVERSAMPLING = 4


def with_article(noun: str) -> str:
    """``a circle``, ``an orange star``."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


@dataclass(frozen=True)
class Thing:
    """One coloured shape at one of the four positions."""

    color: str
    shape: str
    position: str


@dataclass(frozen=True)
class Scene:
    """One to four things, no two of one colour, shape or position; or else two words, top and bottom."""

    things: tuple[Thing, ...]
    words: tuple[str, ...]
    background: int

    def description(self) -> tuple[tuple[tuple[str, str, str], ...], tuple[str, ...], int]:
        """What a person would say is in it, independent of the order of drawing."""
        return tuple(sorted((t.color, t.shape, t.position) for t in self.things)), self.words, self.background

    def caption(self) -> str:
        """Everything there is, in as few tokens as possible: most of them then depend on the picture."""
        if self.words:
            return f"{self.words[0]} top, {self.words[1]} bottom"
        return ", ".join(f"{thing.color} {thing.shape} {thing.position}" for thing in self.things)


def _content_code(things: tuple[Thing, ...], words: tuple[str, ...]) -> int:
    codes = [list(COLORS).index(t.color) + SHAPES.index(t.shape) + list(POSITIONS).index(t.position) for t in things]
    return sum(codes) + sum(WORDS.index(word) for word in words)


def split_of(scene: Scene) -> Split:
    """The only split that may hold this scene. Each content occurs in all, on other backgrounds: no bias.

    ``validation`` is what recipes are chosen on, ``held_out`` what is reported.
    """
    code = _content_code(scene.things, scene.words) + scene.background
    return ("train", "validation", "train", "held_out")[code % len(BACKGROUNDS)]


def _with_background(things: tuple[Thing, ...], words: tuple[str, ...], split: Split, rng: random.Random) -> Scene:
    scenes = [Scene(things, words, background) for background in range(len(BACKGROUNDS))]
    return rng.choice([scene for scene in scenes if split_of(scene) == split])


def shape_scene(first: Thing, count: int, split: Split, rng: random.Random) -> Scene:
    """A scene of ``count`` things (1 to 4) of which ``first`` is one; the others are random."""
    others = [
        rng.sample([name for name in names if name != taken], count - 1)
        for names, taken in ((COLORS, first.color), (SHAPES, first.shape), (POSITIONS, first.position))
    ]
    things = (first, *(Thing(*names) for names in zip(*others, strict=True)))
    return _with_background(things, (), split, rng)


def word_scene(top: str, bottom: str, split: Split, rng: random.Random) -> Scene:
    """A scene of two different words."""
    return _with_background((), (top, bottom), split, rng)


def render(scene: Scene, size: int, rng: random.Random) -> Image.Image:
    """The picture, ``size`` × ``size`` pixels; ``rng`` moves things by up to 1 % of the side."""
    canvas = size * _OVERSAMPLING
    image = Image.new("RGB", (canvas, canvas), BACKGROUNDS[scene.background])
    draw = ImageDraw.Draw(image)
    for thing in scene.things:
        x, y = POSITIONS[thing.position]
        x, y = (value + rng.uniform(-_JITTER, _JITTER) for value in (x, y))
        half = _HALF_SIDE[thing.shape] * canvas
        _draw_shape(draw, thing, x * canvas, y * canvas, half)
    for word, centre in zip(scene.words, (0.27, 0.73), strict=False):
        x, y = (value + rng.uniform(-_JITTER, _JITTER) for value in (0.5, centre))
        ink = (255, 255, 255) if scene.background >= _FIRST_DARK else (0, 0, 0)
        _draw_word(draw, word, (x * canvas, y * canvas), canvas, ink)
    return image.resize((size, size), Image.Resampling.BOX)


def _draw_shape(draw: ImageDraw.ImageDraw, thing: Thing, x: float, y: float, half: float) -> None:
    fill = COLORS[thing.color]
    if thing.shape == "circle":
        draw.ellipse((x - half, y - half, x + half, y + half), fill=fill)
    elif thing.shape == "square":
        draw.rectangle((x - half, y - half, x + half, y + half), fill=fill)
    elif thing.shape == "triangle":
        draw.polygon([(x, y - half), (x + half, y + 0.8 * half), (x - half, y + 0.8 * half)], fill=fill)
    else:
        draw.polygon(_star(x, y, half), fill=fill)


def _star(x: float, y: float, radius: float) -> list[tuple[float, float]]:
    # Written out, because sin and cos differ in the last digit between C libraries.
    tips = [(0.0, -1.0), (0.9511, -0.3090), (0.5878, 0.8090), (-0.5878, 0.8090), (-0.9511, -0.3090)]
    dents = [(0.2645, -0.3641), (0.4280, 0.1391), (0.0, 0.45), (-0.4280, 0.1391), (-0.2645, -0.3641)]
    pairs = zip(tips, dents, strict=True)
    return [(x + radius * u, y + radius * v) for pair in pairs for u, v in pair]


def _draw_word(
    draw: ImageDraw.ImageDraw, word: str, centre: tuple[float, float], canvas: int, ink: tuple[int, int, int]
) -> None:
    """The word in bold, as large as fits 88 % of the width and 42 % of the height."""
    stroke = canvas // 90
    probe = ImageFont.load_default(100)
    left, top, right, bottom = draw.textbbox((0, 0), word, font=probe)
    scale = min((0.88 * canvas - 2 * stroke) / (right - left), (0.42 * canvas - 2 * stroke) / (bottom - top))
    font = ImageFont.load_default(int(100 * scale))
    left, top, right, bottom = draw.textbbox((0, 0), word, font=font)
    corner = (centre[0] - (left + right) / 2, centre[1] - (top + bottom) / 2)
    draw.text(corner, word, font=font, fill=ink, stroke_width=stroke, stroke_fill=ink)
