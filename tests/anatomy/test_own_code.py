"""Models whose classes come with the checkpoint, from the folder to the figures."""

from pathlib import Path
from typing import Any

import pytest
import torch

from normalign.anatomy import find_anatomy, inputs_of, load_vlm, visual_mask
from normalign.diagnosis.encoder_table import measure_tower
from normalign.diagnosis.pictures import Pictures
from normalign.diagnosis.probe import ModelProbe
from normalign.diagnosis.towers import UNKNOWN, TowerCall, load_tower
from tests.anatomy.own_code import LAYERS, WIDTH, own_checkpoint
from tests.anatomy.tiny import PROMPT, picture

pytestmark = pytest.mark.usefixtures("modules_cache")


@pytest.fixture(scope="module", params=["tiles", "soft"])
def own(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, modules_cache: Path
) -> tuple[str, Path, Any]:
    """Which of the two, its folder, and the model that was made there."""
    folder = tmp_path_factory.mktemp("own") / request.param
    return request.param, folder, own_checkpoint(folder, request.param)


def test_its_parts_are_found_and_it_computes_what_its_code_computes_when_made(own: tuple[str, Path, Any]) -> None:
    kind, folder, made = own
    model, processor = load_vlm(folder, trust_remote_code=True)
    inputs = inputs_of(processor, picture(), PROMPT)
    with torch.no_grad():
        found, expected = (each(**inputs, use_cache=False).logits for each in (model, made))
    assert torch.equal(found, expected)  # also of what is in no file: buffers
    anatomy = find_anatomy(model)
    paths = (anatomy.tower_path, anatomy.projector_path, anatomy.language_path)
    assert (
        paths
        == {
            "tiles": ("vision_tower", "multi_modal_projector", "language_model"),
            "soft": ("visual_tokenizer.vit", "vte", "llm.model"),
        }[kind]
    )
    assert (anatomy.width, len(anatomy.layers), anatomy.visual_vocabulary) == (WIDTH, LAYERS, kind == "soft")
    assert anatomy.embedding_scale == (2.0 if kind == "tiles" else 1.0)
    assert visual_mask(anatomy, inputs["input_ids"]).sum() == len(inputs["pixel_values"]) // 4


def test_every_figure_is_measured(own: tuple[str, Path, Any]) -> None:
    kind, folder, _ = own
    model, processor = load_vlm(folder, trust_remote_code=True)
    probe = ModelProbe(find_anatomy(model))
    inputs = inputs_of(processor, picture(), PROMPT)
    probe.add(inputs)
    result = probe.result()
    patches = len(inputs["pixel_values"])
    interface = result["interface"]
    tokens = [interface[name]["tokens"] for name in ("vision_output", "projector_output", "visual_at_merge")]
    assert tokens == [patches, patches // 4, patches // 4]
    assert interface["projector_input"]["tokens"] == (patches if kind == "tiles" else patches // 4)
    assert result["attention"] is not None and "attention_reason" not in result
    assert all(value > 0 for value in result["layers"]["visual"]["relative_update_attention"])


def test_of_several_images_in_a_list_all_are_counted(tmp_path: Path) -> None:
    own_checkpoint(tmp_path / "tiles", "tiles")
    model, processor = load_vlm(tmp_path / "tiles", trust_remote_code=True)
    one, other = (inputs_of(processor, picture(width), PROMPT) for width in (40, 70))
    both = {name: torch.cat([one[name], other[name]]) for name in ("pixel_values", "grid_hws")}
    both["input_ids"] = torch.cat([one["input_ids"], other["input_ids"]], dim=1)
    probe = ModelProbe(find_anatomy(model))
    probe.add(both)
    patches = len(both["pixel_values"])
    interface = probe.result()["interface"]
    assert interface["vision_output"]["tokens"] == interface["projector_input"]["tokens"] == patches


def test_its_tower_is_measured_as_that_of_the_whole_model(own: tuple[str, Path, Any], tmp_path: Path) -> None:
    _, folder, made = own
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    picture().save(tmp_path / "picture.png")
    tower = load_tower(folder, trust_remote_code=True)
    (folder / "preprocessor_config.json").unlink()
    assert type(tower.module).__name__ == "Eye"
    result = measure_tower(tower, Pictures(tmp_path), lambda _: None)
    inputs = tower.inputs(picture())
    assert inputs.keys() == {"pixel_values", "grid_hws"}
    assert len(result["layers"]) == 3 and result["layers"][-1]["patches"]["tokens"] == len(inputs["pixel_values"])
    with TowerCall(tower.module) as call, torch.no_grad():
        states = torch.cat(tower.run(**inputs)).flatten(0, -2)
    assert (call.tokens(len(states)).row_N == UNKNOWN).all()  # they come in blocks, not row by row
    assert result["layers"][-1]["patches"]["mean"] == pytest.approx(states.norm(dim=-1).mean().item(), rel=1e-5)
    assert made.config.vision_config.hidden_stride == 2


def test_its_code_does_not_run_unasked_and_the_message_says_where_it_is(own: tuple[str, Path, Any]) -> None:
    kind, folder, _ = own
    with pytest.raises(
        ValueError, match=rf"'own_{kind}' brings its own code \(config.json, auto_map\).*--trust-remote"
    ):
        load_vlm(folder)


@pytest.mark.parametrize(
    ("file", "before", "after", "words"),
    [
        (
            "modeling_own.py",
            "import numpy as np",
            "from transformers.gone import x",
            "own code .* cannot be used: No mod",
        ),
        ("modeling_own.py", "self.post_init()", "self.gone", "the model cannot be loaded: .*no attribute 'gone'"),
        ("modeling_own.py", "self.post_init()", "{}['type']", "the model cannot be loaded: KeyError: 'type'"),
    ],
)
def test_code_that_is_too_old_says_for_which_release_it_was_written(
    tmp_path: Path, file: str, before: str, after: str, words: str
) -> None:
    own_checkpoint(tmp_path / "own", "tiles")
    path = tmp_path / "own" / file
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(ValueError, match=words + r".*transformers 4\.50\.0 \(config.json, transformers_version\)"):
        load_vlm(tmp_path / "own", trust_remote_code=True)


def test_a_model_that_makes_no_inputs_and_has_no_processor_is_told_so(tmp_path: Path) -> None:
    own_checkpoint(tmp_path / "own", "tiles")
    path = tmp_path / "own" / "modeling_own.py"
    path.write_text(path.read_text().replace("def preprocess_inputs", "def prepare"))
    with pytest.raises(ValueError, match=r"no processor that takes images \(preprocessor_config.json"):
        load_vlm(tmp_path / "own", trust_remote_code=True)


def test_inputs_that_its_code_cannot_make_are_told_in_words(tmp_path: Path) -> None:
    own_checkpoint(tmp_path / "own", "tiles")
    path = tmp_path / "own" / "modeling_own.py"
    path.write_text(path.read_text().replace("return input_ids, pixel_values, grid_hws", "return [input_ids, 1, 2]"))
    processor = load_vlm(tmp_path / "own", trust_remote_code=True)[1]
    with pytest.raises(ValueError, match=r"TilesForConditionalGeneration.preprocess_inputs made no sample.*no names"):
        inputs_of(processor, picture(), PROMPT)


def test_no_question_is_asked_while_its_code_loads_its_tokenizer(
    own: tuple[str, Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", asked.append)  # what it raises would be taken for a refusal
    load_vlm(own[1], trust_remote_code=True)
    assert not asked
