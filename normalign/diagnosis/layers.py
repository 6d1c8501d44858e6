"""Layer statistics of visual and text tokens, streamed (SCIENCE §3; UB §4, §5.3.3; TA).

Of every token and layer six numbers are kept; the states are only reduced to them, and to sums over tokens.

Shape suffixes: B samples, L length, D width, N tokens of one modality, C columns.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normalign.diagnosis.capture import LayerStep, token_norms
from normalign.norms.rank import StreamedGram
from normalign.norms.statistics import language_sinks, summarise_norms, sync_gap
from normalign.norms.theory import predict_angles, update_correlation

MODALITIES = ("visual", "text")
FIRST_LAYERS = 8
BEFORE, AFTER, UPDATE, PRODUCT, ATTENTION, MLP = range(6)  # columns: norms, and h·Δ as PRODUCT


@dataclass
class Masks:
    """Which positions (B, L) of a batch are visual tokens and which text; padding is neither.

    ``ranked``: equally many of both in every sample, evenly chosen, as flat indices.
    """

    visual_BL: Tensor
    text_BL: Tensor

    def __post_init__(self) -> None:
        masks = {"visual": self.visual_BL, "text": self.text_BL}
        self.flat = {name: mask_BL.flatten().nonzero().squeeze(1) for name, mask_BL in masks.items()}
        self.ranked: dict[str, Tensor] = {}
        length = self.visual_BL.shape[1]
        for name, mask_BL in masks.items():
            rows = []
            for row, mask_L in enumerate(mask_BL):
                at_N = mask_L.nonzero().squeeze(1)
                wanted = min(int(self.visual_BL[row].sum()), int(self.text_BL[row].sum()))
                chosen = torch.arange(wanted, device=at_N.device) * len(at_N) // max(wanted, 1)
                rows.append(at_N[chosen] + row * length)
            self.ranked[name] = torch.cat(rows)


class LayerStatistics:
    """Accumulates steps of any number of batches; ``summary`` gives the figures, ``theory`` what they test.

    The result does not depend on the order of samples, on how they are put into batches, or on padding.

    Args:
        ranks: effective ranks too: up to a D x D float64 matrix per modality and state.
    """

    def __init__(self, depth: int, width: int, *, ranks: bool = True) -> None:
        self.depth = depth
        self.columns: dict[str, list[list[Tensor]]] = {m: [[] for _ in range(depth)] for m in MODALITIES}
        self.grams = {m: [StreamedGram(width) for _ in range(depth + 1 if ranks else 0)] for m in MODALITIES}
        self.turning = {m: torch.zeros(depth, width, dtype=torch.float64) for m in MODALITIES}

    def add(self, step: LayerStep, masks: Masks) -> None:
        """Take one layer's work on one batch."""
        before_ND, after_ND = _rows(step.before_BLD), _rows(step.after_BLD)
        update_ND = after_ND - before_ND
        missing_N = before_ND.new_full(before_ND.shape[:1], torch.nan)
        columns_CN = torch.stack(
            [
                token_norms(before_ND),
                token_norms(after_ND),
                token_norms(update_ND),
                torch.einsum("nd,nd->n", before_ND, update_ND),
                *(missing_N if half is None else half.flatten() for half in (step.attention_BL, step.mlp_BL)),
            ]
        )
        for modality in MODALITIES:
            at_N = masks.flat[modality].to(columns_CN.device)
            columns = columns_CN[:, at_N]
            self.columns[modality][step.index].append(columns.cpu())
            self.turning[modality][step.index] += _turning_sum(columns, before_ND[at_N], update_ND[at_N])
            ranked_N = masks.ranked[modality].to(columns_CN.device)
            if self.grams[modality] and len(ranked_N):
                if step.index == 0:
                    self.grams[modality][0].add(before_ND[ranked_N])
                self.grams[modality][step.index + 1].add(after_ND[ranked_N])

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
                update_correlation(
                    self.turning["visual"][i], visual[i].tokens, self.turning["text"][i], text[i].tokens
                )
                for i in range(self.depth)
            ],
            "angle_predicted": predict_angles(
                [_mean(t.update[t.ordinary]) for t in text],
                [_mean(t.update_angle[t.ordinary]) for t in text],
                [_mean(v.before[v.ordinary]) for v in visual],
            ),
            "angle_measured": [_mean(v.angle[v.ordinary]) for v in visual],
        }

    def _steps(self, modality: str, layer: int) -> "_Steps":
        columns = self.columns[modality][layer]
        if not columns or not sum(part.shape[1] for part in columns):
            raise ValueError(f"no {modality} tokens were measured")
        return _Steps(torch.cat(columns, dim=1).double())

    def _modality(self, modality: str) -> dict[str, list[Any]]:
        steps = [self._steps(modality, layer) for layer in range(self.depth)]
        norms = [steps[0].before, *(step.after for step in steps)]
        summaries = [summarise_norms(n, language_sinks(n)) for n in norms]
        grams = self.grams[modality]
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


