"""Attached checkpoints on disk: logits, stock loading of folded ones, and the way back."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from normalign.anatomy import inputs_of, load_vlm
from normalign.attach.aligned import NAME, RECORD
from normalign.attach.checkpoint import ORIGINAL, attach_checkpoint
from normalign.attach.detach import detach_checkpoint
from normalign.attach.fold import foldable_parameters
from normalign.attach.weights import times
from normalign.embeddings.ranges import LocalFile, read_bytes
from normalign.embeddings.safetensors_header import read_header
from normalign.vlm.checkpoint import save
from normalign.weights.safetensors_file import checkpoint_files, read_headers
from tests.anatomy.tiny import FAMILIES, picture
from tests.attach.test_live import at_merge, attached

Saved = Callable[..., Path]
ALIKE = ("llava_onevision", "qwen2_5_vl", "glm46v", "smolvlm")  # stored like others here; attached live elsewhere
NOT_HERE = ("normalign_llava", *ALIKE)  # the first has an aligner
FOLDERS = [family for family in FAMILIES if family not in NOT_HERE]

# One of each kind of projector: two Linears, mergers within the tower, a bare matrix, a visual table, a structure.
FOLDED = ["llava", "qwen2_vl", "qwen3_vl", "idefics3", "gemma3", "paligemma", "glm4v", "kimi_k25", "ovis2", "molmo2"]


def contents(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every tensor of a checkpoint."""
    return {name: (t.dtype, t.shape, read_bytes(t.source, t.start, t.size)) for name, t in read_headers(folder).items()}


def others(folder: Path) -> dict[str, bytes]:
    """Files beside the weights; config.json as its values."""
    files = {p.name: p.read_bytes() for p in folder.iterdir() if "safetensors" not in p.name}
    return files | {"config.json": json.dumps(json.loads(files["config.json"]), sort_keys=True).encode()}


@pytest.mark.parametrize("family", FOLDERS)
def test_attached_logits_survive_the_round_trip_and_detaching_gives_back_every_bit(
    family: str, saved: Saved, tmp_path: Path
) -> None:
    folder = saved(family, sharded=True)
    done = attach_checkpoint(folder, tmp_path / "attached", gwc=True)
    assert done["logits"]["difference"] <= 1e-6
    detach_checkpoint(tmp_path / "attached", tmp_path / "plain")
    assert contents(tmp_path / "plain") == contents(folder)
    assert others(tmp_path / "plain") == others(folder)


@pytest.mark.parametrize("family", FOLDED)
def test_a_folded_checkpoint_is_stock_has_its_tokens_at_the_target_and_comes_back_bit_by_bit(
    family: str, saved: Saved, pictures: Path, tmp_path: Path
) -> None:
    folder = saved(family)
    done = attach_checkpoint(folder, tmp_path / "attached", aligner="global_scale", images=pictures)
    assert done["logits"]["difference"] <= 1e-6
    assert done["calibration"]["images"] == 3 and done["calibration"]["skipped"] == {"image_undecodable": 1}
    configs = [json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "attached")]
    assert configs[1].pop(RECORD) and configs[0] == configs[1] and done["loads_with"] == "transformers"
    before, after = contents(folder), contents(tmp_path / "attached")
    live = {name for name in done["scaled"] if any(before[name][2])}  # a bias of zeros stays one
    assert {name for name in before if before[name] != after[name]} == live
    assert before.keys() == after.keys()
    detach_checkpoint(tmp_path / "attached", tmp_path / "plain")
    assert contents(tmp_path / "plain") == before
    assert others(tmp_path / "plain") == others(folder)


def test_calibration_puts_the_mean_norm_over_the_images_at_the_target(
    saved: Saved, pictures: Path, tmp_path: Path
) -> None:
    done = attach_checkpoint(saved("llava"), tmp_path / "attached", aligner="global_scale", images=pictures, multiple=3)
    model, processor = load_vlm(tmp_path / "attached")
    norms = [at_merge(model, inputs_of(processor, picture(side, 30), "What is this?")) for side in (30, 41, 52)]
    assert torch.cat(norms).mean().item() == pytest.approx(3 * done["text_norm"], rel=1e-5)


@pytest.mark.parametrize("aligner", ["layernorm", "token_rms", "global_scale"])
def test_a_bfloat16_checkpoint_stays_one_and_a_factor_is_rounded_once(
    aligner: str, saved: Saved, pictures: Path, tmp_path: Path
) -> None:
    folder = saved("llava", dtype="bfloat16")
    images = pictures if aligner == "global_scale" else None
    done = attach_checkpoint(folder, tmp_path / "attached", aligner=aligner, images=images)
    assert done["logits"]["difference"] <= (8 * 2**-7 if images else 1e-6)
    before, after = load_file(folder / "model.safetensors"), _tensors(tmp_path / "attached")
    for name, tensor in before.items():
        exact = tensor.double() * done["scale"] if name in done["scaled"] else tensor.double()
        assert after[name].dtype == torch.bfloat16
        assert (after[name].double() - exact).abs().le(2**-8 * exact.abs() * (1 + 1e-6)).all(), name
    assert all(after[name].dtype == torch.float32 for name in set(after) - set(before))
    detach_checkpoint(tmp_path / "attached", tmp_path / "plain")
    assert contents(tmp_path / "plain") == contents(folder)


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in checkpoint_files(folder) for name, tensor in load_file(file).items()}


