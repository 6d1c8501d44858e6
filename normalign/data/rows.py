"""Rows of LLaVA-format data as they are published, one at a time: a JSON array, JSON lines, or parquet shards.

However long the file is, no more of it is held than a chunk (JSON) or a few rows (parquet).
"""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

CHUNK = 1 << 20  # characters of JSON read at a time
BATCH = 32  # rows of parquet read at a time: with their images they may take some MB each
COLUMNS = ("id", "conversations")

_SPACE = re.compile(r"[ \t\n\r]*")
# Where the parser stops this close to the end it may lack the rest; further off it knows: the text is wrong.
_LONGEST_TOKEN = 16


@dataclass(frozen=True)
class EmbeddedImage:
    """An image that lies in the row itself. ``name``: shard and row, by which it is told from all others."""

    name: str
    content: bytes


def parquet_shards(source: Path) -> list[Path]:
    """The shards of ``source`` (a folder, or one file ending in .parquet) in order; none if it is JSON.

    Raises:
        FileNotFoundError: a folder without any shard.
    """
    if not source.is_dir():
        return [source] if source.suffix == ".parquet" else []
    shards = sorted(source.glob("*.parquet"))
    if not shards:
        raise FileNotFoundError(f"folder {source} holds no *.parquet; name the folder of the shards or a JSON file")
    return shards


def embeds_images(source: Path) -> bool:
    """Whether ``source`` is parquet whose images are part of the rows (a struct of ``bytes`` and ``path``).

    Raises:
        ValueError: a shard is not parquet or lacks a column, or some shards embed images and others name files.
    """
    kinds = {shard.name: kind for shard in parquet_shards(source) if (kind := _image_type(shard)) != "null"}
    embedding = [name for name, kind in kinds.items() if "bytes" in kind]
    if embedding and len(embedding) < len(kinds):
        other = next(name for name in kinds if name not in embedding)
        raise ValueError(f"{source}: {embedding[0]} embeds its images, {other} names files; put them in two folders")
    return bool(embedding)


def embedded_images(dataset: Path, stage: str) -> Path:
    """Where a prepared data set keeps the images that came inside a stage's rows; the folder exists only then."""
    return dataset / "images" / stage


def _image_type(shard: Path) -> str:
    """The type of column ``image``, "null" without one."""
    schema = _open_parquet(shard).schema_arrow
    missing = [name for name in COLUMNS if name not in schema.names]
    if missing:
        raise ValueError(f"{shard}: no column {missing[0]!r}; its columns are {', '.join(schema.names)}")
    return str(schema.field("image").type) if "image" in schema.names else "null"


def _open_parquet(shard: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(shard, buffer_size=CHUNK)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{shard} cannot be read as parquet: {error}") from error


def read_rows(source: Path) -> Iterator[Any]:
    """Yield every row of ``source`` in order, with a progress bar in bytes.

    A line that is not JSON is yielded as text, which no record is. An image in a parquet row becomes an
    :class:`EmbeddedImage`.

    Raises:
        ValueError: the file as a whole is not JSON, or not parquet.
    """
    shards = parquet_shards(source)
    total = sum(file.stat().st_size for file in shards or [source])
    with tqdm(total=total, desc=source.name, unit="B", unit_scale=True, disable=None) as bar:
        if shards:
            for shard in shards:
                yield from _parquet_rows(shard, bar)
        else:
            yield from _json_rows(source, bar)


def _parquet_rows(shard: Path, bar: tqdm) -> Iterator[Any]:
    import pyarrow

    file, size = _open_parquet(shard), shard.stat().st_size
    columns = [name for name in (*COLUMNS, "image") if name in file.schema_arrow.names]
    number = 0
    try:
        for batch in file.iter_batches(batch_size=BATCH, columns=columns):
            for row in batch.to_pylist():
                yield {**row, "image": _parquet_image(row.get("image"), f"{shard.stem}-{number}")}
                number += 1
            bar.update(size * batch.num_rows / file.metadata.num_rows)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # the latter two of odd columns
        raise ValueError(f"{shard} cannot be read as parquet after row {number}: {error}") from error


def _parquet_image(value: Any, name: str) -> Any:
    """What a row says of its image: its bytes, else a path, else None."""
    if not isinstance(value, dict):
        return value
    content = value.get("bytes")
    if content is None:
        return value.get("path")
    return EmbeddedImage(name, content) if isinstance(content, bytes) else value


def _json_rows(path: Path, bar: tqdm) -> Iterator[Any]:
    try:
        with path.open("rb") as binary, io.TextIOWrapper(binary, encoding="utf-8-sig") as handle:
            array = _ArrayText(handle, path)
            if array.next_character() == "[":
                rows = array.rows()
            else:
                handle.seek(0)
                rows = (_parse_line(line) for line in handle if line.strip())
            for row in rows:
                yield row
                bar.update(binary.tell() - bar.n)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text, which JSON has to be: {error}; convert it") from error


def _parse_line(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # not JSON, a number of thousands of digits, nested too deeply
        return line.rstrip("\n")


class _ArrayText:
    """The text of a JSON array, of which only what is not parsed yet is held (``text`` from ``place`` on)."""

    def __init__(self, handle: TextIO, path: Path) -> None:
        self.handle, self.path = handle, path
        self.text, self.place = "", 0
        self.before = 0  # characters of the file that lie before ``text``
        self.ended = False
        self.parse = json.JSONDecoder().raw_decode

    def rows(self) -> Iterator[Any]:
        """The values of the array."""
        self.place += 1
        if self.next_character() == "]":
            self.place += 1
        else:
            yield self._value()
            while (mark := self.next_character()) == ",":
                self.place += 1
                self.next_character()
                yield self._value()
            if mark != "]":
                raise self._error("Expecting ',' delimiter", self.place)
            self.place += 1
        if self.next_character():
            raise self._error("Extra data", self.place)

    def next_character(self) -> str:
        """The next character that is not white space, to which ``place`` moves; empty at the end of the file."""
        while True:
            match = _SPACE.match(self.text, self.place)
            self.place = match.end() if match else self.place
            if self.place < len(self.text):
                return self.text[self.place]
            if self.ended:
                return ""
            self._read_on()

    def _read_on(self) -> None:
        # At least as much again as is held: a long value is not parsed anew for each of many small chunks.
        chunk = self.handle.read(max(CHUNK, len(self.text) - self.place))
        self.text, self.before = self.text[self.place :] + chunk, self.before + self.place
        self.place, self.ended = 0, not chunk

    def _value(self) -> Any:
        while True:
            try:
                value, end = self.parse(self.text, self.place)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos > len(self.text) - _LONGEST_TOKEN
                if self.ended or not cut:
                    raise self._error(error.msg, error.pos) from error
            except RecursionError as error:
                raise self._error("Nested too deeply", self.place) from error
            except ValueError as error:  # a number of thousands of digits
                raise self._error(str(error), self.place) from error
            else:
                if end < len(self.text) - _LONGEST_TOKEN or self.ended:  # else a number may go on
                    self.place = end
                    return value
            self._read_on()

    def _error(self, message: str, place: int) -> ValueError:
        return ValueError(f"{self.path} is neither a JSON array nor JSON lines: {message} (char {self.before + place})")
