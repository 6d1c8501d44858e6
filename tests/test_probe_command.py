"""`normalign probe` on a tiny checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from normalign.cli import app
from normalign.commands.probe import DEFAULT_PROMPTS, short_names

from .anatomy.tiny import picture, tiny_vlm
from .conftest import Tiny

KEYS = {"model", "family", "width", "T", "T_as_used", "embedding_scale", "base_T", "counts", "interface", "ratio"}
KEYS |= {"k_in_context", "layers", "sync_gap", "attention", "routing", "injected_layers", "visual_vocabulary"}
KEYS |= {"theory", "maps", "verdict"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA, saved."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llava"
    model, processor, _ = tiny_vlm("llava")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good images, one of them very wide, and two files that are none."""
    folder = tmp_path_factory.mktemp("images")
    picture().save(folder / "a.png")
    Image.new("RGB", (20_000, 300), "gray").save(folder / "wide.png")
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "empty.jpg").write_bytes(b"")
    return folder


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["probe", *map(str, arguments)])


@pytest.fixture(scope="module")
def measured(checkpoint: Path, images: Path) -> dict[str, Any]:
    """The command's JSON, which must be all that it prints."""
    result = run(checkpoint, "--images", images, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_json_is_one_object_with_everything_in_it(measured: dict[str, Any]) -> None:
    assert measured.keys() == KEYS
    assert measured["model"] == "tiny-llava" and measured["family"] == "llava"
    assert measured["verdict"]["k"] == measured["ratio"] and measured["base_T"] is None


def test_every_prompt_is_asked_of_every_usable_image_and_bad_ones_are_counted(measured: dict[str, Any]) -> None:
    counts = measured["counts"]
    assert counts["samples"] == 2 * len(DEFAULT_PROMPTS) and counts["visual_tokens"] == 4 * counts["samples"]
    assert counts["skipped"] == {"image_empty": 1, "image_undecodable": 1}


def test_every_image_has_one_map_also_a_very_wide_one(measured: dict[str, Any]) -> None:
    assert [entry["id"] for entry in measured["maps"]] == ["a.png", "wide.png"]
    for entry in measured["maps"]:
        assert entry["grid"] == [2, 2] and sum(map(sum, entry["map"])) == pytest.approx(1, abs=1e-5)


def test_the_page_and_the_same_result_are_written_where_asked(
    checkpoint: Path, images: Path, measured: dict[str, Any], tmp_path: Path
) -> None:
    result = run(checkpoint, "--images", images, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    written = tmp_path / "out"
    assert sorted(path.name for path in written.iterdir()) == ["index.html", "result.json"]
    assert json.loads((written / "result.json").read_text()) == measured
    assert result.stdout.splitlines()[-1] == f"Page: {(written / 'index.html').as_uri()}"
    assert str(tmp_path) not in (written / "index.html").read_text() + (written / "result.json").read_text()


def test_without_a_place_to_write_nothing_is_written_and_the_last_line_says_how(
    checkpoint: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(checkpoint, "--images", images)
    assert result.exit_code == 0 and "--out DIR" in result.stdout.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_prompts_come_from_a_file_one_a_line(checkpoint: Path, images: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is it?\n\n  Where?  \nWhere?\nWhy?\n", encoding="utf-8")
    result = run(checkpoint, "--images", images, "--prompts", prompts, "--json")
    assert json.loads(result.stdout)["counts"]["samples"] == 2 * 3


def test_text_embeddings_are_compared_with_the_base_models(
    checkpoint: Path, images: Path, tiny: Tiny, tmp_path: Path
) -> None:
    result = run(checkpoint, "--images", images, "--base", tiny.folders["dinov2"] / "language", "--json")
    found = json.loads(result.stdout)
    assert found["base_T"] > 0
    assert found["verdict"]["passive_compensation"]["inflation"] == pytest.approx(
        found["T"] / found["base_T"], rel=1e-4
    )


def test_several_models_are_told_apart_and_one_that_fails_loses_no_other(
    checkpoint: Path, images: Path, tmp_path: Path
) -> None:
    result = run(checkpoint, tmp_path / "nowhere", checkpoint, "--images", images, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 1
    first, second, failed = json.loads(result.stdout)["models"]
    assert first == second and failed.keys() == {"model", "error"} and "nowhere" in failed["error"]
    # Each in the folder of its place in the command.
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["1", "3", "index.html"]
    (tmp_path / "out" / "3" / "mine.txt").touch()
    assert run(checkpoint, "--images", images, "--out", tmp_path / "out").exit_code == 0
    left = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    assert left == {"index.html", "result.json", "3", "3/mine.txt"}, "a page beside results that it does not show"


def test_models_are_called_by_as_much_of_their_path_as_tells_them_apart(tmp_path: Path) -> None:
    folders = [tmp_path / variant / "stage2" for variant in ("norm", "baseline")]
    for folder in folders:
        folder.mkdir(parents=True)
    assert short_names([*map(str, folders), "org/name@main"]) == ["norm/stage2", "baseline/stage2", "org/name@main"]
    assert short_names([str(folders[0])]) == ["stage2"] and short_names(["org/name"] * 2) == ["name"] * 2


def test_an_image_that_the_processor_refuses_is_left_out_with_its_reason(images: Path, tmp_path: Path) -> None:
    model, processor, _ = tiny_vlm("qwen2_5_vl")
    for part in (model, processor):
        part.save_pretrained(tmp_path / "qwen")
    (tmp_path / "images").mkdir()
    Image.new("RGB", (20_000, 30)).save(tmp_path / "images" / "wide.png")
    refused = run(tmp_path / "qwen", "--images", tmp_path / "images", "--json")
    assert refused.exit_code == 1 and "aspect ratio" in refused.output and "Traceback" not in refused.output
    picture().save(tmp_path / "images" / "good.png")
    counts = json.loads(run(tmp_path / "qwen", "--images", tmp_path / "images", "--json").stdout)["counts"]
    assert counts["samples"] == len(DEFAULT_PROMPTS)
    ((reason, count),) = counts["skipped"].items()
    assert "aspect ratio" in reason and count == 1


def test_a_forward_pass_that_fails_is_one_models_error(checkpoint: Path, images: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "longer")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "longer")  # one token more than the embedding has rows
    (tmp_path / "prompts.txt").write_text("<new>\n")
    result = run(checkpoint, tmp_path / "longer", "--images", images, "--prompts", tmp_path / "prompts.txt", "--json")
    good, bad = json.loads(result.stdout)["models"]
    assert good["counts"]["samples"] == 2
    assert "its forward pass fails on a.png: index out of range" in bad["error"]


def test_a_place_that_cannot_be_written_to_is_told_before_anything_is_measured(images: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = run(tmp_path / "no model", "--images", images, "--out", tmp_path / "file" / "out")
    assert result.exit_code == 1 and "is no folder that can be written to" in result.output
    assert (tmp_path / "file").read_text() == "mine"


def test_errors_are_one_line_and_name_what_to_mend(checkpoint: Path, images: Path, tiny: Tiny, tmp_path: Path) -> None:
    bad, empty, prompts = tmp_path / "bad", tmp_path / "empty", tmp_path / "none.txt"
    for folder in (bad, empty):
        folder.mkdir()
    (bad / "x.png").write_bytes(b"x")
    prompts.write_text("\n")
    language = tiny.folders["dinov2"] / "language"
    cases: list[tuple[list[Any], str]] = [
        ([checkpoint, "--images", empty], "the folder is empty"),
        ([checkpoint, "--images", tmp_path / "nowhere"], "there is no such folder"),
        ([checkpoint, "--images", bad], "image_undecodable: 1"),
        ([checkpoint, "--images", images, "--prompts", prompts], "one prompt a line"),
        ([checkpoint, "--images", images, "--prompts", tmp_path / "nowhere"], "nowhere"),
        ([tmp_path / "nowhere", "--images", images], "neither a folder nor"),
        ([empty, "--images", images], "config.json is missing"),
        ([language, "--images", images], "no vision-language model"),
        ([checkpoint, "--images", images, "--projector", "model.nothing"], "--projector"),
    ]
    for arguments, words in cases:
        result = run(*arguments)
        assert result.exit_code == 1 and words in result.output, (arguments, result.output)
        assert len([line for line in result.output.splitlines() if line.startswith("error: ")]) == 1
        assert "Traceback" not in result.output
