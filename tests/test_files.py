"""Writing files: the old content or the new, never half, and nothing left behind."""

import json
import math
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from normalign.files import (
    NotWritten,
    atomic_directory,
    atomic_write,
    read_json,
    read_jsonl,
    write_json,
    write_jsonl,
    write_text,
)

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


@pytest.fixture
def no_space() -> Iterator[None]:
    """No file can grow past 1000 bytes, which writes hit as they hit the end of a disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


FULL = "cannot be written: File too large; free disk space and run again; nothing half-written is left"


@pytest.mark.usefixtures("no_space")
def test_without_space_the_target_is_named_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old")
    with pytest.raises(NotWritten) as refused:
        write_text(path, "x" * 2000)
    assert str(refused.value) == f"{path} {FULL}"
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("no_space")
def test_without_space_in_a_folder_it_is_the_folder_that_is_named(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for inner in (
        lambda folder: save_file({"a": np.ones(1000)}, folder / "a.safetensors"),
        lambda folder: write_text(folder / "a.txt", "x" * 2000),
    ):
        with pytest.raises(NotWritten) as refused, atomic_directory(path) as temporary:
            inner(temporary)
        assert str(refused.value) == f"{path} {FULL}" and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named_with_its_target(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "inner.json"
    with pytest.raises(NotWritten, match=r"inner\.json cannot be written: .*file is a folder that can be written to"):
        write_json(path, 1)


def test_a_failed_read_while_writing_keeps_its_own_message(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"), atomic_write(tmp_path / "file.txt"):
        (tmp_path / "nowhere").read_text()
