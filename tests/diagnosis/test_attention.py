"""Attention from text to image, with values computed by hand."""

import math

import pytest
import torch

from normalign.diagnosis.attention import image_map, text_to_image

VISUAL = torch.tensor([False, True, True, True, True, False])
TEXT_AFTER = torch.tensor([False, False, False, False, False, True])


def attention(last_row: list[float]) -> torch.Tensor:
    """One head's weights (1, 6, 6), of which only the last query's matter."""
    weights = torch.zeros(1, 6, 6)
    weights[0, 5] = torch.tensor(last_row)
    return weights


def test_mass_is_the_sum_over_visual_tokens_and_entropy_that_of_their_shares() -> None:
    even, one = attention([0.2, 0.15, 0.15, 0.15, 0.15, 0.2]), attention([0.5, 0.4, 0.0, 0.0, 0.0, 0.1])
    result = text_to_image([even, one, torch.cat([even, one])], VISUAL, TEXT_AFTER)
    assert result.mass == pytest.approx([0.6, 0.4, 0.5])
    assert result.entropy == pytest.approx([math.log(4), 0.0, math.log(4) / 2], abs=1e-6)


def test_no_attention_to_the_image_gives_no_mass_and_no_nan() -> None:
    result = text_to_image([attention([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])], VISUAL, TEXT_AFTER)
    assert result.mass == [0.0] and result.entropy == [0.0]


def test_the_map_lays_the_visual_tokens_out_row_by_row_and_sums_to_one() -> None:
    found = image_map(attention([0.0, 0.1, 0.2, 0.3, 0.2, 0.2]), VISUAL, 5, 2)
    assert found == [[0.125, 0.25], [0.375, 0.25]]
