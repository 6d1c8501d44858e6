"""The parts of a model of every family: each found part does what it is said to do in a forward pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from normalign.anatomy import Anatomy, UnknownStructureError, attention_of, find_anatomy, mlp_of, visual_mask

from .tiny import LAYERS, TEXT, VISION, WIDTH, Tiny, tiny_vlm

PROJECTORS = {
    "qwen2_vl": "model.visual.merger",
    "qwen2_5_vl": "model.visual.merger",
    "qwen3_vl": "model.visual.merger",
    "glm4v": "model.visual.merger",
    "glm46v": "model.visual.merger",
    "idefics3": "model.connector",
    "smolvlm": "model.connector",
    "kimi_k25": "model.mm_projector",
    "ovis2": "model.visual_embeddings_table",
}


def first(output: Any) -> Tensor:
    """The tensor in a module's output."""
    return output if isinstance(output, Tensor) else output[0]


class Watch:
    """One forward pass with the outputs of some modules and the inputs of others kept."""

    def __init__(self, model: Any, inputs: dict[str, Any], outputs: list[nn.Module], entries: list[nn.Module]) -> None:
        self.made: dict[nn.Module, Tensor] = {}
        self.given: dict[nn.Module, Tensor] = {}
        handles = [module.register_forward_hook(self._output) for module in outputs]
        handles += [module.register_forward_pre_hook(self._input, with_kwargs=True) for module in entries]
        with torch.no_grad():
            model(**inputs)
        for handle in handles:
            handle.remove()

    def _output(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        self.made.setdefault(module, first(output).detach().double())

    def _input(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.given[module] = (inputs[0] if inputs else keywords["hidden_states"]).detach().double()


@pytest.fixture(scope="session")
def anatomy(vlm: Tiny) -> Anatomy:
    return find_anatomy(vlm[0])


def test_every_part_is_found_at_its_place(family: str, vlm: Tiny, anatomy: Anatomy) -> None:
    assert anatomy.projector_path == PROJECTORS.get(family, "model.multi_modal_projector")
    assert anatomy.core is vlm[0].model and anatomy.family == family
    assert anatomy.embedding is vlm[0].get_input_embeddings() and anatomy.width == WIDTH
    assert len(anatomy.layers) == len(anatomy.tower_layers) == LAYERS
    assert anatomy.injected_layers == ((0, 1) if family == "qwen3_vl" else ())
    assert anatomy.visual_vocabulary == (family == "ovis2")
    for path, part in (
        (anatomy.tower_path, anatomy.tower),
        (anatomy.projector_path, anatomy.projector),
        (anatomy.language_path, anatomy.language),
    ):
        assert vlm[0].get_submodule(path) is part


def test_the_rows_at_the_visual_positions_are_the_projectors_rows(family: str, vlm: Tiny, anatomy: Anatomy) -> None:
    """Up to their order, the embedding of a line's end (LLaVA-NeXT) and that of the placeholder (Molmo2 adds it)."""
    model, _, inputs = vlm
    watch = Watch(model, inputs, [anatomy.projector], [anatomy.layers[0]])
    mask_BL = visual_mask(anatomy, inputs["input_ids"])
    merged_ND = watch.given[anatomy.layers[0]][mask_BL]
    made_ND = watch.made[anatomy.projector].flatten(0, -2)
    if family == "molmo2":
        merged_ND = merged_ND - anatomy.embedding.weight[anatomy.image_token_id].detach().double()
    if family in ("llava_next", "llava_onevision"):
        made_ND = torch.cat([made_ND, anatomy.core.image_newline.detach().double()[None]])  # type: ignore[operator]
    assert len(merged_ND) >= 4
    distance_NM = (merged_ND[:, None] - made_ND).norm(dim=-1)
    assert distance_NM.min(1).values.max() < 1e-5 * made_ND.norm(dim=-1).mean()


def test_text_rows_are_the_embedding_times_its_scale(family: str, vlm: Tiny, anatomy: Anatomy) -> None:
    model, _, inputs = vlm
    watch = Watch(model, inputs, [], [anatomy.layers[0]])
    special = set(model.config.visual_indicator_token_ids) if family == "ovis2" else set()
    ids_L = inputs["input_ids"][0]
    text_L = torch.tensor([int(i) != anatomy.image_token_id and int(i) not in special for i in ids_L])
    expected = anatomy.embedding.weight[ids_L[text_L]].detach().double() * anatomy.embedding_scale
    torch.testing.assert_close(watch.given[anatomy.layers[0]][0][text_L], expected, rtol=1e-5, atol=1e-6)
    gemma = family in ("gemma3", "paligemma")
    assert anatomy.embedding_scale == pytest.approx(WIDTH**0.5 if gemma else 1.0, rel=1e-6)


def test_a_layer_adds_its_attention_and_its_mlp_to_the_stream_and_nothing_else(vlm: Tiny, anatomy: Anatomy) -> None:
    writers = [(attention_of(layer), mlp_of(layer)) for layer in anatomy.layers]
    outputs = [*anatomy.layers, *(module for pair in writers for module in pair)]
    watch = Watch(vlm[0], vlm[2], outputs, list(anatomy.layers))
    for layer, (attention, mlp) in zip(anatomy.layers, writers, strict=True):
        update = watch.made[layer] - watch.given[layer]
        assert attention is not mlp and watch.made[attention].abs().sum() > 0
        written = watch.made[attention] + watch.made[mlp].reshape(update.shape)
        torch.testing.assert_close(written, update, rtol=1e-4, atol=1e-5)


def test_options_replace_what_would_be_found() -> None:
    model = tiny_vlm("llava")[0]
    found = find_anatomy(
        model,
        projector="model.multi_modal_projector.linear_1",
        tower="model.vision_tower",
        language="model.language_model",
        image_token_id=5,
    )
    assert found.projector is model.model.multi_modal_projector.linear_1
    assert visual_mask(found, torch.tensor([[4, 5, 5]])).tolist() == [[False, True, True]]


@pytest.mark.parametrize("option", ["projector", "tower", "language"])
def test_a_path_that_is_not_there_is_named_with_its_option_and_what_is(option: str) -> None:
    with pytest.raises(UnknownStructureError, match=f"--{option} model.nowhere.*multi_modal_projector"):
        find_anatomy(tiny_vlm("llava")[0], **{option: "model.nowhere"})  # type: ignore[arg-type]


def test_a_text_only_model_is_told_apart() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(UnknownStructureError, match=r"text-only.*normalign text-norm.*--tower PATH"):
        find_anatomy(AutoModelForCausalLM.from_config(config))


def test_a_model_without_a_projector_says_which_option_supplies_it() -> None:
    model = tiny_vlm("llava")[0]
    model.model.multi_modal_projector = nn.Identity()
    with pytest.raises(UnknownStructureError, match="--projector PATH"):
        find_anatomy(model)


def test_a_configuration_without_an_image_placeholder_says_which_option_supplies_it() -> None:
    model = tiny_vlm("llava")[0]
    model.config = model.config.text_config
    with pytest.raises(UnknownStructureError, match="--image-token-id ID"):
        find_anatomy(model)
    assert find_anatomy(model, image_token_id=3).image_token_id == 3


def test_a_compiled_model_is_taken_out_of_its_wrapper() -> None:
    model: Any = tiny_vlm("llava")[0]
    compiled: Any = torch.compile(model, backend="eager")
    found = find_anatomy(compiled)
    assert found.model is compiled._orig_mod and found.projector is model.model.multi_modal_projector


@pytest.mark.parametrize("wrapped", ["language_model", "vision_tower", "multi_modal_projector"])
def test_a_compiled_part_is_found_as_well(wrapped: str) -> None:
    model = tiny_vlm("llava")[0]
    part = getattr(model.model, wrapped)
    setattr(model.model, wrapped, torch.compile(part, backend="eager"))
    found = find_anatomy(model)
    assert len(found.layers) == len(found.tower_layers) == LAYERS
    assert part in {found.language, found.tower, found.projector}


def test_offloaded_weights_are_read_where_they_are(tmp_path: Path) -> None:
    from accelerate import disk_offload

    model, _, inputs = tiny_vlm("gemma3")
    with torch.no_grad():
        expected = model(**inputs).logits
    disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    found = find_anatomy(model)
    assert found.embedding.weight.is_meta and found.embedding_scale == pytest.approx(WIDTH**0.5, rel=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, expected)


class Int8Linear(nn.Module):
    """A linear map whose weights are stored as int8 and a scale per row, in buffers as quantised models have them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        weight = self.get_buffer("weight").float() * self.get_buffer("scale")
        return nn.functional.linear(x, weight, self.bias)  # type: ignore[arg-type]  # a buffer, or none


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_a_quantised_model_has_the_same_parts(name: str) -> None:
    model, _, inputs = tiny_vlm(name)
    expected = find_anatomy(model)
    writers = [(type(attention_of(layer)), type(mlp_of(layer))) for layer in expected.layers]
    for module in list(model.modules()):
        for child, linear in list(module.named_children()):
            if type(linear) is nn.Linear:
                setattr(module, child, Int8Linear(linear))
    found = find_anatomy(model)
    assert (found.tower_path, found.projector_path) == (expected.tower_path, expected.projector_path)
    assert [(type(attention_of(layer)), type(mlp_of(layer))) for layer in found.layers] == writers
    assert torch.isfinite(model(**inputs).logits).all()


PIXTRAL = {"model_type": "pixtral", "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "mistral3": ({"model_type": "mistral"}, PIXTRAL | {"num_attention_heads": 2}, "model.multi_modal_projector"),
    "vipllava": ({"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}, "model.multi_modal_projector"),
    "idefics2": ({"model_type": "mistral"}, VISION, "model.connector"),
    "deepseek_vl": ({"model_type": "llama"}, VISION | {"model_type": "siglip_vision_model"}, "model.aligner"),
    "lfm2_vl": ({"model_type": "lfm2"}, VISION | {"model_type": "siglip2_vision_model"}, "model.multi_modal_projector"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_families_that_no_one_thought_of_are_found_by_the_same_rules(name: str) -> None:
    text, vision, projector = OTHERS[name]
    kind: Any = CONFIG_MAPPING[name]
    fields = {"projector_hidden_size": 32} if name == "lfm2_vl" else {}
    config = kind(text_config=TEXT | text | {"vocab_size": 300}, vision_config=vision, **fields)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForImageTextToText.from_config(config)
    found = find_anatomy(model, image_token_id=9)
    assert found.projector_path == projector and len(found.tower_layers) == LAYERS == len(found.layers)
    assert found.embedding_scale == 1.0 and found.injected_layers == ()
    assert all(attention_of(layer) is not mlp_of(layer) for layer in found.layers)


def test_a_decoder_that_looks_at_images_by_cross_attention_is_told_apart() -> None:
    model = tiny_vlm("llava")[0]
    model.config.text_config.cross_attention_layers = [1]
    with pytest.raises(UnknownStructureError, match="cross-attention"):
        find_anatomy(model)


class FlatConfig(PreTrainedConfig):
    model_type = "flat_vlm"
    media_placeholder_token_id: int = 7
    vision_config: Any = None
    text_config: Any = None


class Flat(PreTrainedModel):
    """Laid out as Kimi-VL's own code is: a causal language model inside, no core, features made within forward."""

    config_class = FlatConfig

    def __init__(self, config: FlatConfig) -> None:
        super().__init__(config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, WIDTH))
        self.language_model = AutoModelForCausalLM.from_config(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def image_rows(self, pixel_values: Tensor) -> Tensor:
        return self.multi_modal_projector(self.vision_tower(pixel_values).last_hidden_state)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:
        embeds = self.get_input_embeddings()(input_ids)
        mask = (input_ids == self.config.media_placeholder_token_id).unsqueeze(-1)
        embeds = embeds.masked_scatter(mask, self.image_rows(pixel_values))
        return self.language_model(inputs_embeds=embeds)


def test_a_model_without_a_core_of_its_own_is_found_as_well() -> None:
    config, kinds = FlatConfig(), dict[str, Any](CONFIG_MAPPING)
    config.vision_config = kinds["siglip_vision_model"](**VISION, vision_use_head=False)
    config.text_config = kinds["llama"](**TEXT, vocab_size=300)
    with torch.random.fork_rng(devices=[]):
        model = Flat(config).eval()
    found = find_anatomy(model)
    assert found.core is model and found.language_path == "language_model.model"
    assert found.tower_path == "vision_tower" and found.projector_path == "multi_modal_projector"
    assert found.image_token_id == 7
    inputs = {"input_ids": torch.tensor([[1, 7, 7, 7, 7, 5]]), "pixel_values": torch.randn(1, 3, 28, 28)}
    watch = Watch(model, inputs, [found.projector], [found.layers[0]])
    merged = watch.given[found.layers[0]][visual_mask(found, inputs["input_ids"])]
    torch.testing.assert_close(merged, watch.made[found.projector][0])


@pytest.mark.parametrize(
    ("text", "expected"), [({"model_type": "granite", "embedding_multiplier": 12.0}, 12.0), ({}, 1.0)]
)
def test_the_embedding_scale_is_measured_whatever_the_decoder_calls_it(text: dict[str, Any], expected: float) -> None:
    config: Any = tiny_vlm("llava")[0].config
    config.text_config = CONFIG_MAPPING[text.get("model_type", "llama")](**{**TEXT, "vocab_size": 300, **text})
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForImageTextToText.from_config(config)
    assert find_anatomy(model).embedding_scale == pytest.approx(expected, rel=1e-6)


def test_a_visual_table_with_more_rows_is_not_taken_for_the_input_embedding() -> None:
    config: Any = tiny_vlm("ovis2")[0].config
    config.vision_config.vocab_size = 3 * config.vocab_size
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForImageTextToText.from_config(config)
    found = find_anatomy(model)
    assert found.embedding is model.get_input_embeddings()
    assert found.projector is model.model.visual_embeddings_table


def test_looking_leaves_no_hook_and_no_changed_weight_behind() -> None:
    model = tiny_vlm("gemma3")[0]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    find_anatomy(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
