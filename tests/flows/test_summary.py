"""The closing table and the checks before a run."""

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from flows import preflight
from flows.summary import closing_row, closing_table
from normalign.files import write_json
from normalign.settings import LlavaSettings, Profile, SettingsError, load_profile

ROOT = Path(__file__).parents[2]


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    monkeypatch.chdir(tmp_path)
    return load_profile("ci", ROOT / "params.yaml")


def write_metrics(profile: Profile, variant: str, passed: bool) -> None:
    results = profile.results(variant)
    summary = {
        "ratio/stage2": 1.23456,
        "sync_gap_first8/stage2": 0.0123,
        "visual/accuracy": 0.6123,
        "visual/stderr": 0.0149,
        "visual/shuffled_accuracy": 0.401,
        "text/accuracy": 0.8,
    }
    write_json(results / "summary.json", summary)
    verdicts = [{"expectation": "norm_ratio", "passed": passed}, {"expectation": "loss_falls", "passed": True}]
    write_json(results / "check.json", {"passed": passed, "verdicts": verdicts})


def test_the_closing_row_holds_the_metrics_after_training(profile: Profile) -> None:
    write_metrics(profile, "norm", passed=True)
    write_json(profile.folder / "gates" / "norm.json", {"passed": True})
    assert closing_row(profile, "norm") == ("norm", "1.23", "0.0123", "61.2 ± 1.5", "40.1", "80.0", "passed")


def test_a_stopped_variant_is_shown_with_what_stopped_it(profile: Profile) -> None:
    write_metrics(profile, "norm", passed=False)
    assert closing_row(profile, "norm")[-1] == "stopped: norm_ratio"


def test_a_variant_without_metrics_is_a_row_of_dashes(profile: Profile) -> None:
    assert closing_row(profile, "baseline") == ("baseline", *"––––––")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"passed": false}', '{"passed": false, "verdicts": [1]}'])
def test_a_broken_verdict_is_shown_as_unreadable_beside_the_metrics(profile: Profile, content: str) -> None:
    write_metrics(profile, "norm", passed=True)
    (profile.results("norm") / "check.json").write_text(content)
    assert closing_row(profile, "norm")[3:] == ("61.2 ± 1.5", "40.1", "80.0", "unreadable")


def test_broken_metrics_do_not_cost_the_table(profile: Profile) -> None:
    write_metrics(profile, "norm", passed=False)
    (profile.results("norm") / "summary.json").write_text("{")
    assert closing_row(profile, "norm") == ("norm", "unreadable", *"––––", "stopped: norm_ratio")


def test_the_closing_table_fits_a_terminal_of_80_columns(profile: Profile) -> None:
    write_metrics(profile, "norm", passed=True)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(closing_table(profile, ["baseline", "norm"]))
    text = console.export_text()
    assert "61.2 ± 1.5" in text and max(map(len, text.splitlines())) <= 80


def test_a_cpu_profile_with_local_sources_passes_the_preflight(profile: Profile) -> None:
    preflight.check(profile)


def test_a_paper_profile_is_refused_at_once_naming_devices_and_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SettingsError) as refused:
        preflight.check(load_profile("llama32_3b", ROOT / "params.yaml"))
    message = str(refused.value)
    assert "needs 8 cuda device(s), this machine has 0" in message
    assert "hub:google/siglip-so400m-patch14-384" in message and "HF_HUB_OFFLINE" in message
    assert "hub:meta-llama/Llama-3.2-3B-Instruct" in message
    assert "dataset.llava.stage1_json: data/sources/LLaVA-Pretrain/blip_laion_cc_sbu_558k.json is not there" in message


def test_own_data_with_the_generated_benchmarks_is_refused_before_anything_runs(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.json").write_text("[]")
    own = LlavaSettings("own.json", ".", "own.json", ".")
    dataset = dataclasses.replace(profile.dataset, synthetic=None, llava=own)
    with pytest.raises(SettingsError, match=r"benchmarks presence, choice, reading, text exist in generated data only"):
        preflight.check(dataclasses.replace(profile, dataset=dataset))
    hub = dataclasses.replace(profile.evaluate, visual_tasks=("pope",), text_tasks=("hellaswag",))
    preflight.check(dataclasses.replace(profile, dataset=dataset, evaluate=hub))
    wrong = dataclasses.replace(hub, visual_tasks=("pope", "popee"))
    with pytest.raises(SettingsError, match=r"no task 'popee' in lmms-eval"):
        preflight.check(dataclasses.replace(profile, dataset=dataset, evaluate=wrong))
    dataset = dataclasses.replace(dataset, llava=LlavaSettings("own.json", None, "own.json", "."))
    with pytest.raises(SettingsError, match=r"dataset\.llava\.stage1_images: null is not there"):
        preflight.check(dataclasses.replace(profile, dataset=dataset, evaluate=hub))


def test_a_hub_that_cannot_be_reached_is_named_with_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SettingsError, match=r"Qwen2\.5-7B-Instruct.*cannot be fetched"):
        preflight.check(load_profile("qwen25_7b", ROOT / "params.yaml"))
