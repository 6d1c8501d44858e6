"""T, the mean norm of the non-zero embedding rows (UB §5.1)."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from normalign.embeddings.statistics import text_norm_statistics

from .helpers import NORMS, T

FLOATS = st.floats(1e-3, 1e3)


def test_statistics_equal_hand_values() -> None:
    result = text_norm_statistics(np.array(NORMS), 2)
    assert result["T"] == pytest.approx(T)
    assert result["std"] == pytest.approx(math.sqrt((25 + 100 + 4) / 3 - T**2))
    assert (result["median"], result["rows"], result["zero_rows"], result["hidden_size"]) == (5.0, 4, 1, 2)
    assert result["g_init"] == pytest.approx(T / math.sqrt(2))
    assert result["percentiles"]["25"] == pytest.approx(3.5)


@given(st.lists(FLOATS, min_size=1, max_size=40), st.integers(0, 20), st.integers(1, 64))
def test_zero_rows_change_nothing_but_their_count(norms: list[float], zeros: int, width: int) -> None:
    plain = text_norm_statistics(np.array(norms), width)
    padded = text_norm_statistics(np.array([*norms, *[0.0] * zeros]), width)
    assert padded == {**plain, "rows": len(norms) + zeros, "zero_rows": zeros}


@given(st.lists(FLOATS, min_size=1, max_size=40), FLOATS)
def test_every_norm_scales_with_the_rows(norms: list[float], factor: float) -> None:
    one, other = (text_norm_statistics(np.array(norms) * by, 4) for by in (1.0, factor))
    for name in ("T", "median", "g_init"):
        assert other[name] == pytest.approx(factor * one[name])
    assert other["std"] == pytest.approx(factor * one["std"], abs=1e-9 * other["T"])
    assert list(other["percentiles"].values()) == pytest.approx([factor * v for v in one["percentiles"].values()])


@pytest.mark.parametrize(("norms", "message"), [([0.0, 0.0], "every row"), ([1.0, math.nan], "1 embedding rows")])
def test_untrained_or_broken_embeddings_are_refused(norms: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text_norm_statistics(np.array(norms), 2)
