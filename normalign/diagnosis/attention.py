"""Attention from text to image: how much of it, how spread, and where on the image (SCIENCE §3).

Shape suffixes: L length, H heads, P visual tokens, Q text queries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TextToImage:
    """Per layer: ``mass`` on visual tokens and ``entropy`` over them (nats), means over text queries and heads."""

    mass: list[float]
    entropy: list[float]


def text_to_image(attentions: list[Tensor], visual_L: Tensor, queries_L: Tensor) -> TextToImage:
    """Statistics of attention matrices (H, L, L), one per layer, for one sample.

    Args:
        visual_L: which positions are visual tokens.
        queries_L: which text positions to average over; they must come after the image, or they cannot look at it.
    """
    mass, entropy = [], []
    for weights_HLL in attentions:
        weights_HQP = weights_HLL.double()[:, queries_L][:, :, visual_L]
        total = weights_HQP.sum(-1)
        share = weights_HQP / total.clamp_min(1e-30).unsqueeze(-1)
        mass.append(total.mean().item())
        entropy.append(-(share * share.clamp_min(1e-30).log()).sum(-1).mean().item())
    return TextToImage(mass, entropy)


def image_map(weights_HLL: Tensor, visual_L: Tensor, query: int, grid: int) -> list[list[float]]:
    """Where on the image position ``query`` looks: (grid, grid), summing to 1, mean over heads."""
    weights_P = weights_HLL.double()[:, query, visual_L].mean(0)
    share = weights_P / weights_P.sum().clamp_min(1e-30)
    return torch.round(share, decimals=6).reshape(grid, grid).tolist()
