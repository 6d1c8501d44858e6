"""Attention from text to image, with values computed by hand."""

import math

import pytest
import torch
from torch import Tensor

from normalign.diagnosis.attention import AttentionStatistics, LastLook, text_to_image
from normalign.diagnosis.layers import Masks

VISUAL = torch.tensor([False, True, True, True, True, False])
TEXT_AFTER = torch.tensor([False, False, False, False, False, True])


def attention(last_row: list[float]) -> Tensor:
    """One head's weights (1, 6, 6), of which only the last query's matter."""
    weights = torch.zeros(1, 6, 6)
    weights[0, 5] = torch.tensor(last_row)
    return weights


EVEN, ONE = attention([0.2, 0.15, 0.15, 0.15, 0.15, 0.2]), attention([0.5, 0.4, 0.0, 0.0, 0.0, 0.1])


def test_mass_is_the_sum_over_visual_tokens_and_entropy_that_of_their_shares() -> None:
    found = [text_to_image(w, VISUAL, TEXT_AFTER) for w in (EVEN, ONE, torch.cat([EVEN, ONE]))]
    assert [mass for mass, _ in found] == pytest.approx([0.6, 0.4, 0.5])
    assert [entropy for _, entropy in found] == pytest.approx([math.log(4), 0.0, math.log(4) / 2], abs=1e-6)


def test_no_attention_to_the_image_gives_no_mass_and_no_nan() -> None:
    assert text_to_image(attention([1.0, 0.0, 0.0, 0.0, 0.0, 0.0]), VISUAL, TEXT_AFTER) == (0.0, 0.0)


def test_means_are_over_samples_whatever_the_batches_and_text_before_the_image_does_not_count() -> None:
    masks = Masks(VISUAL[None], ~VISUAL[None])  # position 0 is text before the image
    both = Masks(VISUAL.expand(2, -1), ~VISUAL.expand(2, -1))
    one_by_one, together = AttentionStatistics(2), AttentionStatistics(2)
    for weights in (EVEN, ONE):
        one_by_one.add(0, weights[None], masks)
    together.add(0, torch.stack([EVEN, ONE]), both)
    expected = {"mass": [pytest.approx(0.5), None], "entropy": [pytest.approx(math.log(4) / 2), None]}
    assert one_by_one.summary() == together.summary() == expected


def test_nothing_to_look_with_or_no_weights_is_null() -> None:
    statistics = AttentionStatistics(1)
    assert statistics.summary() is None
    behind = torch.tensor([[False, True, True, True, True, True]])
    statistics.add(0, EVEN[None], Masks(behind, ~behind))
    assert statistics.summary() is None


def test_the_last_text_token_looks_from_the_layer_with_most_mass_row_by_row() -> None:
    look, padded = LastLook(), torch.tensor([True, False, False, False, False, True])
    look.add(0, attention([0.9, 0.0, 0.0, 0.1, 0.0, 0.0]), VISUAL, padded)
    look.add(1, attention([0.0, 0.1, 0.2, 0.3, 0.2, 0.2]), VISUAL, padded)
    look.add(2, attention([0.8, 0.0, 0.0, 0.0, 0.2, 0.0]), VISUAL, padded)
    assert look.layer == 1
    assert look.map((2, 2)) == [[0.125, 0.25], [0.375, 0.25]]
    assert look.map((1, 4)) == [[0.125, 0.25, 0.375, 0.25]]


def test_padding_behind_the_text_does_not_look() -> None:
    look, weights = LastLook(), torch.zeros(1, 7, 7)
    weights[0, 5, 1:5] = torch.tensor([0.4, 0.0, 0.0, 0.4])
    weights[0, 6, 1:5] = 0.25
    visual = torch.cat([VISUAL, torch.tensor([False])])
    text = torch.tensor([True, False, False, False, False, True, False])
    look.add(0, weights, visual, text)
    assert look.map((2, 2)) == [[0.5, 0.0], [0.0, 0.5]]
