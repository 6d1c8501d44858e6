"""What every aligner promises about the norms of visual tokens (UB §5.1; TA)."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normalign.norms import GlobalScaleAligner, build_aligner

from ..conftest import TEXT_NORM, Tiny

WIDTH = 16
NAMES = ("layernorm", "global_scale", "token_rms")
multiples = st.floats(0.1, 10)
seeds = st.integers(0, 10_000)


def tokens(seed: int, batch: int = 3, scale: float = 1.0) -> Tensor:
    """Visual tokens (batch, 5, D) of unequal norms."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 5, WIDTH, generator=generator)
    return x * torch.rand(batch, 5, 1, generator=generator).add(0.5) * scale


def settings_of(name: str, **more: Any) -> dict[str, Any]:
    """A variant's fields."""
    return {"aligner": name, **more}


@pytest.mark.parametrize("name", NAMES)
def test_no_aligner_but_none_is_the_identity(name: str) -> None:
    x = tokens(0)
    assert not torch.allclose(build_aligner(settings_of(name), WIDTH, TEXT_NORM)(x), x)
    assert build_aligner(settings_of("none"), WIDTH, TEXT_NORM)(x) is x


@given(seeds, multiples, st.floats(0.05, 1e4), st.floats(-100, 100))
@settings(max_examples=50, deadline=None)
def test_layernorm_at_init_gives_multiple_times_t_for_any_scale_and_shift(
    seed: int, multiple: float, scale: float, shift: float
) -> None:
    layer = build_aligner(settings_of("layernorm", multiple=multiple), WIDTH, TEXT_NORM)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)) * scale + shift * scale
    norms = layer(x).norm(dim=-1)
    torch.testing.assert_close(norms, torch.full((4,), multiple * TEXT_NORM), rtol=2e-3, atol=0)


def test_layernorm_with_default_init_starts_at_gain_one_and_bias_zero() -> None:
    layer: Any = build_aligner(settings_of("layernorm", init="default"), WIDTH, TEXT_NORM)
    assert torch.equal(layer.weight, torch.ones(WIDTH)) and torch.equal(layer.bias, torch.zeros(WIDTH))


@given(seeds, multiples, st.floats(1e-3, 1e4))
@settings(max_examples=50, deadline=None)
def test_token_rms_gives_every_token_the_target_norm_and_keeps_its_direction(
    seed: int, multiple: float, scale: float
) -> None:
    x = tokens(seed, scale=scale)
    y = build_aligner(settings_of("token_rms", multiple=multiple), WIDTH, TEXT_NORM)(x)
    torch.testing.assert_close(y.norm(dim=-1), torch.full(y.shape[:-1], multiple * TEXT_NORM), rtol=1e-4, atol=0)
    cosine = torch.nn.functional.cosine_similarity(x.double(), y.double(), dim=-1)
    torch.testing.assert_close(cosine, torch.ones_like(cosine), rtol=0, atol=1e-6)


@given(seeds, multiples, st.floats(1e-3, 1e4))
@settings(max_examples=50, deadline=None)
def test_global_scale_keeps_relative_norms_and_gives_the_target_mean_norm(
    seed: int, multiple: float, scale: float
) -> None:
    x = tokens(seed, scale=scale)
    y = build_aligner(settings_of("global_scale", multiple=multiple), WIDTH, TEXT_NORM)(x)
    assert y.norm(dim=-1).mean().item() == pytest.approx(multiple * TEXT_NORM, rel=1e-4)
    ratio = y / x
    torch.testing.assert_close(ratio, ratio.flatten()[0].expand_as(ratio), rtol=1e-4, atol=0)


def test_global_scale_in_evaluation_uses_the_stored_norm_and_refuses_to_work_without_one() -> None:
    layer = build_aligner(settings_of("global_scale"), WIDTH, TEXT_NORM).eval()
    assert isinstance(layer, GlobalScaleAligner)
    with pytest.raises(ValueError, match="calibrate"):
        layer(tokens(0))
    layer.calibrate(tokens(0))
    expected = tokens(1) * TEXT_NORM / tokens(0).norm(dim=-1).mean()
    torch.testing.assert_close(layer(tokens(1)), expected)


