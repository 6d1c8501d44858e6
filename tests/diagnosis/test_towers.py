"""`normalign encoder-norm`: towers of every kind, from their own folder and from a whole model's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModel
from typer.testing import CliRunner

from normalign.cli import app
from normalign.diagnosis.encoder_table import measure_tower
from normalign.diagnosis.pictures import Pictures
from normalign.diagnosis.towers import load_tower

from ..anatomy.tiny import PATCH, VISION, picture, tiny_vlm

SIGLIP = transformers.SiglipImageProcessor(size={"height": 56, "width": 56})
CLIP = transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
SIGLIP2 = transformers.Siglip2ImageProcessor(patch_size=PATCH, max_num_patches=20)
MOONVIT = transformers.Kimi_K25ImageProcessor(size={"max_height": 56, "max_width": 56}, patch_size=PATCH)
# family: (configuration, image processor, name of the final norm, CLS tokens, registers)
TOWERS: dict[str, tuple[dict[str, Any], Any, str, int, int]] = {
    "clip_vision_model": ({"image_size": 56}, CLIP, "post_layernorm", 1, 0),
    "siglip_vision_model": ({"image_size": 56}, SIGLIP, "post_layernorm", 0, 0),
    "siglip2_vision_model": ({"num_patches": 16}, SIGLIP2, "post_layernorm", 0, 0),
    "dinov2": ({"image_size": 56}, CLIP, "layernorm", 1, 0),
    "dinov2_with_registers": ({"image_size": 56, "num_register_tokens": 3}, CLIP, "layernorm", 1, 3),
    "dinov3_vit": ({"image_size": 56, "num_register_tokens": 2}, SIGLIP, "norm", 1, 2),
    "kimi_k25_vision": ({"pos_emb_height": 8, "pos_emb_width": 8}, MOONVIT, "final_layernorm", 0, 0),
}


def save_tower(family: str, folder: Path, seed: int = 1) -> Any:
    """A tiny random tower with its image processor."""
    fields, images, *_ = TOWERS[family]
    torch.manual_seed(seed)
    model = AutoModel.from_config(CONFIG_MAPPING[family](**(VISION | fields)), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.std() < 0.1:
            torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    model.save_pretrained(folder)
    images.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images of several shapes, one of them below a folder."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "more").mkdir()
    for name, size in {"a.png": (64, 48), "b.png": (40, 90), "more/c.png": (56, 56)}.items():
        picture(*size).save(folder / name)
    return folder


def expected_states(family: str, model: Any, image: Image.Image) -> tuple[list[Tensor], Tensor]:
    """Hidden states (tokens, E) of the model's own output and the last behind its final norm, without padding."""
    inputs = dict(TOWERS[family][1](images=[image], return_tensors="pt"))
    inputs = {name.removeprefix("image_"): value for name, value in inputs.items()}
    with torch.no_grad():
        states = list(model(**inputs, output_hidden_states=True).hidden_states)
        caught: list[Tensor] = []
        last_block = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3)[-1]
        handle = last_block.register_forward_hook(lambda _m, _i, output: caught.append(output))
        model(**inputs)
        handle.remove()
        states[-1] = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
        after = model.get_submodule(TOWERS[family][2])(states[-1])
    kept = inputs["pixel_attention_mask"][0].bool() if "pixel_attention_mask" in inputs else slice(None)
    width = after.shape[-1]
    return [state.reshape(-1, width)[kept] for state in states], after.reshape(-1, width)[kept]


