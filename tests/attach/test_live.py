"""Attaching to a live model: the norm that arrives at the first decoder layer, and leaving no trace when detached."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, LlavaConfig

from normalign import attach_aligner, detach_aligner
from normalign.anatomy import find_anatomy, visual_mask
from normalign.attach.aligned import NAME, RECORD
from normalign.attach.merge import merge_of
from tests.anatomy.tiny import FAMILIES, tiny_vlm
from tests.conftest import Tiny

OTHERS = [family for family in FAMILIES if family != "normalign_llava"]
NEWLINES = ("llava_next", "llava_onevision")  # a learned vector ends each row of tokens; it passes no projector
ADDS = "molmo2"  # the one family that adds visual tokens to the placeholder's embedding


def at_merge(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Norms of the visual tokens that enter the first decoder layer, taken from a whole forward pass."""
    anatomy = find_anatomy(model)
    caught = []
    handle = anatomy.layers[0].register_forward_pre_hook(
        lambda layer, args, keywords: caught.append(args[0] if args else keywords["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return caught[0][visual_mask(anatomy, inputs["input_ids"])].double().norm(dim=-1)


def text_norm(model: Any, inputs: dict[str, Any]) -> float:
    """T as forward uses it, by looking up every row once."""
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        rows = embedding(torch.arange(embedding.num_embeddings)).double().norm(dim=-1)
    return rows[rows > 0].mean().item()


def attached(model: Any, *args: Any, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return attach_aligner(model, *args, **settings)


@pytest.mark.parametrize("family", OTHERS)
def test_visual_tokens_enter_the_first_layer_at_the_target_and_detaching_restores_every_output(family: str) -> None:
    model, _, inputs = tiny_vlm(family)
    kind, names = type(model), set(model.state_dict())
    T = text_norm(model, inputs)
    with torch.no_grad():
        before = model(**inputs).logits
    assert attached(model, multiple=2.0) is model
    norms = at_merge(model, inputs)
    record = getattr(model.config, RECORD)
    assert record["text_norm"] == pytest.approx(T, rel=1e-6)
    if family == ADDS:  # right in the mean over directions
        assert norms.mean().item() == pytest.approx(2.0 * T, rel=0.1)
    else:
        on_target = ((norms - 2.0 * T).abs() < 2e-3 * T).double().mean().item()
        assert on_target == 1.0 or (family in NEWLINES and on_target > 0.5)
    assert set(model.state_dict()) - names == {
        f"{record['projector']}.{NAME}.weight",
        f"{record['projector']}.{NAME}.bias",
    }
    detach_aligner(model)
    assert type(model) is kind and set(model.state_dict()) == names and not hasattr(model.config, RECORD)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, before)


def test_a_decoder_that_scales_its_inputs_gets_tokens_that_are_right_after_the_scaling() -> None:
    plain, _, inputs = tiny_vlm("llava")
    base = plain.config
    text = base.text_config.to_dict() | {"model_type": "granite", "embedding_multiplier": 3.0}
    parts: dict[str, Any] = {"text_config": text, "vision_config": base.vision_config.to_dict()}
    config = LlavaConfig(**parts | {"image_token_index": base.image_token_id, "image_seq_length": 4})
    model = AutoModelForImageTextToText.from_config(config).eval()
    assert merge_of(find_anatomy(model)).scale == pytest.approx(3.0, rel=1e-5)
    rows = model.get_input_embeddings().weight.detach().double().norm(dim=-1)
    T = 3.0 * rows[rows > 0].mean().item()
    attached(model)
    assert at_merge(model, inputs).mean().item() == pytest.approx(T, rel=2e-3)


def test_features_added_to_a_long_placeholder_embedding_keep_half_of_the_squared_norm_and_it_is_said() -> None:
    model = tiny_vlm(ADDS)[0]
    embedding = find_anatomy(model).embedding.weight
    added = embedding[find_anatomy(model).image_token_id].norm().item()
    with pytest.warns(UserWarning, match="adds visual tokens to something"):
        attach_aligner(model)
    record = getattr(model.config, RECORD)
    assert record["target"] ** 2 == pytest.approx(record["text_norm"] ** 2 / 2, rel=1e-3)
    assert record["norm_at_merge"] ** 2 == pytest.approx(record["target"] ** 2 + added**2, rel=1e-3)


def test_injected_features_are_left_as_they_are_and_it_is_said() -> None:
    model, _, inputs = tiny_vlm("qwen3_vl")
    tower: Any = find_anatomy(model).tower
    with torch.no_grad():
        before = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).deepstack_features
        with pytest.warns(UserWarning, match="once more after decoder layers 0"):
            attach_aligner(model)
        after = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).deepstack_features
    assert all(torch.equal(x, y) for a, b in zip(before, after, strict=True) for x, y in zip(a, b, strict=True))
    assert not any(NAME in name for name, _ in tower.deepstack_merger_list.named_modules())


@pytest.mark.parametrize("family", NEWLINES)
def test_row_ends_pass_no_aligner_and_it_is_said(family: str) -> None:
    with pytest.warns(UserWarning, match="image_newline.* passes no aligner"):
        attach_aligner(tiny_vlm(family)[0])


def test_a_visual_vocabulary_stays_one_under_global_scale_and_its_indicators_are_scaled_too() -> None:
    model, _, _ = tiny_vlm("ovis2")
    table: Any = find_anatomy(model).projector
    generator = torch.Generator().manual_seed(0)
    mixture = torch.rand(1, 4, table.num_embeddings, generator=generator).softmax(-1)
    before = table(mixture).detach(), table(torch.arange(3)).detach()
    with pytest.warns(UserWarning, match="mixtures of a visual vocabulary"):
        attach_aligner(model, "global_scale")
    aligner: Any = table.get_submodule(NAME)
    aligner.calibrate(before[0])
    factor = getattr(model.config, RECORD)["target"] / before[0].norm(dim=-1).mean()
    torch.testing.assert_close(table(mixture), factor * before[0])
    torch.testing.assert_close(table(torch.arange(3)), factor * before[1])


def test_a_second_aligner_is_refused() -> None:
    model, _, _ = tiny_vlm("llava")
    attached(model)
    with pytest.raises(ValueError, match="attached aligner already"):
        attach_aligner(model, "token_rms")


def test_our_own_model_takes_one_only_where_it_has_none(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="LayerNormAligner"):
        attach_aligner(tiny.model())
    model = attached(tiny.model({"aligner": "none"}))
    assert type(model.get_submodule("model.multi_modal_projector.aligner_norm")).__name__ == "LayerNormAligner"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"aligner": "layer_norm"}, "layer_norm"),
        ({"aligner": "token_rms", "gwc": True}, "gwc"),
        ({"multiple": 0.0}, "multiple is 0"),
        ({"text_norm": float("nan")}, "text_norm is nan"),
    ],
)
def test_settings_that_cannot_be_are_refused_and_leave_the_model_alone(settings: dict[str, Any], words: str) -> None:
    model, _, _ = tiny_vlm("llava")
    kind, names = type(model), set(model.state_dict())
    with pytest.raises(ValueError, match=words):
        attach_aligner(model, **settings)
    assert type(model) is kind and set(model.state_dict()) == names


