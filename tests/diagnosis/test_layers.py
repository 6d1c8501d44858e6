"""Streamed layer statistics against a direct float64 computation on full hidden states."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normalign.diagnosis.capture import LayerStep
from normalign.diagnosis.layers import LayerStatistics, Masks
from normalign.norms.theory import turning_directions, update_correlation

from . import reference

WIDTH, DEPTH = 24, 2
Sample = tuple[list[Tensor], Tensor]  # states (L, D) before and after the layers, which positions (L,) are visual


def sample(seed: int, visual: int, text: int, turn: float = 0.3, norm: float = 5.0) -> Sample:
    """One sample's states; every update is ``turn`` times as long as the state it is added to."""
    generator = torch.Generator().manual_seed(seed)
    states = [torch.randn(visual + text, WIDTH, generator=generator) * norm]
    for _ in range(DEPTH):
        update = torch.randn(visual + text, WIDTH, generator=generator)
        states.append(states[-1] + turn * norm * update)
    mask = torch.zeros(visual + text, dtype=torch.bool)
    start = seed % (text + 1)
    mask[start : start + visual] = True
    return states, mask


def batch(samples: list[Sample], side: str) -> tuple[list[Tensor], Masks]:
    """Samples padded to one length on one side; what stands at padding would spoil every statistic."""
    length = max(len(mask) for _, mask in samples)
    states = [torch.full((len(samples), length, WIDTH), torch.nan) for _ in range(DEPTH + 1)]
    visual, text = (torch.zeros(len(samples), length, dtype=torch.bool) for _ in range(2))
    for row, (own, mask) in enumerate(samples):
        at = slice(length - len(mask), length) if side == "left" else slice(0, len(mask))
        for state, mine in zip(states, own, strict=True):
            state[row, at] = mine
        visual[row, at], text[row, at] = mask, ~mask
    return states, Masks(visual, text)


def measured(batches: list[list[Sample]], side: str = "right") -> LayerStatistics:
    """Statistics of batches; half of each update counts as attention's, half as the MLP's."""
    statistics = LayerStatistics(DEPTH, WIDTH)
    for samples in batches:
        states, masks = batch(samples, side)
        for index in range(DEPTH):
            half = torch.linalg.vector_norm((states[index + 1] - states[index]) / 2, dim=-1)
            statistics.add(LayerStep(index, states[index], states[index + 1], half, half), masks)
    return statistics


def direct(samples: list[Sample], modality: str) -> dict[str, list[float]]:
    """The same of all samples at once, in float64."""
    chosen = [mask if modality == "visual" else ~mask for _, mask in samples]
    states = [reference.rows([own[i] for own, _ in samples], chosen) for i in range(DEPTH + 1)]
    halves = [(states[i + 1] - states[i]) / 2 for i in range(DEPTH)]
    return reference.statistics(states[:-1], states[1:], halves, halves)


def equal(found: Any, expected: Any, tolerance: float) -> None:
    assert list(found) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(
            np.asarray(found[name], float), np.asarray(values, float), rtol=tolerance, atol=1e-9, err_msg=name
        )


@pytest.mark.parametrize("turn", [1e-4, 0.05, 1.0, 30.0])
def test_every_curve_equals_the_direct_computation_in_float64(turn: float) -> None:
    samples = [sample(seed, 4 + seed, 7 - seed, turn) for seed in range(5)]
    layers = measured([samples[:2], samples[2:]]).summary()["layers"]
    for modality in ("visual", "text"):
        found = dict(layers[modality])
        found.pop("effective_rank")
        equal(found, direct(samples, modality), 1e-5)


def test_a_turn_far_below_float32_precision_of_a_cosine_is_still_measured() -> None:
    state = torch.tensor([[[100.0, 0.0]]])
    turned = torch.tensor([[[100.0, 1e-3]]])
    statistics = LayerStatistics(1, 2)
    both = Masks(torch.tensor([[True, False]]), torch.tensor([[False, True]]))
    pair = (torch.cat([state, state], 1), torch.cat([turned, turned], 1))
    statistics.add(LayerStep(0, *pair, None, None), both)
    angle = statistics.summary()["layers"]["visual"]["angle"][0]
    assert angle == pytest.approx(np.degrees(1e-5), rel=1e-5)


@settings(max_examples=12, deadline=None)
@given(
    order=st.permutations(range(5)),
    cuts=st.sets(st.integers(1, 4)),
    side=st.sampled_from(["left", "right"]),
    turn=st.floats(1e-3, 10),
)
def test_batch_sizes_order_and_padding_side_change_nothing(
    order: list[int], cuts: set[int], side: str, turn: float
) -> None:
    samples = [sample(seed, 3 + seed, 6 - seed, turn) for seed in range(5)]
    bounds = [0, *sorted(cuts), 5]
    mixed = [samples[i] for i in order]
    parts = [mixed[a:b] for a, b in itertools.pairwise(bounds)]
    whole, streamed = measured([samples]), measured(parts, side)
    for modality in ("visual", "text"):
        equal(streamed.summary()["layers"][modality], whole.summary()["layers"][modality], 1e-6)
    found, expected = streamed.theory(), whole.theory()
    assert found.pop("rho") == pytest.approx(expected.pop("rho"), abs=1e-7)  # a mean of cosines
    equal(found, expected, 1e-5)
    assert streamed.summary()["sync_gap"] == pytest.approx(whole.summary()["sync_gap"], rel=1e-5, abs=1e-9)


