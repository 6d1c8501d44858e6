"""What a decoder layer multiplies its halves by when it adds them to the residual stream.

Shape suffixes: N tokens, D width, P halves, X all numbers of the tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from normalign.diagnosis.tokens import at_least_float32

CHECKED_TOKENS = 16  # of each pass and layer: ample for two factors, and cheap
UNEXPLAINED = 0.02  # share of an update that may be left over


def first_tokens(x_BLD: Tensor) -> Tensor:
    """A few tokens (N, D) of a batch, copied, so that nothing else of it stays in memory."""
    return x_BLD.detach().reshape(-1, x_BLD.shape[-1])[:CHECKED_TOKENS].clone()


def factors_of(before_ND: Tensor, after_ND: Tensor, halves: Sequence[Tensor]) -> list[float] | None:
    """By what each of ``halves`` (N, D) is multiplied in the update: 1 in most models, less in Granite and MiniCPM.

    None if the update is no such sum: the layer adds something else too, or scales its state.
    """
    numbers = [at_least_float32(x_ND).flatten().cpu() for x_ND in (before_ND, after_ND, *halves)]
    before_X, after_X, *halves_X = numbers
    update_X = after_X - before_X
    allowed = UNEXPLAINED * float(update_X.norm()) + torch.finfo(after_ND.dtype).eps * float(after_X.norm())

    def explains(factors: Sequence[float]) -> bool:
        rest_X = update_X.clone()
        for factor, half_X in zip(factors, halves_X, strict=True):
            rest_X -= factor * half_X
        return float(rest_X.norm()) <= allowed

    ones = [1.0] * len(halves)
    if explains(ones) or not all(bool(x.isfinite().all()) for x in numbers):
        return ones
    halves_XP = torch.stack(halves_X, dim=1).double()
    fitted = torch.linalg.lstsq(halves_XP, update_X.double()[:, None], driver="gelsd").solution[:, 0].tolist()
    return fitted if explains(fitted) else None
