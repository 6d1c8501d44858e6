"""Norms of a vision tower's tokens per layer over the images of a folder, each kind of token by itself (UB §4, RQ1).

Shape suffixes: N tokens of all images.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normalign.anatomy.load import first_line
from normalign.diagnosis.encoder import EncoderNorms
from normalign.diagnosis.pictures import Pictures
from normalign.diagnosis.towers import CLS, PATCH, REGISTER, UNKNOWN, Tokens, Tower, TowerCall, concatenate
from normalign.norms.statistics import summarise_norms, vision_sinks

PLACES = 5  # of sink tokens, the most frequent ones


@torch.no_grad()
def measure_tower(
    tower: Tower, pictures: Pictures, done: Callable[[int], None] = lambda _files: None
) -> dict[str, Any]:
    """One pass per image; per hidden state the norms of patches, of CLS and of registers.

    Args:
        done: told how many files are behind.

    Returns:
        ``layers`` (hidden state 0 is what enters the first block) and ``after_final_norm`` (None without such a norm):
        ``patches`` as :func:`summarise_norms` gives it, its ``sinks`` with the ``places`` (row, column) where they are
        most often; ``cls`` and ``registers``: mean, std, median, tokens, or None.

    Raises:
        ValueError: no image was usable, or the tower cannot be run on what its image processor makes.
    """
    norms = EncoderNorms(tower.module)
    tokens: list[Tokens] = []
    refused: Counter[str] = Counter()
    for _, image in pictures:
        done(len(tokens) + pictures.skipped.total() + refused.total())
        try:
            inputs = tower.inputs(image)
        except (
            ValueError,
            RuntimeError,
            TypeError,
            LookupError,
        ) as error:  # such as an aspect ratio that it does not take
            refused[f"image_processor: {first_line(error)}"] += 1
            continue
        with TowerCall(tower.module) as call:
            try:
                norms.add(lambda inputs=inputs: tower.run(**inputs))  # type: ignore[misc]
            except (ValueError, RuntimeError, TypeError, AttributeError, AssertionError, LookupError) as error:
                raise ValueError(f"{tower.name}: the tower cannot be run on an image: {first_line(error)}") from error
        tokens.append(call.tokens(len(norms.norms[0][-1])))
    if not tokens:
        pictures.skipped.update(refused)
        raise pictures.none_usable()
    return _table(tower, norms, concatenate(tokens)) | {
        "images": len(tokens),
        "skipped": dict(sorted((pictures.skipped + refused).items())),
    }


def _table(tower: Tower, norms: EncoderNorms, tokens: Tokens) -> dict[str, Any]:
    after = norms.after_final_norm()
    return {
        "model": tower.name,
        "family": tower.family,
        "tower": type(tower.module).__name__,
        "blocks": len(norms.layers),
        "layers": [_kinds(norms_N.cpu(), tokens) for norms_N in norms.hidden_states()],
        "after_final_norm": None if after is None else _kinds(after.cpu(), tokens),
    }


def _kinds(norms_N: Tensor, tokens: Tokens) -> dict[str, Any]:
    patch_N = tokens.kind_N == PATCH
    patches_N = norms_N[patch_N]
    sinks_N = vision_sinks(patches_N)
    summary = summarise_norms(patches_N, sinks_N)
    summary["sinks"]["places"] = _places(tokens.row_N[patch_N], tokens.column_N[patch_N], sinks_N)
    return {
        "patches": summary,
        "cls": _short(norms_N[tokens.kind_N == CLS]),
        "registers": _short(norms_N[tokens.kind_N == REGISTER]),
    }


def _short(norms_N: Tensor) -> dict[str, Any] | None:
    if not norms_N.numel():
        return None
    summary = summarise_norms(norms_N, torch.zeros_like(norms_N, dtype=torch.bool))
    return {key: summary[key] for key in ("mean", "std", "median", "tokens")}


def _places(row_N: Tensor, column_N: Tensor, sinks_N: Tensor) -> list[dict[str, int]] | None:
    """The places where sinks are most often; None where places are not known."""
    if (row_N == UNKNOWN).any():
        return None
    counted = Counter(zip(row_N[sinks_N].tolist(), column_N[sinks_N].tolist(), strict=True))
    ordered = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    return [{"row": row, "column": column, "count": count} for (row, column), count in ordered[:PLACES]]
