"""What stands between the projector's output and the first decoder layer, and T as that layer sees it.

Shape suffixes: B batch, L sequence length, N visual tokens, D width of the language model, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from normalign.anatomy import Anatomy
from normalign.diagnosis.tokens import exact
from normalign.embeddings.statistics import text_norm_statistics
from normalign.norms.aligner import whole

ROWS_AT_ONCE = 16384
PROBE_TOKENS = 4


class Reached(Exception):  # noqa: N818 (no fault: it ends a forward pass that has shown what was wanted)
    """Raised by a hook at the first decoder layer."""


def first_layer_input(anatomy: Anatomy, run: Callable[[], Any]) -> Tensor:
    """The residual stream (B, L, D) that enters the first decoder layer in ``run``, which goes no further."""
    caught: list[Tensor] = []

    def catch(_layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        caught.append(inputs[0] if inputs else keywords["hidden_states"])
        raise Reached

    handle = anatomy.layers[0].register_forward_pre_hook(catch, with_kwargs=True)
    try:
        with torch.no_grad():
            run()
    except Reached:
        return caught[0].detach()
    finally:
        handle.remove()
    raise ValueError(f"{type(anatomy.model).__name__}: the forward pass never reached the first decoder layer")


def text_norm_as_used(anatomy: Anatomy) -> float:
    """T: mean L2 norm of the text embedding's non-zero rows, times what forward multiplies them by (UB §5.1)."""
    weight_VD = anatomy.embedding.weight
    norms_V = torch.cat(
        [
            whole(exact(weight_VD[start : start + ROWS_AT_ONCE].detach()).norm(dim=-1))
            for start in range(0, weight_VD.shape[0], ROWS_AT_ONCE)
        ]
    )
    return text_norm_statistics(norms_V.cpu().numpy(), anatomy.width)["T"] * anatomy.embedding_scale


@dataclass(frozen=True)
class Merge:
    """A visual token v of the projector enters the first decoder layer as ``scale`` · v + e, ‖e‖ = ``added``."""

    scale: float = 1.0
    added: float = 0.0

    def target_for(self, norm: float) -> float:
        """Norm of v for which the token's norm at the first layer is ``norm``, v and e being orthogonal.

        Where e alone is nearly as long as ``norm``, v gets half of the squared norm all the same: it is what the
        model sees of the image.
        """
        return math.sqrt(max(norm**2 - self.added**2, norm**2 / 2)) / self.scale

    def norm_of(self, target: float) -> float:
        """Norm at the first decoder layer of tokens that leave the aligner with norm ``target``."""
        return math.hypot(self.scale * target, self.added)


def merge_of(anatomy: Anatomy) -> Merge:
    """Measure it: made-up visual tokens go through the model's own merge, up to the first decoder layer.

    Models whose forward takes no ready visual tokens are asked what their decoder does with its input embeddings.
    """
    for packed in (True, False):
        try:
            merge = _merged(anatomy, packed=packed)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
            continue
        if merge.scale > 0:
            return merge
    return _decoder_only(anatomy)


def _probe(anatomy: Anatomy) -> Tensor:
    weight = anatomy.embedding.weight
    made_ND = torch.randn(PROBE_TOKENS, anatomy.width, generator=torch.Generator().manual_seed(0))
    return made_ND.to(weight.device, weight.dtype)


def _merged(anatomy: Anatomy, *, packed: bool) -> Merge:
    visual_ND = _probe(anatomy)
    placeholders = torch.full((PROBE_TOKENS,), anatomy.image_token_id)
    ids_BL = torch.cat([torch.tensor([1]), placeholders, torch.tensor([1])])[None].to(visual_ND.device)
    positions = torch.arange(ids_BL.shape[1], device=ids_BL.device)[None]

    def entering(factor: float) -> Tensor:
        tokens_ND = visual_ND * factor
        image = SimpleNamespace(
            pooler_output=(tokens_ND,) if packed else tokens_ND[None],
            deepstack_features=[],
            visual_indicator_features=torch.zeros(0, anatomy.width),
        )
        keywords = {"input_ids": ids_BL, "mm_encoder_outputs": {"image": image}, "position_ids": positions}
        return exact(first_layer_input(anatomy, lambda: anatomy.core(**keywords))[0, 1:-1])

    once_ND, twice_ND = entering(1.0), entering(2.0)
    exact_ND = exact(visual_ND)
    scale = ((twice_ND - once_ND) * exact_ND).sum().item() / exact_ND.square().sum().item()
    added = (once_ND - scale * exact_ND).norm(dim=-1).mean().item()
    return Merge(scale, added if added > 1e-3 * once_ND.norm(dim=-1).mean().item() else 0.0)


def _decoder_only(anatomy: Anatomy) -> Merge:
    made_ND = _probe(anatomy)
    try:
        entering = first_layer_input(anatomy, lambda: anatomy.language(inputs_embeds=made_ND[None], use_cache=False))
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return Merge()
    return Merge((exact(entering).norm() / exact(made_ND).norm()).item())
