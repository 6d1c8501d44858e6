"""The stage `dataset` on generated data and on a LLaVA folder: what it writes, counts and refuses."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from components import dataset
from components.common import image_root
from normalign.data.images import open_image
from normalign.data.llava import Records
from normalign.files import read_json, write_json
from normalign.settings import DatasetSettings, LlavaSettings, Profile, load_profile

PARAMS = Path(__file__).parents[2] / "params.yaml"


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    monkeypatch.chdir(tmp_path)
    return load_profile("ci", PARAMS)


def with_llava(profile: Profile, folder: Path, share: float) -> Profile:
    Image.new("RGB", (8, 8), (1, 2, 3)).save(folder / "ok.png")
    (folder / "bad.png").write_bytes((folder / "ok.png").read_bytes()[:40])

    def row(name: str, image: str) -> dict[str, Any]:
        talk = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "That."}]
        return {"id": name, "image": image, "conversations": talk}

    write_json(folder / "all.json", [row("1", "ok.png"), row("2", "bad.png"), row("3", "ok.png")])
    source = LlavaSettings(*[str(folder / "all.json"), str(folder)] * 2)
    settings = DatasetSettings(synthetic=None, llava=source, max_pixels=10_000, max_dropped_share=share)
    return dataclasses.replace(profile, dataset=settings)


def test_generated_data_passes_its_own_reader_twice_identically(profile: Profile) -> None:
    summary = dataset.run(profile)
    first = (profile.folder / "dataset.json").read_bytes()
    metrics = json.loads(first)
    assert metrics["benchmarks"] == {"presence": 24, "choice": 8, "reading": 8, "text": 12, "validation": 20}
    assert metrics["stage1"]["kept"] == 16 and metrics["stage1"]["dropped"] == 0
    assert metrics["stage2"]["kept"] == 12 + 1
    records = Records(profile.folder / "dataset" / "stage2.jsonl")
    assert sum(record.image is None for record in records) == 1
    assert sum(len(record.turns) for record in records) == metrics["stage2"]["turns"]
    assert "16 of 16 records kept, dropped: none" in summary
    dataset.run(profile)
    assert (profile.folder / "dataset.json").read_bytes() == first
    assert str(Path.cwd()) not in first.decode()


def test_llava_folder_is_read_and_rejects_are_shown(profile: Profile, tmp_path: Path) -> None:
    profile = with_llava(profile, tmp_path, share=0.5)
    summary = dataset.run(profile)
    assert "2 of 3 records kept, dropped: 1 image_undecodable" in summary
    metrics = read_json(profile.folder / "dataset.json")
    assert metrics["stage2"]["dropped_by_reason"] == {"image_undecodable": {"count": 1, "examples": ["2"]}}
    assert metrics["benchmarks"] == {}
    written = {path.name for path in (profile.folder / "dataset").iterdir()}
    assert written == {"stage1.jsonl", "stage2.jsonl"}
    assert str(tmp_path) not in (profile.folder / "dataset" / "stage1.jsonl").read_text()


def test_images_inside_parquet_rows_are_unpacked_and_found_again(profile: Profile, tmp_path: Path) -> None:
    profile = with_llava(profile, tmp_path, share=0.5)
    contents = [(tmp_path / name).read_bytes() for name in ("ok.png", "bad.png")]
    talk = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "That."}]
    table = {
        "id": ["1", "2"],
        "image": [{"bytes": content, "path": None} for content in contents],
        "conversations": [talk] * 2,
    }
    (tmp_path / "shards").mkdir()
    parquet.write_table(pyarrow.table(table), tmp_path / "shards" / "train-0.parquet")
    source = LlavaSettings(str(tmp_path / "all.json"), str(tmp_path), str(tmp_path / "shards"), None)
    profile = dataclasses.replace(profile, dataset=dataclasses.replace(profile.dataset, llava=source))
    dataset.run(profile)
    (record,) = Records(profile.folder / "dataset" / "stage2.jsonl")
    assert record.id == "1" and record.image == "train-0-0.png"
    root = image_root(profile, "stage2")
    assert [file.name for file in root.iterdir()] == [record.image]
    assert open_image(record.image, root, 10_000).getpixel((0, 0)) == (1, 2, 3)
    assert image_root(profile, "stage1") == tmp_path
    metrics = read_json(profile.folder / "dataset.json")
    assert metrics["stage2"]["dropped_by_reason"] == {"image_undecodable": {"count": 1, "examples": ["2"]}}
    dataset.run(profile)
    assert read_json(profile.folder / "dataset.json") == metrics


def test_paths_of_images_without_a_folder_are_refused_naming_the_setting(profile: Profile, tmp_path: Path) -> None:
    profile = with_llava(profile, tmp_path, share=0.5)
    source = LlavaSettings(str(tmp_path / "all.json"), str(tmp_path), str(tmp_path / "all.json"), None)
    profile = dataclasses.replace(profile, dataset=dataclasses.replace(profile.dataset, llava=source))
    with pytest.raises(FileNotFoundError, match=r"null \(dataset\.llava\.stage2_images\) is not a folder"):
        dataset.run(profile)


def test_too_many_rejects_stop_the_stage_and_leave_the_old_output(profile: Profile, tmp_path: Path) -> None:
    dataset.run(profile)
    before = (profile.folder / "dataset.json").read_bytes()
    with pytest.raises(
        ValueError, match=r"all\.json \(.*\): 1 of 3 .*1 image_undecodable \(2; 'bad\.png' is none of JPEG"
    ):
        dataset.run(with_llava(profile, tmp_path, share=0.1))
    assert (profile.folder / "dataset.json").read_bytes() == before
    assert (profile.folder / "dataset" / "benchmarks" / "text.jsonl").exists()


def with_rows(profile: Profile, folder: Path, rows: list[dict[str, Any]]) -> Profile:
    profile = with_llava(profile, folder, share=0.5)
    (folder / "all.json").write_text(json.dumps(rows))
    return profile


TALK = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]


def test_half_a_surrogate_pair_costs_its_record_alone(profile: Profile, tmp_path: Path) -> None:
    with_image = [{"from": "human", "value": "<image>What?"}, TALK[1]]
    rows = [
        {"id": "1", "image": "ok.png", "conversations": with_image},
        {"id": "2", "image": "ok.png", "conversations": with_image},
        {"id": "q \ud800", "conversations": TALK},
        {"id": "3", "conversations": [TALK[0], {"from": "gpt", "value": "\udc00"}]},
    ]
    dataset.run(with_rows(profile, tmp_path, rows))
    dropped = read_json(profile.folder / "dataset.json")["stage1"]["dropped_by_reason"]
    assert dropped == {"malformed_record": {"count": 2, "examples": ["q \\ud800", "3"]}}


@pytest.mark.parametrize(("rows", "said"), [([], "no record at all"), ([{"id": "1", "conversations": TALK}], "image")])
def test_data_without_records_or_images_are_refused_naming_their_setting(
    profile: Profile, tmp_path: Path, rows: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(ValueError, match=rf"all\.json \(dataset\.llava\.stage1_json\): .*{said}") as refused:
        dataset.run(with_rows(profile, tmp_path, rows))
    assert "name other data in dataset.llava.stage1_json" in str(refused.value)


@pytest.mark.parametrize("setting", ["stage1_json", "stage2_json", "stage1_images", "stage2_images"])
def test_a_missing_source_names_its_setting(profile: Profile, tmp_path: Path, setting: str) -> None:
    profile = with_llava(profile, tmp_path, share=0.5)
    assert profile.dataset.llava is not None
    llava = dataclasses.replace(profile.dataset.llava, **{setting: "nowhere"})
    profile = dataclasses.replace(profile, dataset=dataclasses.replace(profile.dataset, llava=llava))
    with pytest.raises(FileNotFoundError, match=rf"nowhere \(dataset\.llava\.{setting}\).* correct the setting"):
        dataset.run(profile)


def test_generated_data_of_which_nothing_is_left_are_named_as_such(profile: Profile) -> None:
    profile = dataclasses.replace(profile, dataset=dataclasses.replace(profile.dataset, max_pixels=1))
    with pytest.raises(ValueError, match=r"the generated stage1 data: .*dataset\.max_pixels \(1\)") as refused:
        dataset.run(profile)
    assert ".part" not in str(refused.value)
