"""Records that cannot be encoded: counted by reason with their ids, and above the limit the stage stops."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from components.training import CODE, DroppedSamples, code_digest, samples_of, work_folder
from normalign.data.llava import Record, Turn
from normalign.data.manifest import Dropped
from normalign.files import NotWritten, write_json, write_lines
from normalign.settings import Profile, load_profile
from normalign.vlm.chat import SampleDroppedError

from ..conftest import Tiny

PARAMS = Path(__file__).parents[2] / "params.yaml"


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """Profile ci on ten records, of which 3 and 7 are longer than its context of 64 tokens."""
    monkeypatch.chdir(tmp_path)
    profile = load_profile("ci", PARAMS)
    words = {3: "word " * 100, 7: "word " * 200}
    records = [Record(f"r{i}", None, (Turn("What?", words.get(i, "That.")),)) for i in range(10)]
    write_lines(profile.folder / "dataset" / "stage1.jsonl", (record.to_line() for record in records))
    return dataclasses.replace(
        profile,
        model=dataclasses.replace(profile.model, max_tokens=64),
        stage1=dataclasses.replace(profile.stage1, epochs=1),
    )


def allowing(profile: Profile, share: float) -> Profile:
    return dataclasses.replace(profile, dataset=dataclasses.replace(profile.dataset, max_dropped_share=share))


def encode_all(profile: Profile, tiny: Tiny, dropped: DroppedSamples) -> list[str]:
    """Ids of the records that can be encoded; as in the training loop, others are passed over."""
    samples = samples_of(profile, "stage1", tiny.processor(), 4, None, dropped)
    found = []
    for index in range(samples.count):
        try:
            found.append(samples.encode(index).id)
        except SampleDroppedError:
            continue
    return found


def test_records_that_do_not_fit_are_noted_by_reason_and_a_resumed_run_knows_them(
    profile: Profile, tiny: Tiny, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    dropped = DroppedSamples(work, 0)
    assert encode_all(allowing(profile, 0.2), tiny, dropped) == [f"r{i}" for i in range(10) if i not in (3, 7)]
    said = "sample r3: no answer fits into max_tokens = 64"
    expected = {"longer_than_context": Dropped(2, ["r3", "r7"], said)}
    assert dropped.by_reason() == expected
    with (work / "dropped-0.jsonl").open("a") as handle:
        handle.write('\n[8, "r')  # killed while it wrote
    resumed = DroppedSamples(work, 0)
    encode_all(allowing(profile, 0.2), tiny, resumed)
    assert resumed.by_reason() == expected
    # Another process of the same run.
    DroppedSamples(work, 1).note(5, "r5", SampleDroppedError("no_supervised_token", "nothing"))
    assert resumed.by_reason() == {**expected, "no_supervised_token": Dropped(1, ["r5"], "nothing")}


def test_more_than_the_limit_of_all_that_was_planned_is_too_much(profile: Profile, tiny: Tiny, tmp_path: Path) -> None:
    dropped = DroppedSamples(tmp_path / "work", 0)
    encode_all(allowing(profile, 0.19), tiny, dropped)
    samples = samples_of(allowing(profile, 0.19), "stage1", tiny.processor(), 4, None, dropped)
    samples.check_lost(1)
    message = r"stage1: 2 of 10 samples .*max_dropped_share allows 19\.0%.* 2 longer_than_context \(r3, r7; .*64\)"
    with pytest.raises(ValueError, match=message):
        samples.check_lost(2)
    strict = samples_of(allowing(profile, 0.0), "stage1", tiny.processor(), 4, None, dropped)
    strict.check_lost(0)
    with pytest.raises(ValueError, match="1 of 10 samples"):
        strict.check_lost(1)


def test_a_note_that_cannot_be_written_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "work").write_text("a file")
    with pytest.raises(NotWritten, match=r"dropped-0\.jsonl cannot be written"):
        DroppedSamples(tmp_path / "work", 0).note(5, "r5", SampleDroppedError("no_supervised_token", "nothing"))


def test_nothing_is_written_where_nothing_is_dropped(tmp_path: Path) -> None:
    dropped = DroppedSamples(tmp_path / "work", 0)
    dropped.require_share("stage1", 0, 100, 0.0)
    assert dropped.by_reason() == {} and not (tmp_path / "work").exists()


def test_code_that_training_runs_through_is_part_of_what_a_run_is_known_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = code_digest("stage1")
    assert before != code_digest("stage2")
    monkeypatch.setattr("components.training.ROOT", tmp_path)
    for name in ("components", "normalign"):
        shutil.copytree(PARAMS.parent / name, tmp_path / name)
    assert code_digest("stage1") == before  # wherever the project lies
    for other in ("normalign/report/page.py", "components/stage2.py", "normalign/norms/gwc.pyc"):
        (tmp_path / other).write_text("x")
    assert code_digest("stage1") == before
    for own in ("components/stage1.py", "normalign/data/images.py", "normalign/vlm/chat.py", "normalign/norms/new.py"):
        content = (tmp_path / own).read_text() if (tmp_path / own).exists() else None
        (tmp_path / own).write_text("a = 1\n")
        assert code_digest("stage1") != before, own
        (tmp_path / own).unlink()
        if content is not None:
            (tmp_path / own).write_text(content)
    assert code_digest("stage1") == before


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_a_run_is_known_by_the_code_that_dvc_runs_its_stage_again_for(stage: str) -> None:
    stages = yaml.safe_load((PARAMS.parent / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    code = {dependency for dependency in stages[stage]["deps"] if not dependency.startswith("data/")}
    assert code == {f"components/{stage}.py", *CODE}


def test_a_run_goes_on_only_where_nothing_that_it_computes_with_has_changed(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: dict[Path, dict[str, Any]] = {
        profile.folder / "weights.json": {"language": "ab"},
        profile.folder / "dataset.json": {"fingerprint": "cd"},
        profile.folder / "text_norm.json": {"T": 3.2},
        profile.folder / "features" / "index.json": {"cached": True},
    }
    for file, content in files.items():
        write_json(file, content)
    projector = profile.model_folder("norm", "stage1") / "projector.safetensors"
    projector.parent.mkdir(parents=True)
    projector.write_bytes(b"trained")
    stages = ("stage1", "stage2")
    before = {stage: work_folder(profile, stage, "norm") for stage in stages}
    assert before == {stage: work_folder(profile, stage, "norm") for stage in stages}
    for file, content in files.items():
        write_json(file, {name: not value if value is True else f"other {value}" for name, value in content.items()})
        assert work_folder(profile, "stage1", "norm") != before["stage1"], file
        expected = file.parent.name == "features"  # which stage 2 does not use
        assert (work_folder(profile, "stage2", "norm") == before["stage2"]) == expected, file
        write_json(file, content)
    projector.write_bytes(b"trained otherwise")
    assert work_folder(profile, "stage2", "norm") != before["stage2"]
    changes: dict[str, dict[str, Any]] = {
        "stage1": {"seed": 43},
        "model": {"max_tokens": 65},
        "compute": {"precision": "bf16"},
    }
    for section, change in changes.items():
        changed = dataclasses.replace(profile, **{section: dataclasses.replace(getattr(profile, section), **change)})
        assert work_folder(changed, "stage1", "norm") != before["stage1"], section
    assert work_folder(profile, "stage1", "norm_gwc") != before["stage1"]
    for library in (torch, transformers):
        with monkeypatch.context() as patch:
            patch.setattr(library, "__version__", "0.1")
            assert work_folder(profile, "stage1", "norm") != before["stage1"], library
    monkeypatch.setattr("components.training.code_digest", lambda _stage: "edited")
    assert work_folder(profile, "stage1", "norm") != before["stage1"]
