import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normalign.norms.rank import StreamedGram, effective_rank

WIDTH = 24


def states(tokens: int, width: int = WIDTH, seed: int = 0) -> Tensor:
    return torch.randn(tokens, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rank_by_svd(x_ND: Tensor) -> float:
    """The definition, from a full singular value decomposition in float64."""
    singular = torch.linalg.svdvals(x_ND.double())
    share = singular / singular.sum()
    return math.exp(-sum(p * math.log(p) for p in share.tolist() if p > 0))


def streamed(x_ND: Tensor, sizes: list[int]) -> StreamedGram:
    gram = StreamedGram(x_ND.shape[1])
    start = 0
    for size in [*sizes, len(x_ND)]:
        gram.add(x_ND[start : start + size])
        start += size
    return gram


def test_worked_out_by_hand() -> None:
    # Singular values 3, 1: shares 3/4, 1/4; exp(-(3/4) ln(3/4) - (1/4) ln(1/4)) = 4 / 3^(3/4).
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(4 / 3**0.75, rel=1e-12)
    assert effective_rank(torch.eye(7)) == pytest.approx(7, rel=1e-12)
    assert effective_rank(torch.zeros(4, 3)) == 0


@pytest.mark.parametrize("tokens", [5, WIDTH - 1, WIDTH, WIDTH + 1, 200])
def test_streamed_agrees_with_a_full_svd_to_1e_6_at_full_rank(tokens: int) -> None:
    x_ND = states(tokens) * torch.logspace(0, 2, WIDTH, dtype=torch.float64)  # a spectrum of two decades
    assert streamed(x_ND, [3, 0, 1]).effective_rank() == pytest.approx(rank_by_svd(x_ND), abs=1e-6)


@pytest.mark.parametrize("tokens", [5, 200])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_streamed_agrees_with_a_full_svd_to_1e_4_at_rank_1(tokens: int, dtype: torch.dtype) -> None:
    x_ND = (states(tokens, 1) @ states(1)).to(dtype)
    assert streamed(x_ND, [3]).effective_rank() == pytest.approx(rank_by_svd(x_ND), abs=1e-4)
    assert rank_by_svd(x_ND) == pytest.approx(1, abs=1e-4)


def test_a_sink_among_the_tokens_does_not_hide_the_others() -> None:
    x_ND = states(60)
    x_ND[7] *= 1e4
    assert streamed(x_ND, [10, 20]).effective_rank() == pytest.approx(rank_by_svd(x_ND), abs=1e-6)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 80), st.lists(st.integers(0, 40), max_size=6), st.integers(0, 99))
def test_the_sizes_of_the_parts_do_not_matter(tokens: int, sizes: list[int], seed: int) -> None:
    x_ND = states(tokens, seed=seed)
    gram = streamed(x_ND, sizes)
    assert gram.tokens == tokens
    assert gram.effective_rank() == pytest.approx(effective_rank(x_ND), abs=1e-9)


def test_it_can_be_read_before_the_end_and_keeps_no_hold_on_what_was_added() -> None:
    x_ND = states(2 * WIDTH)
    gram = StreamedGram(WIDTH)
    assert gram.effective_rank() == 0
    for start in (0, 30):
        part = x_ND[start : start + 30].clone()
        gram.add(part)
        part.zero_()
        assert gram.effective_rank() == pytest.approx(effective_rank(x_ND[: start + 30]), abs=1e-9)


def test_it_never_keeps_more_than_a_gram_matrix_and_one_width_of_tokens() -> None:
    gram = StreamedGram(WIDTH)
    gram.add(states(10 * WIDTH + 3))
    assert gram._gram_DD is not None and gram._gram_DD.shape == (WIDTH, WIDTH)
    assert sum(len(part) for part in gram._pending) == 3


def test_other_widths_and_states_that_are_not_finite_are_refused() -> None:
    gram = StreamedGram(4)
    with pytest.raises(ValueError, match=r"\(N, 4\), got \(2, 5\)"):
        gram.add(torch.ones(2, 5))
    gram.add(torch.full((1, 4), math.nan))
    with pytest.raises(ValueError, match="inf or NaN"):
        gram.effective_rank()
