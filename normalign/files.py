"""Writing files so that a kill at any moment leaves either the old content or the new, never half of it."""

import contextlib
import glob
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def _temporary_name(path: Path) -> Path:
    """A name beside ``path`` for this process alone; what killed processes left under such names is removed."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        _, process, suffix = left.name.rsplit(".", 2)
        if suffix in ("part", "old") and process.isdigit() and not _is_running(int(process)):
            _remove(left)
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs, as somebody else
        return True
    return process != os.getpid()  # this process writes one thing at a time: its own name is free


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it is flushed to disk and renamed to ``path``.

    On an exception the temporary file is removed and ``path`` stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    try:
        yield temporary
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty temporary directory beside ``path``; on success it replaces ``path`` whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    old = temporary.with_suffix(".old")
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            path.rename(old)  # deleting takes a while; moved away first, it is never seen half deleted
        temporary.replace(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically; NaN and infinity are refused, since JSON has neither."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """Write one JSON document per line, atomically."""
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
        for row in rows:
            handle.write(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; the error of a broken one names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete it and run the stage again") from error


def read_jsonl(path: Path) -> list[Any]:
    """Read a file with one JSON document per line."""
    with path.open(encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]
