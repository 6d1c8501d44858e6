import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normalign.diagnosis.theory import measured_correlation, text_updates
from normalign.diagnosis.thresholds import SEVERITIES, severity
from normalign.diagnosis.verdict import judge
from normalign.norms.theory import Updates, threshold_correlation

from .results import result

# Text of norm 2 gets an update of its own length at right angles: it turns by 45 degrees in the first layer.
EIGHT = Updates.uniform(2.0, 90, 8)
HUGE = Updates.uniform(40.0, 90, 8)  # 20 times what text of norm 2 brings: the first layer replaces it


def words(verdict: dict[str, Any]) -> str:
    return " ".join(verdict["words"] + verdict["advice"])


def test_inertia_is_told_by_visual_tokens_that_keep_their_direction_while_text_turns() -> None:
    verdict = judge(result(30, EIGHT))
    first = verdict["first_layers"]
    # tan of each visual angle is 2 / |h| = 1 / sqrt(900 + l), of each text angle 1 / sqrt(1 + l).
    visual = [math.degrees(math.atan(1 / math.sqrt(900 + layer))) for layer in range(8)]
    text = [math.degrees(math.atan(1 / math.sqrt(1 + layer))) for layer in range(8)]
    assert first["visual_angle"] == pytest.approx(sum(visual) / 8)
    assert first["turning_share"] == pytest.approx(sum(visual) / sum(text))
    assert verdict["failure"] == "inertia"
    gap = sum(math.cos(math.radians(v)) - math.cos(math.radians(t)) for v, t in zip(visual, text, strict=True)) / 8
    assert verdict["gap_first8"] == pytest.approx(gap)
    assert verdict["severity"] == "mild" and 0.0625 <= gap < 0.125
    assert "Inertia" in words(verdict) and "--aligner layernorm" in words(verdict)


def test_a_ratio_and_a_gap_that_are_both_strong_are_severe() -> None:
    verdict = judge(result(200, Updates([40, *[10] * 7], [90] * 8)))
    assert verdict["gap_first8"] > 0.125 and verdict["severity"] == "strong" and verdict["failure"] == "inertia"


def test_overwriting_is_told_by_a_first_layer_that_replaces_an_aligned_token() -> None:
    verdict = judge(result(1, HUGE))
    assert verdict["first_layers"]["first_visual_cosine"] == pytest.approx(1 / math.sqrt(401))
    assert (verdict["failure"], verdict["severity"]) == ("overwriting", "mild")
    assert "adds 20 times" in words(verdict) and "fare alike" in words(verdict)
    assert "larger target norm" in words(verdict) and "layernorm" not in words(verdict)
    assert "normalign attach MODEL OUT --multiple 8" in words(verdict)
    trained = words(judge(result(1, HUGE, family="normalign_llava")))
    assert "multiple: 8.0 in params.yaml" in trained and "attach" not in trained, "attach refuses the pipeline's models"
    text_kept = judge(result(1, EIGHT, HUGE))
    assert text_kept["failure"] == "overwriting" and "do not fare so (cosine 0.71)" in words(text_kept)


def test_a_small_cosine_without_a_large_update_is_no_overwriting() -> None:
    opposed = Updates([2.0] * 8, [150] * 8)  # 2 + 2 cos 150 = 0.27 along, 1 across: cosine 0.26 after an equal update
    changed = result(1, EIGHT, opposed)
    changed["layers"]["visual"]["cosine"][0] = 0.1
    assert judge(changed)["failure"] is None


def test_balanced_tokens_that_turn_alike_are_healthy() -> None:
    verdict = judge(result(1, EIGHT))
    assert (verdict["severity"], verdict["failure"], verdict["gap_first8"]) == ("none", None, 0)
    assert verdict["words"][2] == "Neither inertia nor overwriting."
    assert verdict["advice"] == ["Norms call for no change."]


def test_a_ratio_that_does_not_show_in_the_layers_is_not_called_inertia() -> None:
    alike = Updates([5 * size for size in EIGHT.size], EIGHT.angle)
    verdict = judge(result(5, EIGHT, alike))
    assert (verdict["severity"], verdict["failure"]) == ("none", None)
    assert "turn both modalities alike" in words(verdict)
    strong = judge(result(20, EIGHT, Updates([20 * size for size in EIGHT.size], EIGHT.angle)))
    assert (strong["severity"], strong["failure"]) == ("mild", None)


def test_an_imbalance_that_shows_short_of_inertia_is_said_with_its_figures() -> None:
    # Visual tokens turn by atan(1 / sqrt(9 + l)): a mean cosine of about 0.96, but more than half as far as text.
    verdict = judge(result(3, EIGHT))
    assert (verdict["severity"], verdict["failure"]) == ("mild", None)
    share = verdict["first_layers"]["turning_share"]
    assert 0.5 < share < 1 and f"turn {share:.2g} times as far as text" in words(verdict)


def test_a_gap_between_balanced_norms_is_not_blamed_on_norms() -> None:
    verdict = judge(result(1, EIGHT, Updates.uniform(0.02, 90, 8)))
    assert verdict["gap_first8"] > 0.0625 and verdict["severity"] == "none"
    assert verdict["failure"] == "inertia"  # they do keep their direction
    assert "not because of their norm" in words(verdict)


@given(st.floats(0.01, 500), st.floats(0, 1))
def test_severity_rises_with_ratio_and_gap_and_not_with_their_direction(k: float, gap: float) -> None:
    rank = SEVERITIES.index
    level = severity(k, gap, None)
    assert severity(1 / k, gap, None) == level
    assert rank(severity(2 * max(k, 1 / k), gap, None)) >= rank(level) <= rank(severity(k, 2 * gap, None))
    assert rank(severity(k, gap, "overwriting")) >= 1
    assert severity(1, gap, None) == "none"


