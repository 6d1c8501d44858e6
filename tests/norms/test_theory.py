import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from normalign.norms.theory import (
    Updates,
    divergence,
    expected_cosines,
    expected_score,
    norms_over_layers,
    predict_angles,
    threshold_correlation,
    turning_angle,
    turning_angles,
    turning_directions,
    update_correlation,
)

WIDTH, PAIRS = 256, 1500
PAPER = Updates.uniform(0.5, 90, 8)  # the simulated case of SCIENCE §1
# Simulated before, with another program: expected cosine at k = 1 and at k = 40, per update correlation.
SCIENCE = {0.0: (0.201, 0.346), 0.25: (0.366, 0.353), 0.5: (0.532, 0.362), 1.0: (0.866, 0.374)}
GENERAL = Updates([0.5, 1.5, 0.2, 2.0], [90, 60, 120, 100])
# The mean of PAIRS cosines has a standard error of about 1 / sqrt(WIDTH * PAIRS) = 0.0016; the formula is off by 1 / D.
NOISE = 4 / math.sqrt(WIDTH * PAIRS) + 1 / WIDTH

lengths = st.floats(0.01, 1000)


def unit(x_ND: Tensor) -> Tensor:
    return x_ND / x_ND.norm(dim=-1, keepdim=True)


def gaussian(rng: torch.Generator, tokens: int = PAIRS) -> Tensor:
    return torch.randn(tokens, WIDTH, dtype=torch.float64, generator=rng)


def across(direction_ND: Tensor, state_ND: Tensor) -> Tensor:
    """The part of each direction that is orthogonal to its state, as unit vectors."""
    return unit(direction_ND - (direction_ND * unit(state_ND)).sum(-1, keepdim=True) * unit(state_ND))


def step(state_ND: Tensor, direction_ND: Tensor, size: float, angle: float) -> Tensor:
    """A layer: an update of length ``size`` at ``angle`` to the state, turning it towards ``direction_ND``."""
    theta = math.radians(angle)
    return state_ND + size * (math.cos(theta) * unit(state_ND) + math.sin(theta) * across(direction_ND, state_ND))


def simulate(k: float, rho: float, updates: Updates, cosine: float) -> tuple[list[Tensor], list[Tensor]]:
    """States of related text and visual tokens before and after each layer, by drawing every direction."""
    rng = torch.Generator().manual_seed(7)
    text = [unit(gaussian(rng))]
    visual = [k * (cosine * text[0] + math.sqrt(1 - cosine**2) * across(gaussian(rng), text[0]))]
    for size, angle in zip(updates.size, updates.angle, strict=True):
        shared, own_text, own_visual = (gaussian(rng) for _ in range(3))
        for states, own in ((text, own_text), (visual, own_visual)):
            states.append(step(states[-1], math.sqrt(rho) * shared + math.sqrt(1 - rho) * own, size, angle))
    return text, visual


def mean_cosine(a_ND: Tensor, b_ND: Tensor) -> float:
    return (unit(a_ND) * unit(b_ND)).sum(-1).mean().item()


def degrees_between(a_ND: Tensor, b_ND: Tensor) -> Tensor:
    return torch.rad2deg(torch.arccos((unit(a_ND) * unit(b_ND)).sum(-1).clamp(-1, 1)))


@given(lengths, lengths, st.floats(1, 179))
def test_turning_angle_is_that_between_the_vectors(norm: float, size: float, angle: float) -> None:
    theta = math.radians(angle)
    after = (norm + size * math.cos(theta), size * math.sin(theta))
    if math.hypot(*after) > 1e-6 * norm:
        expected = math.degrees(math.acos(max(-1.0, min(1.0, after[0] / math.hypot(*after)))))
        assert turning_angle(norm, size, angle) == pytest.approx(expected, abs=1e-4)


def test_turning_angle_worked_out_by_hand() -> None:
    assert turning_angle(1, 1, 90) == pytest.approx(45)
    assert turning_angle(60, 1, 90) == pytest.approx(0.955, abs=1e-3)  # TA: about 1 degree at a norm of 60
    assert turning_angle(1, 2, 180) == pytest.approx(180)  # the update turns the state round
    assert turning_angle(1, 2, 120) == pytest.approx(90)  # 1 + 2 cos 120 = 0
    assert turning_angle(5, 3, 0) == 0


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(1, 179)), min_size=1, max_size=5))
def test_updates_follow_from_norms_and_turning_angles(steps: list[tuple[float, float]]) -> None:
    updates = Updates([size for size, _ in steps], [angle for _, angle in steps])
    norms = norms_over_layers(1, updates)
    if min(norms) > 1e-3:
        found = Updates.between(norms, turning_angles(1, updates))
        assert found.size == pytest.approx(updates.size, rel=1e-6)
        assert found.angle == pytest.approx(updates.angle, rel=1e-4)


