"""What killed DVC processes leave in its list of files in use."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flows.dag import _forget_dead_locks


def rwlock(folder: Path, *processes: int) -> Path:
    file = folder / "rwlock"
    holders = [{"pid": process, "cmd": "dvc repro"} for process in processes]
    file.write_text(json.dumps({"write": {"out/a": holders[0]}, "read": {"in/b": holders[1:]}}))
    return file


def test_a_list_that_a_live_process_holds_stays(tmp_path: Path) -> None:
    file = rwlock(tmp_path, os.getpid())
    before = file.read_bytes()
    _forget_dead_locks(file)
    assert file.read_bytes() == before


def test_a_list_of_dead_processes_goes_also_while_one_is_not_yet_reaped(tmp_path: Path) -> None:
    reaped = subprocess.Popen([sys.executable, "-c", ""])
    reaped.wait()
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 30
    while psutil.Process(zombie.pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    file = rwlock(tmp_path, zombie.pid, reaped.pid)
    _forget_dead_locks(file)
    assert not file.exists()
    zombie.wait()


@pytest.mark.parametrize("text", ["", '{"write": {"out/a": {"pi', "[]", '{"write": {"a": {"pid": "x"}}}'])
def test_a_list_cut_short_by_a_kill_goes(tmp_path: Path, text: str) -> None:
    (tmp_path / "rwlock").write_text(text)
    _forget_dead_locks(tmp_path / "rwlock")
    assert not (tmp_path / "rwlock").exists()


def test_no_list_is_no_error(tmp_path: Path) -> None:
    _forget_dead_locks(tmp_path / "rwlock")