def test_without_its_code_an_attached_checkpoint_does_not_load_rather_than_lose_its_aligner(
    saved: Saved, tmp_path: Path
) -> None:
    attach_checkpoint(saved("llava"), tmp_path / "attached")
    with pytest.raises(ValueError):
        AutoConfig.from_pretrained(tmp_path / "attached", trust_remote_code=False)
    with pytest.raises(ValueError):
        AutoModelForImageTextToText.from_pretrained(tmp_path / "attached", trust_remote_code=False)


def test_tokenizer_and_processor_load_as_before_without_trusting_code(saved: Saved, tmp_path: Path) -> None:
    folder = saved("qwen2_vl")
    attach_checkpoint(folder, tmp_path / "attached")
    one, two = (AutoProcessor.from_pretrained(place) for place in (folder, tmp_path / "attached"))
    assert type(one) is type(two) and one.chat_template == two.chat_template
    texts = [AutoTokenizer.from_pretrained(place)("What is this?") for place in (folder, tmp_path / "attached")]
    assert texts[0]["input_ids"] == texts[1]["input_ids"]


def trained(folder: Path) -> None:
    """Change every floating-point tensor of a checkpoint a little, as training would."""
    for file in checkpoint_files(folder):
        save_file(
            {name: t * 1.01 if t.is_floating_point() else t for name, t in load_file(file).items()},
            file,
            {"format": "pt"},
        )


@pytest.mark.parametrize("aligner", ["layernorm", "global_scale"])
def test_of_a_trained_checkpoint_the_trained_weights_stay_and_the_original_projector_comes_only_when_asked_for(
    aligner: str, saved: Saved, pictures: Path, tmp_path: Path
) -> None:
    folder = saved("llava")
    images = pictures if aligner == "global_scale" else None
    attach_checkpoint(folder, tmp_path / "attached", aligner=aligner, images=images)
    trained(tmp_path / "attached")
    kept = detach_checkpoint(tmp_path / "attached", tmp_path / "kept")
    assert kept["trained"] is True and "as trained" in kept["projector"]
    restored = detach_checkpoint(tmp_path / "attached", tmp_path / "restored", restore_projector=True)
    assert "in the place of the trained one" in restored["projector"]
    before = load_file(folder / "model.safetensors")
    original = read_header(LocalFile(tmp_path / "attached" / ORIGINAL))
    for name, tensor in _tensors(tmp_path / "kept").items():
        torch.testing.assert_close(tensor, before[name] * 1.01, rtol=1e-6, atol=0)
    for name, tensor in _tensors(tmp_path / "restored").items():
        if name in original:
            assert torch.equal(tensor, before[name])
        else:
            torch.testing.assert_close(tensor, before[name] * 1.01, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gain_that_was_trained_alone_is_noticed(dtype: str, saved: Saved, tmp_path: Path) -> None:
    attach_checkpoint(saved("llava"), tmp_path / "attached")
    file = next(f for f in checkpoint_files(tmp_path / "attached") if "aligner" in f.name)
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    assert detach_checkpoint(tmp_path / "attached", tmp_path / "one")["trained"] is False
    save_file({name: tensor * 1.1 for name, tensor in tensors.items()}, file, {"format": "pt"})
    assert detach_checkpoint(tmp_path / "attached", tmp_path / "two")["trained"] is True


def test_what_trainer_saves_can_be_detached_and_the_missing_original_is_named(saved: Saved, tmp_path: Path) -> None:
    folder = saved("qwen2_vl")
    attach_checkpoint(folder, tmp_path / "attached")
    model, processor = load_vlm(tmp_path / "attached", trust_remote_code=True)
    model.save_pretrained(tmp_path / "again")  # as Trainer does: no copy of the original projector
    processor.save_pretrained(tmp_path / "again")
    with pytest.raises(ValueError, match=ORIGINAL):
        detach_checkpoint(tmp_path / "again", tmp_path / "plain", restore_projector=True)
    assert detach_checkpoint(tmp_path / "again", tmp_path / "plain")["trained"] is None
    assert contents(tmp_path / "plain") == contents(folder)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "plain")
    assert type(plain).__name__ == "Qwen2VLForConditionalGeneration"
    shutil.copy(tmp_path / "attached" / ORIGINAL, tmp_path / "again")
    assert detach_checkpoint(tmp_path / "again", tmp_path / "restored", restore_projector=True)["trained"] is False
    attach_checkpoint(saved("llava"), tmp_path / "another")
    shutil.copy(tmp_path / "another" / ORIGINAL, tmp_path / "again")
    with pytest.raises(ValueError, match="belongs to another checkpoint"):
        detach_checkpoint(tmp_path / "again", tmp_path / "mixed", restore_projector=True)
    assert not (tmp_path / "mixed").exists()


