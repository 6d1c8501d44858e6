"""Token statistics against NumPy in float64 and values computed by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from normalign.norms.rank import effective_rank
from normalign.norms.statistics import (
    angle_degrees,
    cosine,
    language_sinks,
    summarise_norms,
    sync_gap,
    vision_sinks,
)

seeds = st.integers(0, 10_000)


@given(arrays.arrays(np.float64, st.integers(1, 40), elements=st.floats(0.01, 1e5)))
@settings(max_examples=50, deadline=None)
def test_summary_equals_numpy_on_any_norms(values: np.ndarray) -> None:
    sinks = values > np.quantile(values, 0.8)
    result = summarise_norms(torch.tensor(values), torch.tensor(sinks))
    for name, expected in {
        "mean": values.mean(),
        "std": values.std(),
        "median": np.median(values),
        "p5": np.percentile(values, 5),
        "p95": np.percentile(values, 95),
        "mean_without_sinks": values[~sinks].mean(),
    }.items():
        assert result[name] == pytest.approx(expected, rel=1e-9, abs=1e-9), name
    assert result["tokens"] == len(values)
    assert result["sinks"]["count"] == sinks.sum()
    assert result["sinks"]["share"] == pytest.approx(sinks.mean())
    assert result["sinks"]["mean_norm"] == (pytest.approx(values[sinks].mean()) if sinks.any() else None)


def test_no_tokens_are_refused_rather_than_summarised_as_nan() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        summarise_norms(torch.zeros(0), torch.zeros(0, dtype=torch.bool))


def test_a_language_sink_is_above_ten_times_the_median() -> None:
    norms = torch.tensor([1.0, 2.0, 2.0, 20.0, 20.1])
    assert language_sinks(norms).tolist() == [False, False, False, False, True]


def test_a_vision_sink_is_ten_median_deviations_above_the_median() -> None:
    norms = torch.tensor([9.0, 10.0, 11.0, 10.0, 11.0, 9.0, 20.5, 10.0, 19.5])  # median 10, deviation 1
    assert vision_sinks(norms).tolist() == [False] * 6 + [True, False, False]


def test_equal_norms_have_no_sinks() -> None:
    assert not language_sinks(torch.ones(9)).any() and not vision_sinks(torch.ones(9)).any()


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_cosine_and_angle_equal_numpy(seed: int) -> None:
    a, b = np.random.default_rng(seed).normal(size=(2, 6, 5))
    expected = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    got = cosine(torch.tensor(a), torch.tensor(b))
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(angle_degrees(got), np.degrees(np.arccos(expected)), rtol=1e-9)


def test_cosine_is_zero_for_a_zero_row_and_never_leaves_one() -> None:
    a = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1e-200, 0.0]], dtype=torch.float64)
    assert cosine(a, a).tolist() == pytest.approx([0.0, 1.0, 0.0]) and cosine(a, a).max() <= 1


def test_sync_gap_is_the_mean_absolute_difference_over_the_layers_asked_for() -> None:
    visual, text = [0.9, 0.8, 0.5], [0.1, 0.9, 0.6]
    assert sync_gap(visual, text) == pytest.approx((0.8 + 0.1 + 0.1) / 3)
    assert sync_gap(visual, text, 2) == pytest.approx((0.8 + 0.1) / 2)
    assert sync_gap(visual, text, 8) == sync_gap(visual, text)
    assert sync_gap(text, text) == 0
    with pytest.raises(ValueError, match="2 visual, 3 text"):
        sync_gap(visual[:2], text)


@given(seeds, st.integers(2, 12), st.integers(2, 12))
@settings(max_examples=40, deadline=None)
def test_effective_rank_equals_the_full_svd(seed: int, rows: int, columns: int) -> None:
    x = np.random.default_rng(seed).normal(size=(rows, columns))
    share = np.linalg.svd(x, compute_uv=False)
    share = share / share.sum()
    expected = math.exp(-(share * np.log(share)).sum())
    assert effective_rank(torch.tensor(x)) == pytest.approx(expected, rel=1e-6)


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_effective_rank_ignores_scale_rotation_and_row_order(seed: int) -> None:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(9, 5))
    rotation = np.linalg.qr(generator.normal(size=(5, 5)))[0]
    base = effective_rank(torch.tensor(x))
    for same in (x * 123.4, x @ rotation, x[generator.permutation(9)], x.T):
        assert effective_rank(torch.tensor(same.copy())) == pytest.approx(base, rel=1e-6)


def test_effective_rank_of_rank_one_is_one_of_the_identity_its_size_and_of_nothing_zero() -> None:
    outer = torch.outer(torch.arange(1.0, 20), torch.linspace(-1, 3, 30))
    assert effective_rank(outer) == pytest.approx(1.0, abs=1e-4)
    assert effective_rank(torch.eye(7)) == pytest.approx(7.0)
    assert effective_rank(torch.zeros(3, 4)) == 0.0