@pytest.mark.parametrize("family", TOWERS)
def test_each_kind_of_token_by_itself_per_layer_and_behind_the_final_norm(
    family: str, tmp_path: Path, photos: Path
) -> None:
    model = save_tower(family, tmp_path / family)
    result = measure_tower(load_tower(tmp_path / family), Pictures(photos))
    each = [expected_states(family, model, Image.open(photos / name)) for name in ("a.png", "b.png", "more/c.png")]
    *_, cls, registers = TOWERS[family]
    assert result["images"] == 3 and result["skipped"] == {} and len(result["layers"]) == 4
    measured = [*result["layers"], result["after_final_norm"]]
    for layer in range(5):
        norms = [(states[layer] if layer < 4 else after).double().norm(dim=-1) for states, after in each]
        patches = torch.cat([n[cls + registers :] for n in norms])
        assert measured[layer]["patches"]["mean"] == pytest.approx(patches.mean().item(), rel=1e-5)
        assert measured[layer]["patches"]["tokens"] == len(patches)
        for kind, wanted in (("cls", slice(0, cls)), ("registers", slice(cls, cls + registers))):
            leading = torch.cat([n[wanted] for n in norms])
            if len(leading):
                assert measured[layer][kind]["mean"] == pytest.approx(leading.mean().item(), rel=1e-5)
                assert measured[layer][kind]["tokens"] == len(leading)
            else:
                assert measured[layer][kind] is None


@pytest.mark.parametrize("family", ["siglip_vision_model", "dinov2_with_registers", "siglip2_vision_model"])
def test_a_planted_sink_is_counted_at_its_place(family: str, tmp_path: Path, photos: Path) -> None:
    """The second block multiplies the patch at row 2, column 1 by 50."""
    save_tower(family, tmp_path / family)
    tower = load_tower(tmp_path / family)
    blocks = next(m for m in tower.module.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3)
    leading = sum(TOWERS[family][3:])

    def plant(_module: Any, _inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        columns = 4 if family != "siglip2_vision_model" else 5
        hidden[:, leading + 2 * columns + 1] *= 50
        return output

    one = photos / "more"
    if family == "siglip2_vision_model":
        one = tmp_path / "one"
        one.mkdir()
        picture(5 * PATCH, 4 * PATCH).save(one / "five_by_four.png")
    blocks[1].register_forward_hook(plant)
    layers = measure_tower(tower, Pictures(one))["layers"]
    sinks = layers[2]["patches"]["sinks"]
    assert sinks["places"][0] == {"row": 2, "column": 1, "count": 1}
    assert sinks["mean_norm"] > 10 * layers[2]["patches"]["mean_without_sinks"]


def test_the_tower_of_a_pair_of_encoders_and_of_a_whole_model_give_what_the_tower_alone_gives(
    tmp_path: Path, photos: Path
) -> None:
    tower = save_tower("clip_vision_model", tmp_path / "tower")
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    pair = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=tower.config.to_dict(), projection_dim=8)
    )
    pair.vision_model.load_state_dict(tower.state_dict())
    pair.save_pretrained(tmp_path / "pair")
    model, processor, _ = tiny_vlm("llava")
    model.model.vision_tower = tower
    model.config.vision_config = tower.config
    model.save_pretrained(tmp_path / "whole")
    processor.image_processor = CLIP
    processor.save_pretrained(tmp_path / "whole")
    CLIP.save_pretrained(tmp_path / "pair")
    results = [measure_tower(load_tower(tmp_path / name), Pictures(photos)) for name in ("tower", "pair", "whole")]
    assert results[0]["layers"] == results[1]["layers"] == results[2]["layers"]
    assert results[0]["after_final_norm"] == results[1]["after_final_norm"]
    assert results[1]["family"] == "clip"


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen3_vl", "kimi_k25", "gemma3", "ovis2", "molmo2", "idefics3", "llava_next"]
)
def test_the_tower_of_any_model_is_measured_before_its_merger(family: str, tmp_path: Path, photos: Path) -> None:
    model, processor, _ = tiny_vlm(family)
    model.save_pretrained(tmp_path / family)
    processor.save_pretrained(tmp_path / family)
    result = measure_tower(load_tower(tmp_path / family), Pictures(photos))
    assert result["images"] == 3 and len(result["layers"]) == 4
    assert result["layers"][3]["patches"]["mean"] > 0
    merged = family in ("qwen2_vl", "qwen3_vl")  # their patches come in blocks, not in rows
    assert (result["layers"][3]["patches"]["sinks"]["places"] is None) == merged
    assert (result["after_final_norm"] is None) == (family in ("qwen2_vl", "qwen3_vl", "molmo2"))


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["encoder-norm", *map(str, arguments)])


