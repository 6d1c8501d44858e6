"""Layer statistics of visual and text tokens, streamed (SCIENCE §3; UB §4, §5.3.3; TA).

Of every token and layer six numbers are kept; the states are only reduced to them, and to sums over tokens.

Shape suffixes: B samples, L length, D width, N tokens of one modality, C columns.
"""

from typing import Any

import torch
from torch import Tensor

from normalign.diagnosis.capture import LayerStep
from normalign.diagnosis.tokens import TokenSteps, at_least_float32, reduce_step, with_float64
from normalign.norms.rank import StreamedGram
from normalign.norms.statistics import language_sinks, summarise_norms, sync_gap
from normalign.norms.theory import predict_angles, update_correlation

MODALITIES = ("visual", "text")
FIRST_LAYERS = 8


class Masks:
    """Which positions (B, L) of a batch are visual tokens and which text; padding is neither.

    ``flat``: their indices among all positions. ``ranked``: those of equally many of both in every sample, evenly
    chosen. ``live_N``: the indices of all that are not padding, or None without padding; ``share_MN``: 1
    where one of them belongs to a modality, else 0.
    """

    def __init__(self, visual_BL: Tensor, text_BL: Tensor) -> None:
        self.visual_BL, self.text_BL = visual_BL, text_BL
        masks_MBL = with_float64(torch.stack([visual_BL, text_BL]))
        self.flat = {m: mask.flatten().nonzero().squeeze(1) for m, mask in zip(MODALITIES, masks_MBL, strict=True)}
        live = masks_MBL.any(0).flatten()
        self.live_N = None if bool(live.all()) else live.nonzero().squeeze(1)
        self.share_MN = masks_MBL.flatten(1)[:, live].float()
        wanted_B = masks_MBL.sum(-1).amin(0)
        self.ranked = {m: _spread(mask, wanted_B) for m, mask in zip(MODALITIES, masks_MBL, strict=True)}


