"""Loading a checkpoint folder, and asking about an image in the format that the model was trained with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from normalign.anatomy import find_anatomy, inputs_of, load_vlm, visual_mask

from .tiny import PROMPT, Tiny, picture, tiny_vlm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checkpoint_is_loaded_in_float32_and_gives_the_logits_of_its_stored_weights(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model, processor, inputs = tiny_vlm("llava")
    model.load_state_dict({name: weight.to(dtype) for name, weight in model.state_dict().items()})
    tiny_vlm("llava")[0].to(dtype).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded, loaded_processor = load_vlm(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32} and not loaded.training
    again = inputs_of(loaded_processor, picture(), PROMPT)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**again).logits, model(**inputs).logits, rtol=1e-4, atol=1e-4)


def test_every_family_loads_from_its_folder_and_asks_as_before(family: str, vlm: Tiny, tmp_path: Path) -> None:
    model, processor, inputs = vlm
    if processor is None:
        pytest.skip("its processor cannot be built here")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded, loaded_processor = load_vlm(tmp_path)
    again = inputs_of(loaded_processor, picture(), PROMPT)
    assert again.keys() == inputs.keys()
    torch.testing.assert_close(again["input_ids"], inputs["input_ids"])
    assert find_anatomy(loaded).projector_path == find_anatomy(model).projector_path
    with torch.no_grad():
        torch.testing.assert_close(loaded(**again).logits, model(**inputs).logits, rtol=1e-4, atol=1e-4)


def test_a_processor_that_needs_another_package_says_so_and_not_that_files_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs_a_package(*_: Any, **__: Any) -> None:
        raise ImportError("it requires the Torchvision library")

    model, processor, _ = tiny_vlm("llava")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    monkeypatch.setattr(type(processor), "from_pretrained", needs_a_package)
    with pytest.raises(ValueError, match=r"requires the Torchvision library\); install the package"):
        load_vlm(tmp_path)


def test_a_sample_holds_the_prompt_behind_the_image_in_the_chat_format() -> None:
    model, processor, inputs = tiny_vlm("llava")
    text = processor.tokenizer.decode(inputs["input_ids"][0])
    assert text == f"<|im_start|>user\n{'<image>' * 4}{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    assert int(visual_mask(find_anatomy(model), inputs["input_ids"]).sum()) == 4


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"])
def test_without_a_template_that_shows_images_the_placeholder_stands_before_the_text(template: str | None) -> None:
    _, processor, _ = tiny_vlm("llava")
    processor.chat_template = template
    processor.tokenizer.chat_template = None
    text = processor.tokenizer.decode(inputs_of(processor, picture(), PROMPT)["input_ids"][0])
    assert text == ("user: " if template else "") + "<image>" * 4 + "\n" + PROMPT


def test_a_template_that_drops_images_is_not_used() -> None:
    _, processor, _ = tiny_vlm("llava")
    processor.chat_template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    assert (inputs_of(processor, picture(), PROMPT)["input_ids"] == processor.image_token_id).sum() == 4


def _save(tmp_path: Path) -> None:
    model, processor, _ = tiny_vlm("llava")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _without_layer(path: Path) -> None:
    kept = {name: value for name, value in load_file(path).items() if "layers.1.mlp" not in name}
    save_file(kept, path, metadata={"format": "pt"})


def _remote(path: Path) -> None:
    config = json.loads(path.read_text())
    config |= {"model_type": "their_vlm", "auto_map": {"AutoConfig": "theirs.Config", "AutoModel": "theirs.Model"}}
    path.write_text(json.dumps(config))


def _text_field(name: str, value: Any) -> Callable[[Path], object]:
    def spoil(path: Path) -> None:
        config = json.loads(path.read_text())
        config["text_config"][name] = value
        path.write_text(json.dumps(config))

    return spoil


@pytest.mark.parametrize(
    ("file", "spoil", "words"),
    [
        ("config.json", Path.unlink, "config.json is missing"),
        ("model.safetensors", Path.unlink, "the model cannot be loaded"),
        ("model.safetensors", _truncate, "the model cannot be loaded"),
        ("model.safetensors", _without_layer, "weights of LlavaForConditionalGeneration are not in the checkpoint"),
        ("tokenizer.json", Path.unlink, "its processor cannot be loaded"),
        ("config.json", _remote, "--trust-remote-code"),
        ("config.json", _text_field("hidden_size", "x"), "'hidden_size': TypeError: .* expected int, got str"),
        ("config.json", _text_field("head_dim", 0), "the model cannot be loaded"),
        ("config.json", _text_field("dtype", []), "cannot be used"),
    ],
)
def test_a_spoilt_folder_is_told_in_words(tmp_path: Path, file: str, spoil: Any, words: str) -> None:
    _save(tmp_path)
    spoil(tmp_path / file)
    with pytest.raises(ValueError, match=words):
        load_vlm(tmp_path)


def test_a_text_only_model_and_a_missing_folder_are_told_apart(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'llama' is no vision-language model .*normalign text-norm"):
        load_vlm(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        load_vlm(tmp_path / "nowhere")


REMOTE = """
from transformers import LlavaConfig, LlavaForConditionalGeneration


class TheirConfig(LlavaConfig):
    model_type = "their_vlm"


class TheirModel(LlavaForConditionalGeneration):
    config_class = TheirConfig
"""


def test_code_that_comes_with_a_checkpoint_runs_only_when_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "theirs"
    _save(folder)
    save_file(tiny_vlm("llava")[0].state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "their_code.py").write_text(REMOTE)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "their_code.TheirConfig", "AutoModelForCausalLM": "their_code.TheirModel"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "their_vlm", "auto_map": names}))
    with pytest.raises(ValueError, match="--trust-remote-code"):
        load_vlm(folder)
    model, processor = load_vlm(folder, trust_remote_code=True)
    assert type(model).__name__ == "TheirModel"
    assert find_anatomy(model).projector_path == "model.multi_modal_projector"
    assert inputs_of(processor, picture(), PROMPT)["pixel_values"].shape == (1, 3, 28, 28)
