"""Aligners on models whose classes come with the checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from normalign import attach_aligner, detach_aligner
from normalign.anatomy import inputs_of, load_vlm
from normalign.attach.checkpoint import attach_checkpoint
from normalign.attach.detach import detach_checkpoint
from normalign.files import read_json
from tests.anatomy.own_code import own_checkpoint
from tests.anatomy.tiny import PROMPT, picture


@pytest.fixture(scope="module", params=["tiles", "soft"])
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of each of the two."""
    folder = tmp_path_factory.mktemp("own") / request.param
    own_checkpoint(folder, request.param)
    return folder


@pytest.mark.parametrize("aligner", ["layernorm", "global_scale"])
def test_a_folder_goes_there_and_back(own: Path, aligner: str, pictures: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"images": pictures} if aligner == "global_scale" else {"gwc": True}
    done = attach_checkpoint(own, tmp_path / "attached", aligner=aligner, trust_remote_code=True, **settings)
    assert done["projector"] == {"tiles": "multi_modal_projector", "soft": "vte"}[own.name]
    assert done["logits"]["difference"] <= 1e-6
    factor = 2.0 if own.name == "tiles" else 1.0  # what their decoder multiplies embeddings by
    assert done["norm_at_merge"] == pytest.approx(done["text_norm"])
    assert done["target"] == pytest.approx(done["text_norm"] / factor)
    detach_checkpoint(tmp_path / "attached", tmp_path / "back")
    assert read_json(tmp_path / "back" / "config.json") == read_json(own / "config.json")
    for path in own.iterdir():
        if path.name != "config.json":
            assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_live_model_is_saved_with_the_code_that_it_came_with(own: Path, tmp_path: Path) -> None:
    model, processor = load_vlm(own, trust_remote_code=True)
    inputs = inputs_of(processor, picture(), PROMPT)
    with torch.no_grad():
        before = model(**inputs, use_cache=False).logits
        expected = attach_aligner(model, gwc=True)(**inputs, use_cache=False).logits
    model.save_pretrained(tmp_path / "live")
    processor.tokenizer.save_pretrained(tmp_path / "live")
    loaded = load_vlm(tmp_path / "live", trust_remote_code=True)[0]
    with torch.no_grad():
        assert torch.equal(loaded(**inputs, use_cache=False).logits, expected)
        assert not torch.allclose(expected, before)
        assert torch.equal(detach_aligner(loaded)(**inputs, use_cache=False).logits, before)
