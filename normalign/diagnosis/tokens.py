"""Six numbers per token and layer, from which all layer statistics follow.

Shape suffixes: N tokens, D width, C columns, M modalities.
"""

import torch
from torch import Tensor

from normalign.norms.statistics import language_sinks

BEFORE, AFTER, UPDATE, PRODUCT, ATTENTION, MLP = range(6)  # columns: norms, and h·Δ as PRODUCT
TINY = 1e-24
ROUNDING = 1e-12  # share of an update's square; below, the direction across the state would be rounding
CHUNK_BYTES = 1 << 20  # of a state: a chunk, its neighbour and their difference stay near the core


def token_norms(x: Tensor) -> Tensor:
    """L2 norm of every token (..., D), in float32 at least."""
    return torch.linalg.vector_norm(at_least_float32(x), dim=-1)


def with_float64(x: Tensor) -> Tensor:
    """``x`` where its device computes in float64, else (MPS) a copy on the CPU."""
    return x.cpu() if x.device.type == "mps" else x


def exact(x: Tensor) -> Tensor:
    """``x`` in float64."""
    return with_float64(x).double()


def at_least_float32(x: Tensor) -> Tensor:
    """``x``, or a float32 copy of what has less precision."""
    return x if x.dtype == torch.float64 else x.float()


def reduce_step(before_ND: Tensor, after_ND: Tensor, share_MN: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's states reduced to the columns BEFORE to PRODUCT (4, N), and the turning sums (M, D) in float64.

    A turning sum is that of the unit vectors of the tokens' updates across their states, weighted by a row of
    ``share_MN``.
    """
    if before_ND.device.type != "cpu":  # launches cost more there than memory traffic
        return _reduce(before_ND, after_ND, share_MN)
    at_once = max(1, CHUNK_BYTES // (before_ND.shape[1] * before_ND.element_size()))
    if len(before_ND) <= at_once:
        return _reduce(before_ND, after_ND, share_MN)
    parts = [x.split(at_once, dim) for x, dim in ((before_ND, 0), (after_ND, 0), (share_MN, 1))]
    columns, sums = zip(*map(_reduce, *parts), strict=True)
    return torch.cat(columns, dim=1), sum(sums[1:], start=sums[0])


def _reduce(before_ND: Tensor, after_ND: Tensor, share_MN: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`reduce_step` of tokens taken together, in few operations: a short pass waits for each of them.

    With w = Δ − (Δ·h/‖h‖²) h a turning sum is Δᵀp − hᵀq, p = 1/‖w‖, q = p Δ·h/‖h‖²: no vector of a token is formed.
    """
    update_ND = after_ND - before_ND
    norms = [torch.linalg.vector_norm(x_ND, dim=-1) for x_ND in (before_ND, after_ND, update_ND)]
    columns_CN = torch.stack([*norms, torch.linalg.vecdot(before_ND, update_ND)])
    p_N, q_N = _turning_weights(columns_CN)
    share_MN = share_MN.to(p_N.dtype)
    sums_MD = torch.addmm((share_MN * p_N) @ update_ND, share_MN * q_N, before_ND, alpha=-1)
    return columns_CN, sums_MD.double()


class TokenSteps:
    """What one layer did to the tokens (N,) of a modality, from their columns (C, N) in float64.

    Angles come from the update's parts along and across the state, which stay exact where a token hardly turns; an
    arc cosine would not.
    """

    def __init__(self, columns_CN: Tensor) -> None:
        columns_CN = columns_CN.double()
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


def _turning_weights(columns_CN: Tensor) -> tuple[Tensor, Tensor]:
    """p and q (N,) of :func:`_reduce`; 0 for tokens that do not turn."""
    before_N, _, update_N, _ = columns_CN.square().unbind()
    along_N = columns_CN[PRODUCT] / before_N.clamp_min(TINY)
    across_N = torch.addcmul(update_N, along_N, columns_CN[PRODUCT], value=-1)
    p_N = across_N.rsqrt().masked_fill(across_N <= ROUNDING * update_N, 0.0)
    return p_N, p_N * along_N