def test_updates_between_norms_worked_out_by_hand() -> None:
    found = Updates.between([3, 5, 5], [math.degrees(math.acos(3 / 5)), 0])  # the 3-4-5 triangle, then no update
    assert found.size == pytest.approx([4, 0]) and found.angle[0] == pytest.approx(90)


@given(lengths, st.floats(1.01, 100), lengths, st.floats(1, 90))
def test_a_token_of_greater_norm_turns_less(norm: float, k: float, size: float, angle: float) -> None:
    assert turning_angle(k * norm, size, angle) < turning_angle(norm, size, angle)


@pytest.mark.parametrize("k", [1.0, 40.0])
@pytest.mark.parametrize("updates", [PAPER, GENERAL], ids=["paper", "general"])
def test_norms_and_turning_angles_agree_with_simulated_states(k: float, updates: Updates) -> None:
    text, visual = simulate(k, 0.3, updates, 0.6)
    for states, norm in ((text, 1.0), (visual, k)):
        for layer, expected in enumerate(norms_over_layers(norm, updates)):
            assert torch.allclose(states[layer].norm(dim=-1), torch.tensor(expected, dtype=torch.float64))
        for layer, expected in enumerate(turning_angles(norm, updates)):
            turned = degrees_between(states[layer], states[layer + 1])
            assert torch.allclose(turned, torch.tensor(expected, dtype=torch.float64), atol=1e-5)


def test_divergence_agrees_with_the_simulated_paths_and_is_zero_for_balanced_norms() -> None:
    text, visual = simulate(40, 0.3, GENERAL, 0.6)
    total = 0.0
    for layer, expected in enumerate(divergence(40, GENERAL)):
        turned = [degrees_between(states[layer], states[layer + 1]).mean().item() for states in (text, visual)]
        total += turned[0] - turned[1]
        assert expected == pytest.approx(total, abs=1e-5)
    assert divergence(1, GENERAL) == [0] * 4


@pytest.mark.parametrize("rho", SCIENCE)
def test_expected_cosine_reproduces_the_simulated_table(rho: float) -> None:
    for k, expected in zip((1, 40), SCIENCE[rho], strict=True):
        assert expected_cosines(k, rho, PAPER)[-1] == pytest.approx(expected, abs=0.003)


@pytest.mark.parametrize(("k", "rho"), [(1.0, 0.0), (1.0, 1.0), (4.0, 0.25), (40.0, 0.0), (40.0, 1.0)])
@pytest.mark.parametrize("updates", [PAPER, GENERAL], ids=["paper", "general"])
def test_expected_cosine_agrees_with_simulated_pairs_after_every_layer(k: float, rho: float, updates: Updates) -> None:
    text, visual = simulate(k, rho, updates, 0.6)
    for layer, expected in enumerate(expected_cosines(k, rho, updates)):
        assert mean_cosine(text[layer], visual[layer]) == pytest.approx(expected, abs=NOISE)


@given(st.floats(1, 100), st.floats(0, 1), st.floats(0, 1), st.integers(1, 30), st.floats(0.01, 5))
def test_closed_form_for_updates_at_right_angles(k: float, rho: float, c0: float, layers: int, size: float) -> None:
    grown = layers * size**2
    expected = (k * c0 + rho * grown) / math.sqrt((k**2 + grown) * (1 + grown))
    assert expected_cosines(k, rho, Updates.uniform(size, 90, layers), c0)[-1] == pytest.approx(expected)


@given(st.floats(0.01, 100), st.floats(1, 50), st.floats(0, 1))
def test_only_the_ratio_of_norms_and_updates_matters(scale: float, k: float, rho: float) -> None:
    scaled = Updates([scale * size for size in GENERAL.size], GENERAL.angle)
    assert expected_cosines(k, rho, scaled, 0.4, scale) == pytest.approx(expected_cosines(k, rho, GENERAL, 0.4))


def test_the_inequality_turns_at_the_threshold() -> None:
    rho = threshold_correlation(40, PAPER)
    assert rho is not None
    # At rho = 0: 24 / sqrt(1602 * 3) = 0.34620 against 0.6 / 3; per rho: 2 / sqrt(1602 * 3) = 0.02885 against 2 / 3.
    assert rho == pytest.approx((0.34620 - 0.2) / (2 / 3 - 0.02885), abs=1e-4)
    assert rho == pytest.approx(0.22, abs=0.015)
    for above, sign in ((0.02, 1), (-0.02, -1)):
        balanced, imbalanced = (expected_cosines(k, rho + above, PAPER)[-1] for k in (1, 40))
        assert sign * (balanced - imbalanced) > 0


