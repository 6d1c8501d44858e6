"""Writing files: the old content or the new, never half, and nothing left behind."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from normalign.files import atomic_directory, atomic_write, read_json, read_jsonl, write_json, write_jsonl, write_text

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
).filter(lambda value: json.loads(json.dumps(value)) == value)


class Stop(Exception):  # noqa: N818 (stands in for a kill)
    """Ends a write."""


@pytest.mark.parametrize("before", [None, "old"])
def test_an_exception_while_writing_leaves_the_old_file_and_no_temporary_one(
    tmp_path: Path, before: str | None
) -> None:
    path = tmp_path / "file.txt"
    if before is not None:
        path.write_text(before)
    with pytest.raises(Stop), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise Stop
    assert [p.name for p in tmp_path.iterdir()] == ([] if before is None else ["file.txt"])
    assert before is None or path.read_text() == before


def test_a_file_is_replaced_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    write_text(path, "old")
    with atomic_write(path) as temporary:
        temporary.write_text("new ü")
        assert path.read_text() == "old" and temporary.parent == path.parent
    assert path.read_text() == "new ü" and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("before", [None, "old"])
def test_an_exception_while_filling_a_directory_leaves_the_old_one_whole(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "folder"
    if before is not None:
        write_text(path / "kept.txt", before)
    with pytest.raises(Stop), atomic_directory(path) as temporary:
        (temporary / "half.txt").write_text("half")
        raise Stop
    assert [p.name for p in tmp_path.iterdir()] == ([] if before is None else ["folder"])
    assert before is None or [p.name for p in path.iterdir()] == ["kept.txt"]


def test_a_directory_replaces_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    write_text(path / "old.txt", "old")
    with atomic_directory(path) as temporary:
        assert list(temporary.iterdir()) == [] and (path / "old.txt").exists()
        (temporary / "new.txt").write_text("new")
    assert [p.name for p in path.iterdir()] == ["new.txt"] and list(tmp_path.iterdir()) == [path]


@given(value=values)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
def test_what_is_written_as_json_is_read_back(tmp_path: Path, value: object) -> None:
    write_json(tmp_path / "v.json", value)
    assert read_json(tmp_path / "v.json") == value
    write_jsonl(tmp_path / "v.jsonl", [value, value])
    assert read_jsonl(tmp_path / "v.jsonl") == [value, value]


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_json_lacks_is_refused_and_the_old_file_stays(tmp_path: Path, number: float) -> None:
    path = tmp_path / "v.json"
    for write in (write_json, lambda p, v: write_jsonl(p, [v])):
        write_text(path, "old")
        with pytest.raises(ValueError, match="JSON compliant"):
            write(path, {"x": number})
        assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_broken_json_file_is_named(tmp_path: Path) -> None:
    write_text(tmp_path / "v.json", "{")
    with pytest.raises(ValueError, match=r"v\.json is not valid JSON .*run the stage again"):
        read_json(tmp_path / "v.json")


@pytest.mark.parametrize("suffix", ["part", "old"])
def test_what_a_killed_process_left_is_removed_by_the_next_write_and_other_files_are_not(
    tmp_path: Path, suffix: str
) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    half_file = tmp_path / f".file.txt.{dead.pid}.{suffix}"
    half_folder = tmp_path / f".folder.{dead.pid}.{suffix}"
    living = tmp_path / f".file.txt.{os.getppid()}.part"
    bystander = tmp_path / ".file.txt.notes"
    for path in (half_file, living, bystander, half_folder / "inner.txt"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    write_text(tmp_path / "file.txt", "whole")
    with atomic_directory(tmp_path / "folder") as temporary:
        (temporary / "whole.txt").write_text("x")
    assert {p.name for p in tmp_path.iterdir()} == {"file.txt", "folder", living.name, bystander.name}
