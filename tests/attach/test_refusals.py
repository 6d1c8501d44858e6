"""What cannot be attached or detached is refused in one sentence, early, and nothing is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from normalign.anatomy import find_anatomy, inputs_of, load_vlm
from normalign.attach import checkpoint
from normalign.attach.aligned import RECORD
from normalign.attach.calibrate import PROMPT, projector_call, sample_picture
from normalign.attach.checkpoint import attach_checkpoint
from normalign.attach.detach import detach_checkpoint

Saved = Callable[..., Path]
WEIGHTS = "model.safetensors"
LAST = "multi_modal_projector.linear_2."


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"aligner": "layer_norm"}, "did you mean 'layernorm'"),
        ({"multiple": 1e40}, "from 1e-06 to 1e"),
        ({"multiple": float("nan")}, "multiple is nan"),
        ({"aligner": "token_rms", "gwc": True}, "gwc"),
        ({"aligner": "global_scale", "images": Path("nowhere")}, "no such folder"),
    ],
)
def test_wrong_settings_are_refused_before_any_weight_is_loaded(
    settings: dict[str, Any], words: str, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "load_vlm", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=words):
        attach_checkpoint(saved("llava"), tmp_path / "out", **settings)


def test_a_place_that_cannot_be_written_is_refused_before_any_weight_is_loaded(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "load_vlm", lambda *_, **__: pytest.fail("the model was loaded"))
    shutil.copytree(saved("llava"), tmp_path / "model")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for place, words in (("model/out", "inside"), ("file/out", "no folder"), ("link", "is a link")):
        with pytest.raises(ValueError, match=words):
            attach_checkpoint(tmp_path / "model", tmp_path / place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "model"]


@pytest.mark.parametrize("aligner", ["layernorm", "global_scale"])
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"projector": "model.vision_tower"}, "makes vectors of 24"),
        ({"projector": "model.multi_modal_projector.linear_1"}, "something lies in between"),
        ({"image_token_id": 5}, "--image-token-id"),
        ({"image_token_id": -3}, "--image-token-id"),
    ],
)
def test_a_part_that_is_named_wrongly_is_refused(
    part: dict[str, Any], words: str, aligner: str, saved: Saved, pictures: Path, tmp_path: Path
) -> None:
    images = pictures if aligner == "global_scale" else None
    with pytest.raises(ValueError, match=words):
        attach_checkpoint(saved("llava"), tmp_path / "out", aligner=aligner, images=images, **part)
    assert not (tmp_path / "out").exists()


def test_a_projector_that_keeps_the_norm_is_told_apart_from_its_first_half(saved: Saved, tmp_path: Path) -> None:
    model, processor = load_vlm(saved("llava"))
    inputs = inputs_of(processor, sample_picture(), PROMPT)
    halves = [
        projector_call(find_anatomy(model, projector=f"model.multi_modal_projector.linear_{half}"), inputs).norms_N
        for half in (1, 2)
    ]
    shutil.copytree(saved("llava"), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / WEIGHTS)
    ratio = halves[0].median() / halves[1].median()
    scaled = {name: (t * ratio).float() if name.startswith(LAST) else t for name, t in tensors.items()}
    save_file(scaled, tmp_path / "model" / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match="something lies in between"):
        attach_checkpoint(tmp_path / "model", tmp_path / "out", projector="model.multi_modal_projector.linear_1")
    attach_checkpoint(tmp_path / "model", tmp_path / "out")


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_projector_whose_weights_are_nothing_has_no_factor(
    value: float, saved: Saved, pictures: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved("llava"), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / WEIGHTS)
    spoilt = {name: torch.full_like(t, value) if name.startswith(LAST) else t for name, t in tensors.items()}
    assert any(not torch.equal(spoilt[name], tensors[name]) for name in tensors)
    save_file(spoilt, tmp_path / "model" / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match="cannot be used"):
        attach_checkpoint(tmp_path / "model", tmp_path / "out", aligner="global_scale", images=pictures)


@pytest.mark.parametrize("record", [3, {}, {"settings": {"aligner": "layernorm"}}])
def test_a_record_that_attach_did_not_write_is_no_reason_to_detach(record: Any, saved: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved("llava"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {RECORD: record}))
    with pytest.raises(ValueError, match="not what `normalign attach` wrote"):
        detach_checkpoint(tmp_path / "model", tmp_path / "plain")