def test_an_offloaded_projector_is_refused_in_words() -> None:
    model = tiny_vlm("llava")[0]
    model.model.multi_modal_projector.to("meta")
    with pytest.raises(ValueError, match="offloaded; load the model without a device_map"):
        attach_aligner(model)


def test_a_wrapped_model_is_refused_since_what_was_compiled_would_not_see_the_aligner() -> None:
    model = torch.nn.DataParallel(tiny_vlm("llava")[0])
    with pytest.raises(ValueError, match="attach first, then compile"):
        attach_aligner(model)


def test_a_model_without_an_aligner_cannot_be_detached() -> None:
    with pytest.raises(ValueError, match="no attached aligner"):
        detach_aligner(tiny_vlm("llava")[0])


def test_a_copy_of_an_attached_model_has_an_aligner_of_its_own() -> None:
    model, _, inputs = tiny_vlm("llava")
    twin = copy.deepcopy(attached(model))
    with torch.no_grad():
        twin.get_submodule(getattr(twin.config, RECORD)["projector"]).get_submodule(NAME).weight.mul_(3)
    assert at_merge(twin, inputs).mean() == pytest.approx(3 * at_merge(model, inputs).mean().item(), rel=1e-5)
    detach_aligner(twin)
    assert at_merge(model, inputs).mean().item() == pytest.approx(getattr(model.config, RECORD)["text_norm"], rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gain_is_float32_whatever_the_models_type(dtype: torch.dtype, tmp_path: Path) -> None:
    model, _, inputs = tiny_vlm("llava")
    attached(model.to(dtype))
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    assert model.get_parameter("model.multi_modal_projector.aligner_norm.weight").dtype == torch.float32
    assert at_merge(model, inputs).mean().item() == pytest.approx(getattr(model.config, RECORD)["text_norm"], rel=0.01)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=dtype)
    assert again.get_parameter("model.multi_modal_projector.aligner_norm.weight").dtype == torch.float32
    assert again.lm_head.weight.dtype == dtype