def test_the_command_prints_one_json_object_and_bad_files_are_counted(tmp_path: Path, photos: Path) -> None:
    save_tower("dinov2", tmp_path / "dino")
    folder = tmp_path / "images"
    folder.mkdir()
    picture(30, 40).save(folder / "good.png")
    (folder / "empty.png").write_bytes(b"")
    (folder / "notes.txt").write_text("no image")
    result = run(tmp_path / "dino", "--images", folder, "--json")
    assert result.exit_code == 0, result.output
    (encoder,) = json.loads(result.stdout)["encoders"]
    assert encoder["model"] == "dino" and encoder["images"] == 1
    assert encoder["skipped"] == {"image_empty": 1, "image_undecodable": 1}


def test_an_encoder_that_fails_loses_no_other(tmp_path: Path, photos: Path) -> None:
    save_tower("dinov2", tmp_path / "dino")
    (tmp_path / "nothing").mkdir()
    result = run(tmp_path / "nothing", tmp_path / "dino", "--images", photos)
    assert result.exit_code == 1
    assert "config.json is missing" in result.stdout and "dinov2" in result.stdout


@pytest.mark.parametrize("case", ["path", "text", "images", "weights", "truncated", "blank"])
def test_what_cannot_be_measured_is_told_in_words(case: str, tmp_path: Path, photos: Path) -> None:
    folder, images = tmp_path / "model", photos
    if case == "text":
        config = transformers.LlamaConfig(vocab_size=9, hidden_size=64, intermediate_size=8, num_hidden_layers=1)
        AutoModel.from_config(config).save_pretrained(folder)
    elif case != "path":
        save_tower("dinov2", folder)
    if case == "images":
        images = tmp_path / "none"
        images.mkdir()
    if case == "blank":
        images = tmp_path / "none"
        images.mkdir()
        (images / "x.png").write_bytes(b"")
    weights = folder / "model.safetensors"
    if case == "weights":
        weights.unlink()
    if case == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    result = run(folder, "--images", images)
    words = {
        "path": "is not a folder",
        "text": "comes with no image processor",
        "images": "the folder is empty",
        "weights": "the model cannot be loaded",
        "truncated": "the model cannot be loaded",
        "blank": "none of its 1 files is a usable image (image_empty: 1)",
    }
    assert result.exit_code == 1
    assert words[case] in " ".join((result.stdout + result.stderr).split())


@pytest.mark.parametrize("family", ["clip_vision_model", "dinov2", "siglip_vision_model"])
def test_an_image_twenty_thousand_pixels_wide_is_measured(family: str, tmp_path: Path) -> None:
    save_tower(family, tmp_path / family)
    (tmp_path / "images").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (12, 20_000, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "images" / "wide.png")
    assert measure_tower(load_tower(tmp_path / family), Pictures(tmp_path / "images"))["images"] == 1


def test_narrowing_an_image_before_the_centre_crop_changes_no_pixel_of_the_crop(tmp_path: Path) -> None:
    tower_folder = tmp_path / "clip"
    save_tower("clip_vision_model", tower_folder)
    tower = load_tower(tower_folder)
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (20, 2000, 3), dtype=np.uint8))
    whole = CLIP(images=[image], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(tower.inputs(image)["pixel_values"], whole, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    "config",
    [
        transformers.SwinConfig(image_size=56, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=7),
        transformers.DINOv3ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], image_size=56),
    ],
)
def test_a_tower_that_merges_its_tokens_on_the_way_is_refused(config: Any, tmp_path: Path, photos: Path) -> None:
    AutoModel.from_config(config).save_pretrained(tmp_path)
    SIGLIP.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its tokens cannot be followed"):
        measure_tower(load_tower(tmp_path), Pictures(photos))
