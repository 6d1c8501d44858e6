import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from normalign.report.significance import cluster_stderr, holm, paired_difference, unpaired_difference


def test_cluster_stderr_equals_the_value_worked_out_by_hand() -> None:
    # Mean 2; residuals −1, −1 | 0, 2: cluster sums −2 and 2; 2/1 · (4 + 4) = 16; √16 / 4 items = 1.
    assert cluster_stderr([1, 1, 2, 4], ["a", "a", "b", "b"]) == pytest.approx(1.0)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=40))
def test_with_one_item_per_cluster_it_is_the_ordinary_standard_error(values: list[float]) -> None:
    expected = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    assert cluster_stderr(values, range(len(values))) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=20), st.integers(2, 5))
def test_repeating_every_item_inside_its_cluster_adds_no_information(values: list[float], times: int) -> None:
    names = list(range(len(values)))
    repeated = cluster_stderr([v for v in values for _ in range(times)], [n for n in names for _ in range(times)])
    assert repeated == pytest.approx(cluster_stderr(values, names), abs=1e-9)


def test_paired_difference_equals_the_values_worked_out_by_hand() -> None:
    # Differences 1, 1, 0, 0 in two clusters: mean 0.5, cluster sums ±1, stderr √(2 · 2) / 4 = 0.5; t with 1 degree.
    result = paired_difference([1, 1, 1, 0], [0, 0, 1, 0], ["a", "a", "b", "b"])
    assert (result.difference, result.stderr) == pytest.approx((0.5, 0.5))
    assert (result.items, result.clusters) == (4, 2)
    # Student's t with one degree of freedom is Cauchy: quantile tan(π · 0.475), tail 1/2 − atan(1)/π = 1/4.
    assert result.high - result.difference == pytest.approx(0.5 * math.tan(math.pi * 0.475))
    assert result.p_value == pytest.approx(0.5)


def test_equal_scores_are_no_difference_and_a_constant_difference_is_certain() -> None:
    same = paired_difference([1, 0, 1], [1, 0, 1], "abc")
    assert (same.difference, same.low, same.high, same.p_value) == (0, 0, 0, 1)
    constant = paired_difference([1, 1, 1], [0, 0, 0], "abc")
    assert (constant.low, constant.high, constant.p_value) == (1, 1, 0)


@pytest.mark.parametrize(
    ("ours", "reference", "clusters", "words"),
    [
        ([1], [1, 0], ["a"], "1 scores against 2"),
        ([1, 0], [1, 0], ["a"], "2 values"),
        ([1, 0], [1, 0], "aa", "1 cluster"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    ours: list[float], reference: list[float], clusters: list[str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        paired_difference(ours, reference, clusters)


def test_interval_covers_the_truth_in_95_of_100_runs_when_items_share_images() -> None:
    rng = np.random.default_rng(0)
    runs, images, per_image, truth = 1500, 40, 6, 0.3
    clusters = np.repeat(np.arange(images), per_image).tolist()
    covered = naive = 0
    for _ in range(runs):
        shared = np.repeat(rng.normal(0, 1, images), per_image)
        values = truth + shared + rng.normal(0, 1, images * per_image)
        result = paired_difference(values.tolist(), [0.0] * len(values), clusters)
        covered += result.low <= truth <= result.high
        half = 1.96 * np.std(values, ddof=1) / math.sqrt(len(values))
        naive += abs(values.mean() - truth) <= half
    assert 0.935 <= covered / runs <= 0.965  # the true share ± 3 standard errors of this simulation
    assert naive / runs < 0.8  # treating items as independent would claim far too much


def test_unpaired_difference_adds_the_variances() -> None:
    result = unpaired_difference(0.70, 0.03, 0.60, 0.04)
    assert (result.difference, result.stderr) == pytest.approx((0.1, 0.05))
    assert (result.low, result.high) == pytest.approx((0.1 - 1.959964 * 0.05, 0.1 + 1.959964 * 0.05))
    assert result.p_value == pytest.approx(0.04550, abs=1e-5)


def test_holm_equals_the_values_worked_out_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_the_raw_values_and_bonferroni_and_keeps_their_order(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for raw, new in zip(p_values, adjusted, strict=True):
        assert raw <= new <= min(1.0, len(p_values) * raw)
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    assert [adjusted[index] for index in order] == sorted(adjusted)