def test_without_imbalance_there_is_no_threshold() -> None:
    assert threshold_correlation(1, PAPER) is None
    assert threshold_correlation(0.5, PAPER) is None


def test_the_expected_score_is_in_standard_deviations_of_unrelated_pairs() -> None:
    rng = torch.Generator().manual_seed(3)
    query, related, unrelated = gaussian(rng), gaussian(rng), gaussian(rng)
    key = 0.3 * unit(query) + math.sqrt(1 - 0.09) * across(related, query)
    # Scores as in attention, on states that Norm has brought to length sqrt(D).
    scores = {
        name: (unit(query) * unit(k_ND)).sum(-1) * WIDTH / math.sqrt(WIDTH)
        for name, k_ND in (("related", key), ("unrelated", unrelated))
    }
    assert scores["related"].mean().item() == pytest.approx(expected_score(0.3, WIDTH))
    assert scores["unrelated"].mean().item() == pytest.approx(0, abs=4 / math.sqrt(PAIRS))
    assert scores["unrelated"].std().item() == pytest.approx(1, abs=0.06)


def test_prediction_uses_text_updates_and_visual_norms() -> None:
    assert predict_angles([1, 2], [90, 120], [1, 1]) == pytest.approx([45, 90])
    with pytest.raises(ValueError, match="argument"):
        predict_angles([1], [90], [1, 1])


def test_prediction_from_the_tokens_own_updates_is_an_identity() -> None:
    _, visual = simulate(4, 0.3, GENERAL, 0.6)
    norms = norms_over_layers(4, GENERAL)[:-1]
    for layer, predicted in enumerate(predict_angles(GENERAL.size, GENERAL.angle, norms)):
        turned = degrees_between(visual[layer], visual[layer + 1]).mean().item()
        assert predicted == pytest.approx(turned, abs=1e-5)


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("angle", [90.0, 40.0])
def test_update_correlation_recovers_the_share_that_all_tokens_have_in_common(rho: float, angle: float) -> None:
    rng = torch.Generator().manual_seed(11)
    shared = gaussian(rng, 1)
    sums = []
    for norm in (30.0, 1.0):
        before = norm * unit(gaussian(rng, 1500))
        after = step(before, math.sqrt(rho) * shared + math.sqrt(1 - rho) * gaussian(rng, 1500), 0.8, angle)
        sums.append(turning_directions(before, after).sum(0))
    # One shared direction of random length: the share of the variance is that of its squared length, not of D.
    length = rho * shared.square().mean().item()
    assert update_correlation(sums[0], 1500, sums[1], 1500) == pytest.approx(length / (length + 1 - rho), abs=0.02)


def test_update_correlation_is_the_mean_cosine_over_all_pairs_however_they_are_batched() -> None:
    rng = torch.Generator().manual_seed(5)
    visual, text = ([gaussian(rng, n), gaussian(rng, n) + 1] for n in (5, 9))
    pairs = turning_directions(*visual) @ turning_directions(*text).T
    total = sum(turning_directions(visual[0][part], visual[1][part]).sum(0) for part in (slice(2), slice(2, None)))
    assert isinstance(total, Tensor)
    rho = update_correlation(total, 5, turning_directions(*text).sum(0), 9)
    assert rho == pytest.approx(pairs.mean().item(), abs=1e-12)


def test_turning_directions_are_unit_vectors_across_the_state_and_their_sum_needs_two_products_only() -> None:
    rng = torch.Generator().manual_seed(6)
    before, after = gaussian(rng, 12), gaussian(rng, 12)
    directions = turning_directions(before, after)
    assert torch.allclose(directions.norm(dim=-1), torch.ones(12, dtype=torch.float64))
    assert (directions * before).sum(-1).abs().max() < 1e-12
    update = after - before
    along = (update * before).sum(-1)
    p = (update.square().sum(-1) - along**2 / before.square().sum(-1)).rsqrt()
    q = p * along / before.square().sum(-1)
    assert torch.allclose(directions.sum(0), update.T @ p - before.T @ q)


def test_a_token_that_does_not_turn_has_no_direction() -> None:
    state = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]])
    assert turning_directions(state, torch.tensor([[2.0, 4.0], [0.0, 0.0], [3.0, 4.0]])).tolist() == [[0, 0]] * 3
    with pytest.raises(ValueError, match="0 visual and 3 text"):
        update_correlation(torch.zeros(2), 0, torch.zeros(2), 3)
