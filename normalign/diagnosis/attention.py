"""Attention from text to image: how much of it, how spread, and where on the image (SCIENCE §3).

Shape suffixes: B samples, L length, H heads, P visual tokens, Q text queries.
"""

import torch
from torch import Tensor

from normalign.diagnosis.layers import Masks


def text_to_image(weights_HLL: Tensor, visual_L: Tensor, queries_L: Tensor) -> tuple[float, float]:
    """Mass on visual tokens and entropy over them (nats) of one sample's attention weights in one layer.

    Both are means over text queries and heads.

    Args:
        visual_L: which positions are visual tokens.
        queries_L: which text positions to average over; they must come after the image, or they cannot look at it.
    """
    weights_HQP = weights_HLL[:, _run(queries_L)][:, :, _run(visual_L)]
    total_HQ = weights_HQP.sum(-1).double()
    # With s = w/t: -Σ s log s = (-Σ w log w)/t + log t, so the shares need not be formed.
    entropy_HQ = torch.special.entr(weights_HQP).sum(-1).double() / total_HQ + total_HQ.log()
    return total_HQ.mean().item(), torch.where(total_HQ > 0, entropy_HQ, 0.0).mean().item()


def _run(mask_L: Tensor) -> slice | Tensor:
    """A mask as a slice where its positions follow one another, so that indexing copies nothing; else as it is."""
    at = mask_L.nonzero().squeeze(1).tolist()
    return slice(at[0], at[-1] + 1) if at[-1] - at[0] == len(at) - 1 else mask_L


class AttentionStatistics:
    """Accumulates :func:`text_to_image` per layer over samples, from one layer's weights at a time."""

    def __init__(self, depth: int) -> None:
        self.found: list[list[tuple[float, float]]] = [[] for _ in range(depth)]

    def add(self, layer: int, weights_BHLL: Tensor, masks: Masks) -> None:
        """Take one layer's weights of one batch; samples without text after their image are passed over."""
        for weights_HLL, visual_L, text_L in zip(weights_BHLL, masks.visual_BL, masks.text_BL, strict=True):
            queries_L = text_after_image(visual_L, text_L)
            if queries_L.any():
                device = weights_HLL.device
                self.found[layer].append(text_to_image(weights_HLL, visual_L.to(device), queries_L.to(device)))

    def summary(self) -> dict[str, list[float | None]] | None:
        """``mass`` and ``entropy`` per layer, means over samples; None in layers without weights, or if all are so."""
        if not any(self.found):
            return None
        return {
            name: [sum(each[part] for each in layer) / len(layer) if layer else None for layer in self.found]
            for part, name in enumerate(("mass", "entropy"))
        }


def text_after_image(visual_L: Tensor, text_L: Tensor) -> Tensor:
    """Which text positions (L,) of a sample come after its last visual token; none if it has no image."""
    at = visual_L.nonzero()
    if not len(at):
        return torch.zeros_like(text_L)
    return text_L & (torch.arange(len(text_L), device=text_L.device) > at.max())


class LastLook:
    """Where a sample's last text position, the one that answers, looks: in the layer that looks at the image most."""

    def __init__(self) -> None:
        self.layer: int | None = None
        self.mass = -1.0
        self.weights_P = torch.empty(0)

    def add(self, layer: int, weights_HLL: Tensor, visual_L: Tensor, text_L: Tensor) -> None:
        """Take one layer's weights of the sample."""
        queries_L = text_after_image(visual_L, text_L)
        if not queries_L.any():
            return
        weights_HP = weights_HLL[:, int(queries_L.nonzero().max()), visual_L.to(weights_HLL.device)]
        mass = weights_HP.sum(-1).mean().item()
        if mass > self.mass:
            self.layer, self.mass, self.weights_P = layer, mass, weights_HP.double().mean(0).cpu()

    def map(self, grid: tuple[int, int]) -> list[list[float]]:
        """The attention laid out over the image's ``grid`` (rows, columns), row by row; sums to 1."""
        share_P = self.weights_P / self.weights_P.sum().clamp_min(1e-30)
        return torch.round(share_P, decimals=6).reshape(grid).tolist()
