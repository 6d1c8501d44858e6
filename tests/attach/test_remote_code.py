"""Attached checkpoints where this package is not installed."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import normalign
from normalign import attach_aligner, detach_aligner
from normalign.anatomy import load_vlm
from normalign.attach.checkpoint import attach_checkpoint
from normalign.attach.detach import detach_checkpoint
from normalign.files import write_json
from normalign.vlm.checkpoint import save
from tests.anatomy.tiny import tiny_vlm
from tests.attach.test_live import attached
from tests.conftest import Tiny

Saved = Callable[..., Path]
# Loads, computes logits, saves as Trainer would, loads that, and computes them again; all without the package.
SCRIPT = """
import sys
sys.modules["normalign"] = None
import torch
from transformers import AutoModelForImageTextToText
work = sys.argv[1]
inputs = torch.load(work + "/inputs.pt")
for folder, again in zip(sys.argv[2::2], sys.argv[3::2]):
    for place in (folder, again):
        model = AutoModelForImageTextToText.from_pretrained(place, trust_remote_code=True, dtype=torch.float32).eval()
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        with torch.no_grad():
            torch.save(model(**inputs[folder]).logits, place + "/logits.pt")
        if place == folder:
            model.save_pretrained(again)
    half = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
    gain = next(p for name, p in half.named_parameters() if name.endswith("aligner_norm.weight"))
    assert gain.dtype == torch.float32 and half.lm_head.weight.dtype == torch.bfloat16
"""
CUSTOM = """
from transformers import LlavaConfig, LlavaForConditionalGeneration
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

register_checkpoint_conversion_mapping("custom", get_checkpoint_conversion_mapping("llava"), overwrite=True)

class CustomConfig(LlavaConfig):
    model_type = "custom"

class CustomForConditionalGeneration(LlavaForConditionalGeneration):
    config_class = CustomConfig
    custom = True
"""


def test_an_attached_checkpoint_loads_and_saves_without_the_package(saved: Saved, tiny: Tiny, tmp_path: Path) -> None:
    own = tmp_path / "own"
    save(tiny.model({"aligner": "none"}), tiny.processor(), own, None)
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    sample = {
        "input_ids": torch.tensor([[5, *[load_vlm(own)[0].config.image_token_index] * 4, 9]]),
        "pixel_values": pixels,
    }
    cases = {own: sample, saved("llava"): tiny_vlm("llava")[2], saved("qwen2_vl"): tiny_vlm("qwen2_vl")[2]}
    expected, inputs, arguments = {}, {}, []
    for number, (folder, given) in enumerate(cases.items()):
        place, again = str(tmp_path / f"attached{number}"), str(tmp_path / f"again{number}")
        attach_checkpoint(folder, Path(place), gwc=True)
        with torch.no_grad():
            expected[place] = expected[again] = attached(load_vlm(folder)[0], gwc=True)(**given).logits
        inputs[place] = dict(given)
        arguments += [place, again]
    torch.save(inputs, tmp_path / "inputs.pt")
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for place, logits in expected.items():
        found = torch.load(place + "/logits.pt")
        assert (found - logits).abs().max() <= 1e-6 * logits.abs().max(), place


def test_the_code_in_a_checkpoint_names_no_module_of_this_package(saved: Saved, tmp_path: Path) -> None:
    attach_checkpoint(saved("llava"), tmp_path / "attached", aligner="token_rms")
    files = sorted((tmp_path / "attached").glob("*.py"))
    assert [path.name for path in files] == [
        "modeling_normalign.py",
        "normalign_attach_aligned.py",
        "normalign_norms_aligner.py",
        "normalign_norms_gwc.py",
    ]
    for path in files:
        text = path.read_text()
        assert "from normalign" not in text and "import normalign" not in text


def test_the_code_of_a_model_that_brings_its_own_is_kept_and_built_upon(
    saved: Saved, pictures: Path, tmp_path: Path, modules_cache: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved("llava"), folder)
    (folder / "modeling_custom.py").write_text(CUSTOM, encoding="utf-8")
    auto = {"AutoConfig": "CustomConfig", "AutoModelForCausalLM": "CustomForConditionalGeneration"}
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "custom", "auto_map": {name: f"modeling_custom.{kind}" for name, kind in auto.items()}}
    write_json(folder / "config.json", config)
    with pytest.raises(ValueError, match="trust"):
        attach_checkpoint(folder, tmp_path / "attached")
    attach_checkpoint(folder, tmp_path / "attached", trust_remote_code=True)
    model = load_vlm(tmp_path / "attached", trust_remote_code=True)[0]
    assert type(model).__name__ == "AlignedCustomForConditionalGeneration" and model.custom
    scaling: dict[str, Any] = {"aligner": "global_scale", "images": pictures, "trust_remote_code": True}
    assert attach_checkpoint(folder, tmp_path / "folded", **scaling)["loads_with"] == "what loads the original"
    assert not list(modules_cache.rglob("*part*"))
    changed = json.loads((tmp_path / "attached" / "config.json").read_text())["auto_map"]
    assert all(place.startswith("modeling_normalign.Aligned") for place in changed.values()), changed
    detach_checkpoint(tmp_path / "attached", tmp_path / "plain")
    names = [sorted(path.name for path in place.iterdir()) for place in (folder, tmp_path / "plain")]
    assert names[0] == names[1]
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == config


def test_a_model_loaded_with_its_checkpoints_code_is_detached_like_any(saved: Saved, tmp_path: Path) -> None:
    attach_checkpoint(saved("llava"), tmp_path / "attached")
    model = load_vlm(tmp_path / "attached", trust_remote_code=True)[0]
    original, inputs = load_vlm(saved("llava"))[0], tiny_vlm("llava")[2]
    with pytest.raises(ValueError, match="already"):
        attach_aligner(model)
    detach_aligner(model)
    assert type(model) is type(original)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, original(**inputs).logits)


def test_what_a_live_global_scale_has_measured_is_saved_with_it(saved: Saved, tmp_path: Path) -> None:
    model, processor = load_vlm(saved("llava"))
    inputs = tiny_vlm("llava")[2]
    attached(model, "global_scale").train()
    with torch.no_grad():
        model(**inputs)  # in training the scale comes from the batch, and a running mean is kept
        expected = model.eval()(**inputs).logits
    model.save_pretrained(tmp_path / "live")
    processor.save_pretrained(tmp_path / "live")
    with torch.no_grad():
        found = load_vlm(tmp_path / "live", trust_remote_code=True)[0](**inputs).logits
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, normalign; assert 'torch' not in sys.modules; assert 'attach_aligner' in normalign.__all__"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'attach_a'"):
        normalign.attach_a  # noqa: B018
