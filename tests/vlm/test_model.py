"""Vision features, the merge of visual tokens into text, and building from two folders."""

from typing import Any

import pytest
import torch

from normalign.vlm.build import IMAGE_TOKEN
from normalign.vlm.model import module_of

from ..conftest import TOWERS, Tiny
from .helpers import picture


def pixels(size: int = 28) -> torch.Tensor:
    """Two images of noise."""
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize(("image_size", "grid"), [(28, 2), (56, 4)])
def test_fault_5_one_visual_token_per_patch_whatever_else_the_tower_emits(
    tiny: Tiny, tower: str, image_size: int, grid: int
) -> None:
    model = tiny.model(tower=tower, image_size=image_size)
    features = model.model.encode(pixels(image_size))
    assert features.shape == (2, grid**2, 16) and model.config.image_seq_length == grid**2
    assert model.model.project(features).shape == (2, grid**2, 32)
    batch: Any = tiny.processor(tower, image_size).image_processor([picture("a", 40)], return_tensors="pt")
    assert batch["pixel_values"].shape == (1, 3, image_size, image_size)


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("layer", [1, 2, -2, -3])
def test_features_are_the_towers_own_hidden_state_without_leading_tokens(tiny: Tiny, tower: str, layer: int) -> None:
    model = tiny.model(tower=tower, feature_layer=layer, feature_norm=False)
    states = model.model.vision_tower(pixels(), output_hidden_states=True).hidden_states
    assert len(states) == 4
    assert torch.equal(model.model.encode(pixels()), states[layer][:, -4:])


@pytest.mark.parametrize("tower", TOWERS)
def test_fault_13_the_last_layer_is_before_the_final_norm_unless_feature_norm_is_set(tiny: Tiny, tower: str) -> None:
    raw = tiny.model(tower=tower, feature_layer=-1, feature_norm=False)
    caught: list[torch.Tensor] = []
    last: Any = raw.model.vision_tower.get_submodule("encoder.layer.2" if tower == "dinov2" else "encoder.layers.2")
    last.register_forward_hook(lambda _m, _i, out: caught.append(out[0] if isinstance(out, tuple) else out))
    assert torch.equal(raw.model.encode(pixels()), caught[0][:, -4:])
    normed = tiny.model(tower=tower, feature_layer=-1, feature_norm=True).model.encode(pixels())
    expected = torch.nn.functional.layer_norm(
        caught[0][:, -4:], (16,), eps=raw.model.vision_tower.config.layer_norm_eps
    )
    torch.testing.assert_close(normed, expected, rtol=1e-5, atol=1e-5)  # random weights: gain 1, bias 0


@pytest.mark.parametrize("layer", [0, 4, -4])
def test_a_feature_layer_that_the_tower_lacks_is_refused(tiny: Tiny, layer: int) -> None:
    with pytest.raises(ValueError, match=f"model.feature_layer is {layer}; the tower has layers 1 to 3"):
        tiny.model(feature_layer=layer).model.encode(pixels())


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("image_size", [28, 34, 45])
def test_what_is_left_over_at_the_edge_of_an_image_makes_no_token(tiny: Tiny, tower: str, image_size: int) -> None:
    """SigLIP's 384 pixels are 27 patches of 14 and 6 pixels more."""
    model = tiny.model(tower=tower, image_size=image_size)
    grid = image_size // 14
    assert model.config.image_seq_length == grid**2
    with torch.no_grad():
        assert model.model.encode(torch.rand(1, 3, image_size, image_size)).shape[1] == grid**2
    assert model.model.unused_vision_parameters() == tiny.model(tower=tower).model.unused_vision_parameters()


def test_an_image_smaller_than_a_patch_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="image_size is 13, smaller than the vision tower's patches of 14 pixels"):
        tiny.model(image_size=13)


def test_embed_puts_visual_tokens_in_order_where_the_placeholders_are(tiny: Tiny) -> None:
    model = tiny.model().model
    image = model.config.image_token_index
    ids = torch.tensor([[5, image, image, 6, 7], [image, 8, image, 9, 9]])
    visual = torch.arange(4.0).reshape(2, 2, 1).expand(2, 2, 32)
    out = model.embed(ids, visual)
    assert out[ids == image][:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert torch.equal(out[ids != image], model.get_input_embeddings()(ids[ids != image]))


@pytest.mark.parametrize("available", [0, 3])
def test_fault_4_a_placeholder_count_that_differs_names_both_counts(tiny: Tiny, available: int) -> None:
    model = tiny.model().model
    ids = torch.tensor([[model.config.image_token_index, 5, model.config.image_token_index]])
    with pytest.raises(ValueError, match=f"2 image placeholders in the text, {available} visual tokens"):
        model.embed(ids, torch.zeros(1, available, 32) if available else None)


def test_the_projector_depends_on_the_seed_alone_so_that_all_variants_start_alike(tiny: Tiny) -> None:
    def linear(**more: Any) -> torch.Tensor:
        return tiny.model(**more).model.multi_modal_projector.linear_1.weight

    torch.manual_seed(1)
    first = linear(aligner={"aligner": "none"})
    torch.manual_seed(2)
    assert torch.equal(first, linear(aligner={"aligner": "layernorm"}))
    assert not torch.equal(first, linear(seed=4))


def test_building_keeps_the_weights_of_both_folders_and_adds_zero_rows(tiny: Tiny) -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    folder = tiny.folders["siglip_vision_model"]
    model = tiny.model()
    for ours, path, kind in (
        (model.model.vision_tower, "vision", AutoModel),
        (model.model.language_model, "language", AutoModelForCausalLM),
    ):
        original = kind.from_pretrained(folder / path)
        original = original.model if path == "language" else original
        states = ours.state_dict()
        for name, value in original.state_dict().items():
            assert torch.equal(states[name][: len(value)] if value.ndim else states[name], value), name
    embedding: Any = model.get_input_embeddings().weight
    added = tiny.processor().tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    assert torch.equal(embedding[added], torch.zeros(32)) and added == len(embedding) - 1
    assert model.lm_head.weight is embedding


def test_every_parameter_belongs_to_one_module(tiny: Tiny) -> None:
    names = [name for name, _ in tiny.model(tower="untied").named_parameters()]
    assert {module_of(name) for name in names} == {"vision", "projector", "aligner", "language"}
    assert {n.rsplit(".", 1)[-1] for n in names if module_of(n) == "aligner"} == {"weight", "bias"}
    assert module_of("lm_head.weight") == "language"
    with pytest.raises(ValueError, match="belongs to no known module"):
        module_of("model.other.weight")


@pytest.mark.parametrize(
    ("tower", "layer", "norm", "unused"),
    [
        ("dinov2", -1, True, {"embeddings.mask_token"}),
        ("clip_vision_model", -2, False, {"encoder.layers.2", "post_layernorm"}),
        ("siglip_vision_model", -1, True, {"head"}),
        ("siglip_vision_model", -2, False, {"encoder.layers.2", "post_layernorm", "head"}),
    ],
)
def test_unused_vision_parameters_are_those_behind_the_features(
    tiny: Tiny, tower: str, layer: int, norm: bool, unused: set[str]
) -> None:
    model = tiny.model(tower=tower, feature_layer=layer, feature_norm=norm).model
    names = [name for name, _ in model.vision_tower.named_parameters()]
    expected = {name for name in names if any(name.startswith(prefix) for prefix in unused)}
    before = [p.requires_grad for p in model.parameters()]
    assert expected and model.unused_vision_parameters() == expected
    assert [p.requires_grad for p in model.parameters()] == before
