"""Likelihood of answer options: each image once, each question once below it, each option once below its question."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from transformers import LlavaProcessor

from normalign.vlm.chat import ChatFormat, Encoded
from normalign.vlm.checkpoint import chat_format
from normalign.vlm.forward import hidden_states, target_logits
from normalign.vlm.generate import pixels_of
from normalign.vlm.model import NormalignForConditionalGeneration
from normalign.vlm.packing import Packed, pack


@dataclass(frozen=True)
class Question:
    """A question with its answer options; ``image`` is a key that questions about one image share (None: no image)."""

    text: str
    options: tuple[str, ...]
    image: str | None


@dataclass(frozen=True)
class Scored:
    """Summed negative log-likelihood per option, and whether greedy decoding would produce the option."""

    nll: tuple[float, ...]
    greedy: tuple[bool, ...]


@dataclass
class _Tree:
    """A sample tree with, per segment of options, which (question, option) it stands for."""

    encoded: Encoded
    owners: list[tuple[int, int]]


def score(
    model: NormalignForConditionalGeneration,
    processor: LlavaProcessor,
    questions: Sequence[Question],
    images: dict[str, Image.Image],
    batch_tokens: int,
) -> list[Scored]:
    """Score every option of every question, as the answer that follows the question's prompt.

    Args:
        images: RGB image per key used in ``questions``.
        batch_tokens: tokens per forward pass (at least one tree is always taken).
    """
    chat = chat_format(model, processor)
    nll: list[list[float]] = [[0.0] * len(q.options) for q in questions]
    greedy: list[list[bool]] = [[True] * len(q.options) for q in questions]
    for batch in _batches(_trees(chat, questions, batch_tokens), batch_tokens):
        packed = pack(
            [tree.encoded for tree in batch],
            share_rows=False,  # of similar length, and attention costs the square of a row
            pad_id=processor.tokenizer.pad_token_id,
        )
        owners = {id(tree.encoded): tree.owners for tree in batch}
        losses, hits = _target_nll(model, processor, packed, images)
        target = 0
        for sample in packed.order:
            for question, option in owners[id(sample)]:
                nll[question][option] += losses[target]
                greedy[question][option] &= hits[target]
                target += 1
    return [Scored(tuple(n), tuple(g)) for n, g in zip(nll, greedy, strict=True)]


def _trees(chat: ChatFormat, questions: Sequence[Question], limit: int) -> list[_Tree]:
    """Questions about one image as one tree, split where a tree would pass ``limit`` tokens."""
    trees: list[_Tree] = []
    open_trees: dict[str, tuple[_Tree, int]] = {}
    for number, question in enumerate(questions):
        shared, own = chat.prompt(question.text, question.image is not None)
        options = [chat.option(question.text, option, question.image is not None) for option in question.options]
        size = len(own) + sum(len(o) for o in options)
        known = open_trees.get(question.image) if question.image is not None else None
        if known is None or len(known[0].encoded.ids) + size > limit:
            tree = _Tree(Encoded(f"question {number}", question.image), [])
            trees.append(tree)
            root = tree.encoded.add(shared) if shared else -1
            if question.image is not None:
                open_trees[question.image] = (tree, root)
        else:
            tree, root = known
        asked = tree.encoded.add(own, parent=root)
        for index, option_ids in enumerate(options):
            tree.encoded.add(option_ids, option_ids, parent=asked)
            tree.owners += [(number, index)] * len(option_ids)
    return trees


def _batches(trees: list[_Tree], batch_tokens: int) -> list[list[_Tree]]:
    batches: list[list[_Tree]] = []
    size = 0
    for tree in sorted(trees, key=lambda t: -len(t.encoded.ids)):
        if not batches or size + len(tree.encoded.ids) > batch_tokens:
            batches.append([])
            size = 0
        batches[-1].append(tree)
        size += len(tree.encoded.ids)
    return batches


@torch.no_grad()
def _target_nll(
    model: NormalignForConditionalGeneration,
    processor: LlavaProcessor,
    packed: Packed,
    images: dict[str, Image.Image],
) -> tuple[list[float], list[bool]]:
    """Negative log-likelihood of each target, and whether it is the most likely token."""
    packed = packed.to(model.device)
    keys = [sample.image for sample in packed.order if sample.image is not None]
    visual_tokens: Tensor | None = None
    if keys:
        pixels = pixels_of(processor, [images[key] for key in keys]).to(model.device, model.dtype)
        visual_tokens = model.model.project(model.model.encode(pixels))
    embeddings = model.model.embed(packed.input_ids_BL, visual_tokens)
    logits = target_logits(model, packed, hidden_states(model, packed, embeddings)).float()
    losses = torch.nn.functional.cross_entropy(logits, packed.label_N, reduction="none")
    return losses.tolist(), (logits.argmax(-1) == packed.label_N).tolist()