def _spread(mask_BL: Tensor, wanted_B: Tensor) -> Tensor:
    """Flat indices of ``wanted_B`` positions of each row of a mask, evenly chosen."""
    rows = []
    for row, (mask_L, wanted) in enumerate(zip(mask_BL, wanted_B.tolist(), strict=True)):
        at_N = mask_L.nonzero().squeeze(1)
        rows.append(at_N[torch.arange(wanted, device=at_N.device) * len(at_N) // max(wanted, 1)] + row * len(mask_L))
    return torch.cat(rows)


class LayerStatistics:
    """Accumulates steps of any number of batches; ``summary`` gives the figures, ``theory`` what they test.

    The result does not depend on the order of samples, on how they are put into batches, or on padding.

    Args:
        ranks: effective ranks too: up to a D x D float64 matrix per modality and state.
    """

    def __init__(self, depth: int, width: int, *, ranks: bool = True) -> None:
        self.depth = depth
        self.columns: list[list[tuple[Tensor, Masks]]] = [[] for _ in range(depth)]
        self.turning = torch.zeros(depth, len(MODALITIES), width, dtype=torch.float64)
        ranked = MODALITIES if ranks else ()
        self.grams = {modality: [StreamedGram(width) for _ in range(depth + 1)] for modality in ranked}

    def add(self, step: LayerStep, masks: Masks) -> None:
        """Take one layer's work on one batch."""
        device, live_N = step.after_BLD.device, masks.live_N
        live_N = None if live_N is None else live_N.to(device)
        before_ND, after_ND = _rows(step.before_BLD, live_N), _rows(step.after_BLD, live_N)
        columns_CN, sums_MD = reduce_step(before_ND, after_ND, masks.share_MN.to(device))
        halves_1N = [_half(norms_BL, live_N, columns_CN[:1]) for norms_BL in (step.attention_BL, step.mlp_BL)]
        self.columns[step.index].append((torch.cat([columns_CN, *halves_1N]).cpu(), masks))
        self.turning[step.index] += sums_MD.cpu()
        for modality, grams in self.grams.items():
            ranked_N = masks.ranked[modality].to(device)
            if not len(ranked_N):
                continue
            if step.index == 0:
                grams[0].add(_rows(step.before_BLD, ranked_N))
            grams[step.index + 1].add(_rows(step.after_BLD, ranked_N))

    def summary(self) -> dict[str, Any]:
        """``layers`` per modality and ``sync_gap``; medians of updates, so that sinks do not decide them.

        Raises:
            ValueError: a modality has no tokens.
        """
        layers = {modality: self._modality(modality) for modality in MODALITIES}
        visual, text = layers["visual"]["cosine"], layers["text"]["cosine"]
        gaps = {"all": sync_gap(visual, text), f"first{FIRST_LAYERS}": sync_gap(visual, text, FIRST_LAYERS)}
        return {"layers": layers, "sync_gap": gaps}

    def theory(self) -> dict[str, list[float]]:
        """Per layer: update correlation ρ, and the visual angle predicted from the text's updates beside the measured.

        Degrees; C, θ and ‖h‖ are means over tokens that are not sinks.
        """
        visual = [self._steps("visual", layer) for layer in range(self.depth)]
        text = [self._steps("text", layer) for layer in range(self.depth)]
        return {
            "rho": [
                update_correlation(sums_MD[0], v.tokens, sums_MD[1], t.tokens)
                for sums_MD, v, t in zip(self.turning, visual, text, strict=True)
            ],
            "angle_predicted": predict_angles(
                [_mean(t.update[t.ordinary]) for t in text],
                [_mean(t.update_angle[t.ordinary]) for t in text],
                [_mean(v.before[v.ordinary]) for v in visual],
            ),
            "angle_measured": [_mean(v.angle[v.ordinary]) for v in visual],
        }

    def _steps(self, modality: str, layer: int) -> TokenSteps:
        number = MODALITIES.index(modality)
        parts = [columns_CN[:, masks.share_MN[number].cpu() > 0] for columns_CN, masks in self.columns[layer]]
        columns_CN = torch.cat(parts, dim=1) if parts else torch.empty(0, 0)
        if not columns_CN.shape[1]:
            raise ValueError(f"no {modality} tokens were measured")
        return TokenSteps(columns_CN)

    def _modality(self, modality: str) -> dict[str, list[Any]]:
        steps = [self._steps(modality, layer) for layer in range(self.depth)]
        norms = [steps[0].before, *(step.after for step in steps)]
        summaries = [summarise_norms(n, language_sinks(n)) for n in norms]
        grams = self.grams.get(modality)
        return {
            "norm_mean": [s["mean"] for s in summaries],
            "norm_median": [s["median"] for s in summaries],
            "norm_without_sinks": [s["mean_without_sinks"] for s in summaries],
            "sinks": [s["sinks"]["count"] for s in summaries],
            "cosine": [_mean(s.cosine[s.ordinary]) for s in steps],
            "angle": [_mean(s.angle[s.ordinary]) for s in steps],
            "relative_update": [(s.update / s.size).median().item() for s in steps],
            "relative_update_attention": [(s.attention / s.size).median().item() for s in steps],
            "relative_update_mlp": [(s.mlp / s.size).median().item() for s in steps],
            **({"effective_rank": [gram.effective_rank() for gram in grams]} if grams else {}),
        }


def _rows(x_BLD: Tensor, live_N: Tensor | None) -> Tensor:
    """Tokens (N, D) of a batch without its padding, in float32 at least; a view where that is possible."""
    x_ND = x_BLD.flatten(0, -2)
    return at_least_float32(x_ND if live_N is None else x_ND[live_N])


def _half(norms_BL: Tensor | None, live_N: Tensor | None, like_1N: Tensor) -> Tensor:
    """Norms (1, N) of what one half of a layer added; NaN where that is not known."""
    if norms_BL is None:
        return torch.full_like(like_1N, torch.nan)
    norms_1N = norms_BL.reshape(1, -1).to(like_1N)
    return norms_1N if live_N is None else norms_1N[:, live_N]


def _mean(x_N: Tensor) -> float:
    return x_N.mean().item()
