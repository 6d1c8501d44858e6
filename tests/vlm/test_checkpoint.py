"""What is saved is what is loaded: logits, aligner, chat template, system prompt."""

from pathlib import Path
from typing import Any

import pytest
import torch

from normalign.vlm.checkpoint import chat_format, load, save
from normalign.vlm.generate import pixels_of

from ..conftest import Tiny
from .helpers import picture

ALIGNERS: dict[str, dict[str, Any]] = {
    "none": {"aligner": "none"},
    "layernorm": {"aligner": "layernorm", "init": "target", "gwc": True, "multiple": 2.0},
    "global_scale": {"aligner": "global_scale"},
    "token_rms": {"aligner": "token_rms"},
}


@pytest.mark.parametrize("tower", ["siglip_vision_model", "untied", "dinov2"])
@pytest.mark.parametrize("name", ALIGNERS)
def test_fault_17_logits_are_the_same_after_saving_and_loading(
    tiny: Tiny, tmp_path: Path, name: str, tower: str
) -> None:
    model, processor = tiny.model(ALIGNERS[name], tower=tower), tiny.processor(tower)
    aligner: Any = model.model.multi_modal_projector.aligner
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
        if name == "global_scale":
            aligner.running_norm.fill_(3.0)
    save(model, processor, tmp_path, None)
    loaded, _ = load(tmp_path)
    shared, own = chat_format(model, processor).prompt("What is it?", True)
    inputs: Any = {"input_ids": torch.tensor([shared + own]), "pixel_values": pixels_of(processor, [picture("a")])}
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, loaded(**inputs).logits)
        assert torch.equal(model.generate(**inputs, max_new_tokens=3), loaded.generate(**inputs, max_new_tokens=3))
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    restored: Any = loaded.model.multi_modal_projector.aligner
    assert type(restored) is type(aligner) and not loaded.training
    assert getattr(restored, "gwc", None) == getattr(aligner, "gwc", None)


@pytest.mark.parametrize("system_prompt", [None, "", "Be brief."])
def test_fault_16_template_and_system_prompt_are_stored_with_the_checkpoint(
    tiny: Tiny, tmp_path: Path, system_prompt: str | None
) -> None:
    model, processor = tiny.model(), tiny.processor()
    processor.tokenizer.chat_template = "Q:" + processor.tokenizer.chat_template
    processor.chat_template = processor.tokenizer.chat_template
    save(model, processor, tmp_path, system_prompt)
    loaded, again = load(tmp_path)
    ours, theirs = chat_format(model, processor), chat_format(loaded, again)
    assert theirs.system_prompt == system_prompt
    for image in (True, False):
        assert theirs.prompt("What?", image) == ours.prompt("What?", image)
        assert theirs.option("What?", "that", image) == ours.option("What?", "that", image)
    picture_of = picture("a", 40)
    assert torch.equal(pixels_of(processor, [picture_of]), pixels_of(again, [picture_of]))
    assert again.tokenizer.pad_token_id == processor.tokenizer.pad_token_id


def test_two_saves_of_one_model_are_byte_identical(tiny: Tiny, tmp_path: Path) -> None:
    for name in ("one", "two"):
        save(tiny.model(), tiny.processor(), tmp_path / name, None)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


def test_a_folder_without_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint"):
        load(tmp_path)
