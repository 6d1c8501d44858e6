"""Effective rank of a set of token states (TA uses the term without a definition; this one is ours)."""

import torch
from torch import Tensor

EIGENVALUE_FLOOR = 1e-12  # relative to the largest; below it a Gram eigenvalue is rounding, not signal


def effective_rank(x_ND: Tensor) -> float:
    """exp of the entropy of the normalised singular values of ``x_ND``: between 1 and min(N, D).

    Taken from the eigenvalues of the smaller Gram matrix in float64.
    """
    x_ND = x_ND.double()
    gram = x_ND @ x_ND.T if x_ND.shape[0] <= x_ND.shape[1] else x_ND.T @ x_ND
    eigenvalues = torch.linalg.eigvalsh(gram).clamp_min(0)
    eigenvalues = eigenvalues[eigenvalues > EIGENVALUE_FLOOR * eigenvalues.max()]
    if eigenvalues.numel() == 0:
        return 0.0
    singular = eigenvalues.sqrt()
    share = singular / singular.sum()
    return torch.exp(-(share * share.log()).sum()).item()