def test_global_scale_stores_a_running_mean_that_begins_with_the_first_batch() -> None:
    layer = build_aligner(settings_of("global_scale"), WIDTH, TEXT_NORM)
    first, second = (tokens(seed).norm(dim=-1).mean() for seed in (0, 1))
    layer(tokens(0))
    torch.testing.assert_close(layer.get_buffer("running_norm"), first)
    layer(tokens(1))
    torch.testing.assert_close(layer.get_buffer("running_norm"), 0.9 * first + 0.1 * second)


@pytest.mark.parametrize(("name", "training"), [("layernorm", True), ("token_rms", True), ("global_scale", False)])
@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_an_output_does_not_depend_on_what_else_is_in_the_batch_or_its_order(
    name: str, training: bool, seed: int
) -> None:
    layer = build_aligner(settings_of(name), WIDTH, TEXT_NORM).train(training)
    if isinstance(layer, GlobalScaleAligner):
        layer.calibrate(tokens(seed + 1))
    x = tokens(seed, batch=4)
    whole = layer(x)
    assert torch.equal(layer(x.flip(0)).flip(0), whole)
    for index in range(4):
        assert torch.equal(layer(x[index : index + 1])[0], whole[index])


def test_gains_stay_float32_and_outputs_follow_the_input() -> None:
    layer = build_aligner(settings_of("layernorm", gwc=True), WIDTH, TEXT_NORM)
    assert all(p.dtype == torch.float32 for p in layer.parameters())
    for name in NAMES:
        y = build_aligner(settings_of(name), WIDTH, TEXT_NORM)(tokens(0).bfloat16())
        assert y.dtype == torch.bfloat16


def test_gain_statistics_are_those_of_the_gain() -> None:
    layer = build_aligner(settings_of("layernorm"), 4, 2.0)
    assert layer.gain_statistics() == pytest.approx({"gain_l2": 2.0, "gain_mean_abs": 1.0, "gain_drift": 0.0})
    layer.weight.data = torch.tensor([1.0, -1.0, 1.0, 4.0])
    expected = {"gain_l2": 19**0.5, "gain_mean_abs": 1.75, "gain_drift": 13**0.5}
    assert layer.gain_statistics() == pytest.approx(expected)


def test_an_unknown_aligner_is_refused_with_the_valid_names() -> None:
    with pytest.raises(ValueError, match="'layer_norm'; valid: none, layernorm, global_scale, token_rms"):
        build_aligner(settings_of("layer_norm"), WIDTH, TEXT_NORM)


def test_a_field_that_no_aligner_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="aligner layernorm: unknown field 'gcw'; valid: aligner, init, gwc"):
        build_aligner({"aligner": "layernorm", "gcw": True}, WIDTH, TEXT_NORM)


@pytest.mark.parametrize("text_norm", [0.0, -1.0, float("nan"), float("inf")])
def test_a_target_norm_that_is_not_above_zero_is_refused(text_norm: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        build_aligner(settings_of("layernorm"), WIDTH, text_norm)


@pytest.mark.parametrize("fields", [settings_of("layernorm"), settings_of("layernorm", init="default")])
def test_the_gain_survives_building_saving_and_loading_bitwise(
    tiny: Tiny, fields: dict[str, Any], tmp_path: Any
) -> None:
    from transformers import AutoModelForImageTextToText

    model = tiny.model(fields)
    aligner = model.model.multi_modal_projector.aligner
    assert torch.equal(aligner.weight, torch.full_like(aligner.weight, aligner.initial_gain))
    with torch.no_grad():
        aligner.weight.mul_(torch.linspace(-1, 2, len(aligner.weight)))
        aligner.bias.add_(torch.linspace(0, 1, len(aligner.bias)))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    for name, value in aligner.state_dict().items():
        assert torch.equal(loaded.model.multi_modal_projector.aligner.state_dict()[name], value), name
