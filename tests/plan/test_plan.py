"""Where dimensions come from, and the command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from normalign.cli import app
from normalign.commands.plan import size
from normalign.plan import baseline
from normalign.plan.estimate import Question, estimate
from normalign.plan.sources import find, published, tokenizer_tokens
from normalign.plan.workload import count_samples
from normalign.settings import load_profile

from .conftest import LANGUAGE, ROOT, VISION, Shaped


def invoke(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("profile", ["llama32_3b", "qwen25_7b"])
def test_the_papers_profiles_are_estimated_where_nothing_was_fetched(project: Path, profile: str) -> None:
    made = invoke(profile)
    assert made["baseline"] is None
    assert [stage["work"]["accumulation"] for stage in made["stages"]] == [16, 16]
    assert [stage["work"]["visual"] for stage in made["stages"]] == [729, 729]
    assert [stage["work"]["steps"] for stage in made["stages"]] == [2181, 6089]
    assert not made["cache"]["kept"]
    assert made["cache"]["bytes"] == 558128 * 729 * 1152 * 4
    first, second = made["stages"]
    assert second["flops"]["total"] > first["flops"]["total"]
    assert all("published dimensions" in line for line in made["sources"])


def test_the_papers_profiles_are_estimated_without_torch_and_transformers(project: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from normalign.cli import app; app(['plan', 'llama32_3b'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=project)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_hours_follow_from_operations_devices_peak_and_mfu(project: Path) -> None:
    stage = invoke("llama32_3b", "--mfu", "0.5", "--peak-tflops", "100", "--devices", "4")["stages"][1]
    assert stage["hours"] == pytest.approx(stage["flops"]["total"] / (4 * 100e12 * 0.5) / 3600)
    assert stage["work"]["accumulation"] == 32


def test_samples_and_tokens_that_are_given_are_used(project: Path) -> None:
    made = invoke("llama32_3b", "--samples", "1000", "2000", "--text-tokens", "50", "300")
    assert [s["work"]["samples"] for s in made["stages"]] == [1000, 2000]
    assert [s["work"]["text"] for s in made["stages"]] == [50, 300]
    assert made["cache"]["kept"] and made["stages"][0]["cached"]
    assert made["stages"][0]["flops"]["vision"] == 0


def test_the_tables_name_every_part_of_memory_and_say_what_they_rest_on(project: Path) -> None:
    result = CliRunner().invoke(app, ["plan", "qwen25_7b"])
    assert result.exit_code == 0, result.output
    for words in ("gradients", "AdamW's moments", "activations, gradient checkpointing", "logits", "hours", "peak"):
        assert words in result.stdout
    assert "published dimensions" in result.stdout


def test_on_a_cpu_the_peak_includes_a_measured_baseline(project: Path) -> None:
    profile = load_profile("ci")
    without = estimate(profile, Question(), measured_baseline=False)
    assert without.baseline is None
    made = estimate(profile, Question())
    assert made.baseline is not None and made.baseline > 50e6
    for stage, bare in zip(made.stages, without.stages, strict=True):
        assert made.peak(stage) == without.peak(bare) + made.baseline


def test_a_baseline_that_cannot_be_measured_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match="baseline"):
        baseline.measure(1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smoll"], "did you mean 'smol'"),
        (["llama32_3b", "--mfu", "1.5"], "--mfu: 1.5 is above 1"),
        (["llama32_3b", "--devices", "0"], "--devices: 0 is not above 0"),
        (["llama32_3b", "--text-tokens", "50", "10", "--supervised-tokens", "5", "20"], "20 supervised tokens of 10"),
        (["llama32_3b", "--text-tokens", "60", "3400"], "3400 text tokens are more than model.max_tokens (4096)"),
        (["llama32_3b", "--devices", "129"], "stage2: 129 devices share a global_batch of 128 samples"),
        (["llama32_3b", "--vision-config", "absent.json"], "absent.json"),
    ],
)
def test_what_cannot_be_estimated_is_said_in_one_line(project: Path, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 1
    assert words in result.output


def change(project: Path, old: str, new: str) -> None:
    file = project / "params.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_dimensions_that_are_nowhere_are_an_error_that_names_the_option(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(project, "hub:Qwen/Qwen2.5-7B-Instruct", "hub:nobody/nothing")
    result = CliRunner().invoke(app, ["plan", "qwen25_7b"])
    assert result.exit_code == 1
    assert "weights.language" in result.output and "hub:nobody/nothing" in result.output
    assert "--language-config" in result.output


def test_a_file_of_dimensions_wins_over_everything_else(project: Path, shaped: Shaped) -> None:
    config = project / "config.json"
    config.write_text(json.dumps(LANGUAGE))
    made = invoke("llama32_3b", "--language-config", str(config))
    parts = {part["module"]: part["parameters"] for part in made["stages"][0]["parts"]}
    assert parts["language"] == shaped.language.parameters + 2 * LANGUAGE["hidden_size"]
    assert "two rows for added tokens assumed" in made["sources"][1]


def test_a_weights_folder_wins_over_published_dimensions(project: Path) -> None:
    folder = project / "data" / "llama32_3b" / "weights" / "vision"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(VISION))
    found = find(load_profile("llama32_3b"), "vision")
    assert (found.config, found.where) == (VISION, "data/llama32_3b/weights/vision/config.json")


def test_the_rows_that_a_tokenizer_needs_are_those_of_the_model_that_is_built(shaped: Shaped) -> None:
    from normalign.vlm.build import build_processor

    assert tokenizer_tokens(shaped.folder / "language") == len(build_processor(shaped.folder, 56).tokenizer) == 260
    assert tokenizer_tokens(shaped.folder / "vision") is None


def test_every_source_in_params_has_published_dimensions() -> None:
    for name in ("smol", "llama32_3b", "qwen25_7b"):
        weights = load_profile(name, ROOT / "params.yaml").weights
        assert weights.vision.source in published()["vision"]
        assert weights.language.source in published()["language"]


def test_synthetic_samples_are_those_that_the_generator_writes(project: Path) -> None:
    profile = load_profile("ci")
    assert profile.dataset.synthetic is not None
    from normalign.data.synthetic import write_dataset

    write_dataset(profile.dataset.synthetic, project / "made")
    for stage in ("stage1", "stage2"):
        assert count_samples(profile, stage) == len(json.loads((project / "made" / f"{stage}.json").read_text()))


def test_an_unknown_data_set_is_counted_once_it_is_prepared(project: Path) -> None:
    change(project, "blip_laion_cc_sbu_558k.json", "mine.json")
    profile = load_profile("llama32_3b")
    with pytest.raises(ValueError, match=r"mine\.json.*--samples"):
        count_samples(profile, "stage1")
    (project / "data" / "llama32_3b").mkdir(parents=True)
    (project / "data" / "llama32_3b" / "dataset.json").write_text('{"stage1": {"kept": 12}}')
    assert count_samples(profile, "stage1") == 12


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_500_000, "1.5 MB"), (26_000_000_000, "26 GB")]
)
def test_sizes_are_written_with_three_digits(count: int, text: str) -> None:
    assert size(count) == text
