"""Writing files so that a kill at any moment leaves either the old content or the new, never half of it."""

import contextlib
import errno
import glob
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NotWritten(OSError):  # noqa: N818 (as FileNotFoundError: the name says what is the matter)
    """``path`` could not be written and is as it was; the message says why and what to do."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} cannot be written: {why} and run again; nothing half-written is left")
        self.path, self.why = path, why


@contextlib.contextmanager
def _named(path: Path, temporary: Path) -> Iterator[None]:
    """Failures to write ``temporary`` as :class:`NotWritten` of ``path``; others pass, such as failed reads."""
    try:
        yield
    except NotWritten as error:
        if not _lies_in(error.path, temporary):
            raise
        raise NotWritten(path, error.why) from error
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise _no_space(path, error.errno) from error
        if not _lies_in(error.filename, temporary) and not _lies_in(path.parent, error.filename):
            raise
        why = f"{error.strerror}; see to it that {path.parent} is a folder that can be written to"
        raise NotWritten(path, why) from error
    except SafetensorError as error:  # the library reports the system's code in its text alone
        code = next((code for code in _NO_SPACE if f"(os error {code})" in str(error)), None)
        if code is None:
            raise
        raise _no_space(path, code) from error


def _no_space(path: Path, code: int) -> NotWritten:
    return NotWritten(path, f"{os.strerror(code)}; free disk space")


def _lies_in(name: Any, folder: Any) -> bool:
    """Whether the file ``name`` is ``folder`` or below it; an error without a file name is nowhere."""
    named = isinstance(name, str | Path) and isinstance(folder, str | Path)
    return named and Path(folder) in (Path(name), *Path(name).parents)


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

    Raises:
        NotWritten: there is no space or no permission.
    """
    temporary = _temporary_name(path)
    with _named(path, temporary):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with temporary.open("rb") as handle:
                os.fsync(handle.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty temporary directory beside ``path``; on success it replaces ``path`` whole.

    Raises:
        NotWritten: there is no space or no permission.
    """
    temporary = _temporary_name(path)
    old = temporary.with_suffix(".old")
    with _named(path, temporary):
        path.parent.mkdir(parents=True, exist_ok=True)
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


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write ``lines``, each with its line break, atomically."""
    with atomic_write(path) as temporary, temporary.open("wb") as handle:
        handle.writelines(lines)


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """Write one JSON document per line, atomically; NaN and infinity are refused."""
    write_lines(path, (f"{json.dumps(row, allow_nan=False, ensure_ascii=False)}\n".encode() for row in rows))


def read_json(path: Path) -> Any:
    """Read a JSON file; the error of a broken one names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # neither UTF-8 nor JSON, or nested too deeply
        advice = "fetch it again, or delete it and run the stage again"
        raise ValueError(f"{path} is not valid JSON ({error}); {advice}") from error


def read_jsonl(path: Path) -> list[Any]:
    """Read a file with one JSON document per line."""
    with path.open(encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]