class _Steps:
    """What one layer did to the tokens (N,) of a modality, from their columns (C, N) in float64.

    Angles come from the update's parts along and across the state, which stay exact where a token hardly turns; an
    arc cosine would not.
    """

    def __init__(self, columns_CN: Tensor) -> None:
        self.tokens = columns_CN.shape[1]
        self.before, self.after, self.update = columns_CN[BEFORE], columns_CN[AFTER], columns_CN[UPDATE]
        self.attention, self.mlp = columns_CN[ATTENTION], columns_CN[MLP]
        self.size = self.before.clamp_min(1e-12)
        along, across = _parts(columns_CN)
        # A token that is zero before or after has no direction: cosine 0, 90 degrees.
        whole = (self.before > 0) & (self.after > 0)
        turned = torch.rad2deg(torch.atan2(across, self.before + along))
        self.cosine = torch.where(whole, torch.cos(torch.deg2rad(turned)), 0.0)
        self.angle = torch.where(whole, turned, 90.0)
        self.update_angle = torch.where(self.update > 0, torch.rad2deg(torch.atan2(across, along)), 90.0)
        # Sink tokens hardly turn at all; they are counted, and left out of the angles.
        self.ordinary = ~(language_sinks(self.before) | language_sinks(self.after))


def _parts(columns_CN: Tensor) -> tuple[Tensor, Tensor]:
    """Length (N,) of each update along its state (signed) and across it."""
    along_N = columns_CN[PRODUCT] / columns_CN[BEFORE].clamp_min(1e-12)
    return along_N, (columns_CN[UPDATE].square() - along_N.square()).clamp_min(0).sqrt()


def _turning_sum(columns_CN: Tensor, before_ND: Tensor, update_ND: Tensor) -> Tensor:
    """Sum (D,) over tokens of the unit vectors of their updates across the state.

    With w = Δ − (Δ·h/‖h‖²) h it is Δᵀp − hᵀq, p = 1/‖w‖, q = p Δ·h/‖h‖²: two matrix-vector products.
    """
    columns_CN = columns_CN.double()
    along_N, across_N = _parts(columns_CN)
    turns_N = across_N > 1e-6 * columns_CN[UPDATE]  # below, the direction would be rounding
    p_N = torch.where(turns_N, across_N.reciprocal(), 0.0)
    q_N = p_N * along_N / columns_CN[BEFORE].clamp_min(1e-12)
    return (p_N.to(update_ND.dtype) @ update_ND - q_N.to(update_ND.dtype) @ before_ND).double().cpu()


def _rows(x_BLD: Tensor) -> Tensor:
    """Tokens (N, D) of a batch, in float32 at least."""
    x_ND = x_BLD.flatten(0, -2)
    return x_ND if x_ND.dtype == torch.float64 else x_ND.float()


def _mean(x_N: Tensor) -> float:
    return x_N.mean().item()