def test_ranks_are_over_equally_many_tokens_of_both_modalities_of_every_sample() -> None:
    samples = [sample(1, 8, 4), sample(2, 3, 9)]
    layers = measured([samples]).summary()["layers"]
    for modality, chosen in (("visual", (slice(0, 8, 2), slice(0, 3))), ("text", (slice(0, 4), slice(0, 9, 3)))):
        for state in range(DEPTH + 1):
            tokens = [
                own[state][mask if modality == "visual" else ~mask][at]
                for (own, mask), at in zip(samples, chosen, strict=True)
            ]
            expected = reference.rank(torch.cat(tokens).double().numpy())
            assert layers[modality]["effective_rank"][state] == pytest.approx(expected, rel=1e-6)


def test_a_sink_is_counted_and_left_out_of_the_cosines() -> None:
    ordinary, sink = torch.eye(4), torch.tensor([[0.0, 0.0, 0.0, 100.0]])
    before = torch.cat([ordinary, sink] * 2)[None]
    after = torch.cat([ordinary.roll(1, 1), sink] * 2)[None]
    visual = torch.arange(10)[None] < 5
    statistics = LayerStatistics(1, 4)
    update = torch.linalg.vector_norm(after - before, dim=-1)
    statistics.add(LayerStep(0, before, after, update, torch.zeros_like(update)), Masks(visual, ~visual))
    for layers in statistics.summary()["layers"].values():
        assert layers["sinks"] == [1, 1] and layers["angle"] == [90.0]
        assert layers["cosine"] == [pytest.approx(0.0, abs=1e-15)]
        assert layers["norm_without_sinks"] == [1.0, 1.0]
        assert layers["norm_mean"] == [pytest.approx(104 / 5)] * 2
        assert layers["relative_update_attention"] == [pytest.approx(2**0.5)]
        assert layers["relative_update_mlp"] == [0.0]


def test_a_layer_that_does_nothing_turns_no_token_and_a_zero_token_has_no_direction() -> None:
    before = torch.tensor([[[3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [0.0, 2.0]]])
    visual = torch.tensor([[True, False, False, False]])
    statistics = LayerStatistics(1, 2)
    statistics.add(LayerStep(0, before, before, None, None), Masks(visual, ~visual))
    layers = statistics.summary()["layers"]
    assert layers["visual"]["cosine"] == [1.0] and layers["visual"]["angle"] == [0.0]
    assert layers["text"]["cosine"] == [pytest.approx(2 / 3)] and layers["text"]["angle"] == [pytest.approx(30.0)]
    assert statistics.theory()["rho"] == [0.0]


def test_the_update_correlation_is_that_of_all_pairs_of_turning_directions() -> None:
    samples = [sample(seed, 5, 6) for seed in range(3)]
    found = measured([samples[:1], samples[1:]]).theory()["rho"]
    for layer in range(DEPTH):
        parts = {
            name: torch.cat([turning_directions(own[layer][m], own[layer + 1][m]) for own, m in chosen])
            for name, chosen in (("visual", samples), ("text", [(own, ~mask) for own, mask in samples]))
        }
        pairs = parts["visual"] @ parts["text"].T
        assert found[layer] == pytest.approx(pairs.mean().item(), rel=1e-5, abs=1e-8)
        sums = (parts["visual"].sum(0), 15, parts["text"].sum(0), 18)
        assert found[layer] == pytest.approx(update_correlation(*sums), rel=1e-5, abs=1e-8)


def test_visual_angles_are_predicted_exactly_where_both_modalities_get_the_same_updates() -> None:
    def states(norm: float) -> tuple[Tensor, Tensor]:
        before = torch.eye(4)[:2] * norm
        return before, before + 2.0 * torch.eye(4)[2:]  # length 2 at 90 degrees

    (visual, visual_after), (text, text_after) = states(40.0), states(1.0)
    mask = torch.tensor([[True, True, False, False]])
    statistics = LayerStatistics(1, 4)
    step = LayerStep(0, torch.cat([visual, text])[None], torch.cat([visual_after, text_after])[None], None, None)
    statistics.add(step, Masks(mask, ~mask))
    theory = statistics.theory()
    assert theory["angle_measured"] == pytest.approx([np.degrees(np.arctan(2 / 40))])
    assert theory["angle_predicted"] == pytest.approx(theory["angle_measured"])


def test_no_tokens_of_a_modality_is_an_error_in_words() -> None:
    statistics = LayerStatistics(1, 2)
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    statistics.add(LayerStep(0, torch.ones(1, 3, 2), torch.ones(1, 3, 2), None, None), Masks(~nothing, nothing))
    with pytest.raises(ValueError, match="no text tokens"):
        statistics.summary()
