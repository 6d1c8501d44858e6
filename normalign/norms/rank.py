"""Effective rank of a set of token states (TA uses the term without a definition; this one is ours).

exp of the entropy of the normalised singular values: 1 when all tokens lie on one line, min(N, D) when all directions
carry the same share. Taken from the eigenvalues of a Gram matrix in float64: the singular values are their roots.

Shape suffixes: N tokens, D width.
"""

import torch
from torch import Tensor

EIGENVALUE_FLOOR = 1e-12  # relative to the largest; below it a Gram eigenvalue is rounding, not signal


def effective_rank(x_ND: Tensor) -> float:
    """Effective rank of ``x_ND``: between 1 and min(N, D); 0 if there is nothing but zeros.

    Singular values below 1e-6 of the largest (the root of the eigenvalue floor) count as zero.

    Raises:
        ValueError: a state is not finite.
    """
    x_ND = x_ND.double()
    return _rank_of_gram(x_ND @ x_ND.T if x_ND.shape[0] <= x_ND.shape[1] else x_ND.T @ x_ND)


class StreamedGram:
    """Effective rank of tokens that come a few at a time, in the memory of one D x D float64 matrix at most.

    Up to D tokens are kept as they come (less memory than the Gram matrix, and a smaller one to decompose); every D
    tokens are folded into it. The result is that of ``effective_rank`` on all of them together.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.tokens = 0
        self._gram_DD: Tensor | None = None
        self._pending: list[Tensor] = []
        self._pending_tokens = 0

    def add(self, x_ND: Tensor) -> None:
        """Take N more tokens of ``width``; they are copied, whatever their floating-point type.

        Raises:
            ValueError: another shape.
        """
        if x_ND.ndim != 2 or x_ND.shape[1] != self.width:
            raise ValueError(f"expected token states of shape (N, {self.width}), got {tuple(x_ND.shape)}")
        self.tokens += len(x_ND)
        for part_ND in x_ND.detach().split(self.width):
            self._pending.append(part_ND.clone())
            self._pending_tokens += len(part_ND)
            if self._pending_tokens >= self.width:
                self._fold()

    def effective_rank(self) -> float:
        """Effective rank of all tokens so far; 0 before the first. More may be added afterwards.

        Raises:
            ValueError: a state is not finite.
        """
        if self._gram_DD is None:
            return effective_rank(torch.cat(self._pending)) if self._pending else 0.0
        self._fold()
        return _rank_of_gram(self._gram_DD)

    def _fold(self) -> None:
        if not self._pending:
            return
        x_ND = torch.cat(self._pending).double()
        if self._gram_DD is None:
            self._gram_DD = x_ND.new_zeros(self.width, self.width)
        self._gram_DD.addmm_(x_ND.T, x_ND)
        self._pending, self._pending_tokens = [], 0


def _rank_of_gram(gram: Tensor) -> float:
    if not torch.isfinite(gram).all():
        raise ValueError("token states hold inf or NaN; run the model in float32")
    eigenvalues = torch.linalg.eigvalsh(gram).clamp_min(0)
    eigenvalues = eigenvalues[eigenvalues > EIGENVALUE_FLOOR * eigenvalues.max()]
    if eigenvalues.numel() == 0:
        return 0.0
    singular = eigenvalues.sqrt()
    share = singular / singular.sum()
    return torch.exp(-(share * share.log()).sum()).item()