def test_a_live_attached_model_saves_a_checkpoint_like_the_commands(saved: Saved, tmp_path: Path) -> None:
    model, processor = load_vlm(saved("llava"))
    attached(model).save_pretrained(tmp_path / "live")
    processor.save_pretrained(tmp_path / "live")
    attach_checkpoint(saved("llava"), tmp_path / "attached")
    one, two = ({name: t.shape for name, t in _tensors(tmp_path / place).items()} for place in ("live", "attached"))
    assert one == two and any(NAME in name for name in one)
    code = [{p.name: p.read_text() for p in (tmp_path / place).glob("*.py")} for place in ("live", "attached")]
    assert code[0] == code[1]
    configs = [json.loads((tmp_path / place / "config.json").read_text()) for place in ("live", "attached")]
    for name in (RECORD, "auto_map", "model_type", "architectures"):
        assert configs[0][name] == configs[1][name], name


def test_our_own_model_comes_with_its_code(tiny: Any, tmp_path: Path) -> None:
    save(tiny.model({"aligner": "none"}), tiny.processor(), tmp_path / "own", None)
    done = attach_checkpoint(tmp_path / "own", tmp_path / "attached")
    assert done["logits"]["difference"] <= 1e-6
    assert (tmp_path / "attached" / "normalign_vlm_model.py").exists()
    detach_checkpoint(tmp_path / "attached", tmp_path / "plain")
    assert contents(tmp_path / "plain") == contents(tmp_path / "own")
    assert others(tmp_path / "plain") == others(tmp_path / "own")


def test_checking_the_logits_leaves_no_code_behind(saved: Saved, tmp_path: Path, modules_cache: Path) -> None:
    attach_checkpoint(saved("llava"), tmp_path / "attached")
    assert not list(modules_cache.rglob("*part*"))


def test_refusals_name_what_is_wrong_and_write_nothing(saved: Saved, pictures: Path, tmp_path: Path) -> None:
    folder, out = saved("llava"), tmp_path / "out"
    with pytest.raises(ValueError, match="not a folder"):
        attach_checkpoint(tmp_path / "nowhere", out)
    with pytest.raises(ValueError, match="--images"):
        attach_checkpoint(folder, out, aligner="global_scale")
    with pytest.raises(ValueError, match="--images"):
        attach_checkpoint(folder, out, images=pictures)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="not empty"):
        attach_checkpoint(folder, tmp_path / "full")
    with pytest.raises(ValueError, match="has no attached aligner"):
        detach_checkpoint(folder, out)
    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        attach_checkpoint(pickled, out)
    attach_checkpoint(folder, out)
    with pytest.raises(ValueError, match="already"):
        attach_checkpoint(out, tmp_path / "twice")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "out", "pickled"]


def test_weights_in_other_formats_are_not_carried_along(saved: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved("llava"), tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"old weights")
    (tmp_path / "model" / "templates").mkdir()
    (tmp_path / "model" / "templates" / "a.jinja").write_text("kept")
    attach_checkpoint(tmp_path / "model", tmp_path / "attached")
    assert not (tmp_path / "attached" / "pytorch_model.bin").exists()
    assert (tmp_path / "attached" / "templates" / "a.jinja").read_text() == "kept"


def test_a_projector_that_ends_in_something_else_than_a_linear_map_cannot_be_folded() -> None:
    projector = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    before = [p.clone() for p in projector.parameters()]
    with pytest.raises(ValueError, match="cannot be folded"):
        foldable_parameters(projector, (torch.randn(3, 4),), {})
    assert all(torch.equal(p, q) for p, q in zip(projector.parameters(), before, strict=True))


@given(factor=st.floats(1e-3, 1e3), seed=st.integers(0, 2**16))
def test_a_factor_is_applied_in_float32_and_rounded_once(
    factor: float, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("times") / "x.safetensors"
    values = torch.randn(8, generator=torch.Generator().manual_seed(seed)).bfloat16()
    save_file({"x": values}, file)
    exact = values.float().double() * torch.tensor(factor, dtype=torch.float32).double()
    found = times(read_header(LocalFile(file)), factor)["x"].double()
    assert (found - exact).abs().le(2**-8 * exact.abs() * 1.001).all()