@pytest.mark.parametrize(("base", "inflated"), [(1.0, True), (1.9, False), (4.0, False), (2.0 / 1.1, True)])
def test_passive_compensation_is_told_by_embeddings_longer_than_the_base_models(base: float, inflated: bool) -> None:
    verdict = judge(result(1, EIGHT, base_T=base))
    assert verdict["passive_compensation"] == {"T": 2.0, "base_T": base, "inflation": 2 / base, "inflated": inflated}
    assert ("passive compensation." in words(verdict)) and ("no sign of" in words(verdict)) != inflated


def test_without_a_base_model_nothing_is_said_about_compensation() -> None:
    verdict = judge(result(1, EIGHT))
    assert verdict["passive_compensation"] is None and "compensation" not in words(verdict)


def test_angle_errors_are_zero_when_both_modalities_get_the_same_updates() -> None:
    theory = judge(result(30, EIGHT))["theory"]
    assert theory["angle_error"] == pytest.approx([0] * 8, abs=1e-9) and theory["assumptions_hold"]
    assert theory["divergence_measured"] == pytest.approx(theory["divergence_expected"])


def test_angle_errors_show_where_the_updates_differ() -> None:
    # Predicted atan(2 / 60) = 1.909 degrees in the first layer; twice the update turns it by atan(4 / 60) = 3.814.
    theory = judge(result(30, EIGHT, Updates.uniform(4.0, 90, 8)))["theory"]
    assert theory["angle_error"][0] == pytest.approx(1.909 - 3.814, abs=1e-3)
    assert theory["relative_angle_error"] == pytest.approx(0.5, abs=0.01) and not theory["assumptions_hold"]
    assert "do not hold" in words(judge(result(30, EIGHT, Updates.uniform(4.0, 90, 8))))


def test_the_paper_inequality_holds_for_pairs_below_a_cosine_that_follows_from_rho() -> None:
    paper = Updates.uniform(1.0, 90, 8)  # with text of norm 2 SCIENCE's simulated case: C / |h| = 0.5
    theory = judge(result(40, paper, rho=0.1))["theory"]
    assert theory["threshold"] == pytest.approx(threshold_correlation(40, Updates.uniform(0.5, 90, 8)))
    assert theory["holds_below_cosine"] == pytest.approx(0.6 * 0.1 / theory["threshold"])
    assert theory["score"]["balanced"] < theory["score"]["imbalanced"]  # at a cosine of 0.6, above that bound
    higher = judge(result(40, paper, rho=0.5))
    assert higher["theory"]["score"]["balanced"] > higher["theory"]["score"]["imbalanced"]
    assert higher["theory"][
        "holds_below_cosine"
    ] == 1 and "lowers the expected attention score of related pairs, " in words(higher)
    assert "raises the expected attention score of related pairs, however" in words(judge(result(40, paper, rho=-0.02)))


def test_balanced_norms_say_nothing_about_the_inequality() -> None:
    text = words(judge(result(1.5, EIGHT)))
    assert "correlate with ρ = 0.1 over all pairs" in text and "At this ρ" not in text


def test_text_updates_are_recovered_from_norms_and_angles() -> None:
    updates = Updates([2, 7, 1.5, 0.3, 1, 1, 1, 1, 1, 1], [90, 60, 120, 100, 90, 90, 90, 90, 90, 90])
    found = text_updates(result(3, updates))
    assert found.size == pytest.approx(updates.size[:8]) and found.angle == pytest.approx(updates.angle[:8])


def test_rho_of_the_first_layers_is_the_share_of_their_update_variance() -> None:
    # Turning parts 2 sin 90 = 2 and 2 sin 30 = 1: weights 4 and 1.
    changed = result(3, Updates([2, 2], [90, 30]))
    changed["theory"]["rho"] = [0.1, 0.6]
    assert measured_correlation(changed) == pytest.approx((4 * 0.1 + 1 * 0.6) / 5)
    changed["theory"]["rho"] = [None, 0.6]
    assert measured_correlation(changed) == pytest.approx(0.6)


@pytest.mark.parametrize("depth", [1, 2, 8, 12])
def test_any_depth_is_judged_by_its_first_eight_layers_at_most(depth: int) -> None:
    verdict = judge(result(30, Updates.uniform(2.0, 90, depth)))
    assert verdict["first_layers"]["count"] == min(8, depth)
    assert len(verdict["theory"]["angle_error"]) == depth
    json.dumps(verdict, allow_nan=False)


def test_what_was_not_measured_is_said_or_left_out_and_never_made_up() -> None:
    bare = result(30, EIGHT, theory=None, attention=None, attention_reason="the model has no eager attention")
    verdict = judge(bare)
    assert verdict["theory"] is None and measured_correlation(bare) is None
    assert "Attention was not measured: the model has no eager attention." in words(verdict)
    assert "ρ" not in words(verdict)
    unknown = judge(result(30, EIGHT, rho=None))
    assert unknown["theory"]["rho"] is None and unknown["theory"]["score"] is None
    json.dumps([verdict, unknown], allow_nan=False)


def test_structures_that_change_the_reading_are_named() -> None:
    verdict = judge(result(30, EIGHT, injected_layers=[0, 1, 2], visual_vocabulary=True))
    assert "added again after layers 1, 2, 3 (counted from 1)" in words(verdict)
    assert "visual embedding table" in words(verdict) and "--aligner" not in words(verdict)
