"""Samples for the tiny model."""

from collections.abc import Sequence

import torch
from PIL import Image
from transformers import LlavaProcessor

from normalign.vlm.chat import Encoded
from normalign.vlm.checkpoint import chat_format
from normalign.vlm.forward import Visual
from normalign.vlm.generate import pixels_of
from normalign.vlm.model import NormalignForConditionalGeneration

CONVERSATIONS: list[tuple[str | None, list[tuple[str, str]]]] = [
    ("a", [("What?", "a red dot"), ("Where?", "left"), ("Size?", "big")]),
    (None, [("2 + 2?", "4")]),
    ("b", [("What is it?", "a green box")]),
    ("a", [("Colour?", "red"), ("Many?", "one")]),
    ("c", [("Describe.", "blue on white, small")]),
    (None, [("Say hello.", "hello"), ("Again.", "hello again")]),
]


def picture(key: str, size: int = 28) -> Image.Image:
    """A picture of noise that depends on ``key`` alone."""
    generator = torch.Generator().manual_seed(sum(key.encode()) + 1)
    return Image.fromarray(torch.randint(0, 256, (size, size, 3), generator=generator, dtype=torch.uint8).numpy())


def encoded(model: NormalignForConditionalGeneration, processor: LlavaProcessor, *, per_turn: bool) -> list[Encoded]:
    """``CONVERSATIONS`` as samples."""
    chat = chat_format(model, processor)
    return [
        chat.encode(f"sample {i}", turns, image, per_turn=per_turn, max_tokens=4096)
        for i, (image, turns) in enumerate(CONVERSATIONS)
    ]


def visual_of(processor: LlavaProcessor, samples: Sequence[Encoded]) -> Visual:
    """The samples' pictures, as pixels."""
    keys = [sample.image for sample in samples if sample.image is not None]
    if not keys:
        return Visual()
    return Visual(pixels=pixels_of(processor, [picture(key) for key in keys]))
