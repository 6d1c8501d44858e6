"""What a decoder layer multiplies its halves by when it adds them to the residual stream.

Shape suffixes: N tokens, D width, X all of their numbers, P halves.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

CHECKED_TOKENS = 16  # of each pass and layer: ample for two factors, and cheap
UNEXPLAINED = 0.02  # share of an update that may be left over


def first_tokens(x_BLD: Tensor) -> Tensor:
    """A few tokens (N, D) of a batch, copied, so that nothing else of it stays in memory."""
    return x_BLD.detach().reshape(-1, x_BLD.shape[-1])[:CHECKED_TOKENS].clone()


def factors_of(before_ND: Tensor, after_ND: Tensor, halves: Sequence[Tensor]) -> list[float] | None:
    """By what each of ``halves`` (N, D) is multiplied in the update: 1 in most models, less in Granite and MiniCPM.

    None if the update is no such sum: the layer adds something else too, or scales its state.
    """
    rounding = torch.finfo(after_ND.dtype).eps * after_ND.double().norm().cpu()
    update_X = (after_ND.double() - before_ND.double()).flatten().cpu()
    halves_XP = torch.stack([half_ND.double().flatten().cpu() for half_ND in halves], dim=1)
    allowed = UNEXPLAINED * update_X.norm() + rounding

    def explains(factors_P: Tensor) -> bool:
        # Products by hand: a matrix product in float64 would keep buffers of its own for so little.
        return bool((update_X - (halves_XP * factors_P).sum(1)).norm() <= allowed)

    ones_P = torch.ones(len(halves), dtype=torch.float64)
    if explains(ones_P) or not (update_X.isfinite().all() and halves_XP.isfinite().all()):
        return ones_P.tolist()
    fitted_P = torch.linalg.lstsq(halves_XP, update_X[:, None], driver="gelsd").solution[:, 0]
    return fitted_P.tolist() if explains(fitted_P) else None
