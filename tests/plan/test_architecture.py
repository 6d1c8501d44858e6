"""Counts of parameters, against the modules that transformers builds."""

from pathlib import Path
from typing import Any

import pytest

from normalign.plan.architecture import language_model, projector_parameters, vision_tower
from normalign.plan.parts import counts
from normalign.plan.sources import models, published
from normalign.settings import ModelSettings
from normalign.training.optim import TrainableTable

from ..conftest import Tiny
from .conftest import LANGUAGE, ROOT, STAGE1, STAGE2, VISION, options, profile_at

DINO = {**VISION, "model_type": "dinov2", "mlp_ratio": 3, "intermediate_size": None}
TOWERS: dict[str, dict[str, Any]] = {
    "siglip": VISION,
    "siglip without head": {**VISION, "vision_use_head": False},
    "clip": {**VISION, "model_type": "clip_vision_model"},
    "dinov2": DINO,
    "dinov2 without mask token": {**DINO, "use_mask_token": False},
    "dinov2 without query bias": {**DINO, "qkv_bias": False},
    "other image and patch sizes": {**VISION, "image_size": 70, "patch_size": 16, "num_channels": 1},
    "published siglip": published()["vision"]["hub:google/siglip-so400m-patch14-384"],
}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": LANGUAGE,
    "llama, untied": {**LANGUAGE, "tie_word_embeddings": False},
    "llama with biases": {**LANGUAGE, "attention_bias": True, "mlp_bias": True},
    "llama with wide heads": {**LANGUAGE, "head_dim": 24},
    "llama without grouped keys": {**LANGUAGE, "num_key_value_heads": 4},
    "qwen2": {**LANGUAGE, "model_type": "qwen2"},
    "qwen2, untied": {**LANGUAGE, "model_type": "qwen2", "tie_word_embeddings": False},
    "published llama": published()["language"]["hub:meta-llama/Llama-3.2-3B-Instruct"],
    "published qwen": published()["language"]["hub:Qwen/Qwen2.5-7B-Instruct"],
}


def build(config: dict[str, Any], auto_class: str) -> Any:
    """The module that transformers makes of ``config``, without memory for its weights."""
    import torch
    import transformers

    fields = {name: value for name, value in config.items() if value is not None and name != "tokens"}
    with torch.device("meta"):
        return getattr(transformers, auto_class).from_config(
            transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        )


def size(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("config", TOWERS.values(), ids=TOWERS)
def test_a_vision_tower_has_the_parameters_of_the_module_on_the_meta_device(config: dict[str, Any]) -> None:
    assert vision_tower(config, "test").parameters == size(build(config, "AutoModel"))


@pytest.mark.parametrize("config", DECODERS.values(), ids=DECODERS)
def test_a_language_model_has_the_parameters_of_the_module_on_the_meta_device(config: dict[str, Any]) -> None:
    built = build(config, "AutoModelForCausalLM")
    shape = language_model(config, "test", tokens=0)
    assert shape.parameters == size(built)
    assert shape.layer == size(built.model.layers[0])
    assert shape.layer_class == type(built.model.layers[0]).__name__


@pytest.mark.parametrize(("source", "parameters"), [("Llama-3.2-3B", 3_212_749_824), ("Qwen2.5-7B", 7_615_616_512)])
def test_the_published_dimensions_give_the_published_sizes(source: str, parameters: int) -> None:
    (config,) = (config for name, config in published()["language"].items() if source in name)
    assert language_model(config, source, tokens=0).parameters == parameters


@pytest.mark.parametrize("rates", [STAGE1, STAGE2], ids=["stage 1", "stage 2"])
@pytest.mark.parametrize(("layer", "norm"), [(-1, True), (-2, False), (1, True)])
@pytest.mark.parametrize("tower", ["siglip_vision_model", "clip_vision_model", "dinov2", "untied"])
def test_every_module_of_the_real_model_counts_and_trains_as_estimated(
    tiny: Tiny, tower: str, layer: int, norm: bool, rates: dict[str, float]
) -> None:
    import json

    profile = profile_at("ci")
    model = tiny.model(tower=tower, feature_layer=layer, feature_norm=norm)
    table = TrainableTable(model, options(profile, rates))
    folder = tiny.folders[tower]
    vision, language = (json.loads((folder / part / "config.json").read_text()) for part in ("vision", "language"))
    estimated = counts(
        vision_tower(vision, tower),
        language_model(language, tower, tokens=260),
        ModelSettings(28, layer, norm, 512, None),
        options(profile, rates),
    )
    left_out = sum(p.numel() for p in table.unused.values())
    for part, row in zip(estimated, table.rows, strict=True):
        unused = left_out if row.module == "vision" else 0
        assert part.module == row.module
        assert part.parameters == row.size + unused
        assert part.trained == (0 if row.learning_rate is None else row.size)


def test_an_aligner_without_gain_has_no_parameters() -> None:
    profile = profile_at("ci")
    shapes = vision_tower(VISION, "v"), language_model(LANGUAGE, "l", tokens=0)
    parts = {p.module: p for p in counts(*shapes, profile.model, profile.stage1, gain=False)}
    assert parts["aligner"].parameters == parts["aligner"].trained == 0
    assert parts["projector"].parameters == sum(projector_parameters(48, 64)) == 48 * 64 + 64 + 64 * 64 + 64


def test_real_smol_weights_have_the_parameters_that_the_published_dimensions_give(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile = profile_at("smol")
    weights = ROOT / profile.folder / "weights"
    if not weights.exists():
        pytest.skip("the weights of smol are not here")
    from normalign.weights.safetensors_file import read_headers

    monkeypatch.chdir(ROOT)
    vision, language, lines = models(profile)
    assert all("config.json" in line for line in lines)
    stored = {
        part: sum(_elements(tensor.shape) for tensor in read_headers(weights / part).values())
        for part in ("vision", "language")
    }
    assert vision.parameters == stored["vision"]
    added = 2 * language.width  # the placeholder and the pad token, which are not in the file
    assert language.parameters == stored["language"] + added
    monkeypatch.chdir(tmp_path)
    assert models(profile)[:2] == (vision, language)


def _elements(shape: Any) -> int:
    result = 1
    for extent in shape:
        result *= extent
    return result


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "patch_size", "intermediate_size"])
def test_a_missing_dimension_is_named_with_its_file(field: str) -> None:
    config = {name: value for name, value in VISION.items() if name != field}
    with pytest.raises(ValueError, match=rf"tower/config\.json: {field} is None"):
        vision_tower(config, "tower/config.json")


def test_an_unknown_model_type_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="no estimate for model_type 'mamba'; known: llama, qwen2"):
        language_model({"model_type": "mamba"}, "config.json", None)


def test_the_vision_part_of_an_image_text_pair_is_taken() -> None:
    assert vision_tower({"model_type": "siglip", "vision_config": VISION}, "pair") == vision_tower(VISION, "tower")


def test_a_side_that_is_no_multiple_of_the_patch_leaves_its_rest_unseen() -> None:
    tower = vision_tower(published()["vision"]["hub:google/siglip-so400m-patch14-384"], "test")
    assert tower.patches(384) == 27 * 27
