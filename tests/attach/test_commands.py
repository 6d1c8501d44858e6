"""`normalign attach` and `normalign detach` as a person or a script calls them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from normalign.cli import app
from normalign.weights.safetensors_file import read_headers

Saved = Callable[..., Path]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_json_is_one_object_and_says_what_was_done(saved: Saved, pictures: Path, tmp_path: Path) -> None:
    folder = saved("llava")
    result = call(
        "attach", folder, tmp_path / "a", "--aligner", "global_scale", "--images", pictures, "--multiple", 2, "--json"
    )
    assert result.exit_code == 0, result.output
    done = json.loads(result.stdout)
    assert done["loads_with"] == "transformers" and done["family"] == "llava"
    assert done["norm_at_merge"] == pytest.approx(2 * done["text_norm"])
    assert done["scale"] == pytest.approx(done["target"] / done["calibration"]["mean_norm"], rel=1e-6)
    assert set(done["scaled"]) <= set(read_headers(folder))
    assert done["calibration"]["skipped"] == {"image_undecodable": 1}
    back = json.loads(call("detach", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert back["trained"] is False and back["out"] == str(tmp_path / "b")


def test_in_words_it_says_that_outputs_change_and_that_the_model_must_be_trained(saved: Saved, tmp_path: Path) -> None:
    result = call("attach", saved("qwen3_vl"), tmp_path / "a", "--gwc")
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "layernorm with GWC behind model.visual.merger (qwen3_vl)" in words
    assert "The outputs are no longer those of the original" in words and "Train it before it is used" in words
    assert "once more after decoder layers 0, 1" in words
    assert f"`normalign detach {tmp_path / 'a'} FOLDER`" in result.stdout.splitlines()[-1]
    result = call("detach", tmp_path / "a", tmp_path / "b")
    assert "bit by bit" in result.stdout and result.stdout.splitlines()[-1].startswith(str(tmp_path / "b"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("attach", "nowhere", "out"), "nowhere is not a folder"),
        (("attach", ".", "out"), "config.json is missing"),
        (("detach", "nowhere", "out"), "nowhere is not a folder"),
    ],
)
def test_errors_are_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*arguments)
    assert result.exit_code == 1
    assert result.output.startswith("error: ") and words in result.output and result.output.count("\n") == 1


def test_options_name_the_parts_that_are_not_found(saved: Saved, tmp_path: Path) -> None:
    result = call("attach", saved("llava"), tmp_path / "a", "--projector", "model.bridge")
    assert result.exit_code == 1 and "--projector model.bridge" in result.output
    assert not (tmp_path / "a").exists()
    result = call("attach", saved("llava"), tmp_path / "a", "--projector", "model.multi_modal_projector", "--json")
    assert json.loads(result.stdout)["projector"] == "model.multi_modal_projector"
