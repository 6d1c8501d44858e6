"""LLaVA-format conversations (``id``, ``image``, ``conversations``): checked when read, indexed once prepared."""

import os
import reprlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import orjson

from normalign.data.images import ImageReason, ImageRejected, open_image, store_image
from normalign.data.rows import EmbeddedImage, read_rows

PLACEHOLDER = "<image>"
_AHEAD = 128  # records under way at a time, some with their image in memory
REMEMBERED = 1 << 18  # images; more than COCO and Visual Genome hold together, some 70 MB
_REMEMBERED_LENGTH = 256  # characters of a path; one may be as long as a picture, where the picture itself is in it
_INDEX_CHUNK = 1 << 24  # bytes

ConversationReason = Literal[
    "malformed_record",
    "no_turns",
    "roles_out_of_order",
    "blank_question",
    "blank_answer",
    "placeholder_missing",
    "placeholder_repeated",
    "placeholder_in_answer",
    "placeholder_without_image",
]
Reason = ConversationReason | ImageReason


@dataclass(frozen=True)
class Turn:
    """One question and its answer, both non-blank and without the image placeholder."""

    question: str
    answer: str


@dataclass(frozen=True)
class Record:
    """One validated conversation. ``image`` is relative to the image root, None for text alone.

    The image, if there is one, comes before the first question.
    """

    id: str
    image: str | None
    turns: tuple[Turn, ...]

    def to_line(self) -> bytes:
        """The record as one line of a prepared data set."""
        return orjson.dumps(self, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_line(cls, line: bytes) -> "Record":
        """Inverse of :meth:`to_line`."""
        value = orjson.loads(line)
        return cls(value["id"], value["image"], tuple(Turn(**turn) for turn in value["turns"]))


@dataclass(frozen=True)
class Reject:
    """A record that cannot be trained on, with the category it is counted under."""

    id: str
    reason: Reason
    message: str


class _Rejected(ValueError):  # noqa: N818 (a verdict on the data, not a fault of the program)
    def __init__(self, reason: ConversationReason, message: str) -> None:
        super().__init__(message)
        self.reason: ConversationReason = reason


def read_llava(source: Path, image_root: Path, max_pixels: int) -> Iterator[Record | Reject]:
    """Yield every record of ``source`` in order, validated, its image decoded in full (on all processors).

    An image that many records name is not decoded for each of them. Memory does not grow with the number of records.

    Args:
        source: a JSON array, JSON lines, a parquet file, or a folder of parquet shards.
        image_root: the folder that image paths are relative to. Where the rows embed their images
            (:func:`normalign.data.rows.embeds_images`), those of good records are written there.

    Raises:
        ValueError: the file as a whole is neither JSON nor parquet.
        FileNotFoundError: the file or the image root does not exist.
    """
    if not image_root.is_dir():
        raise FileNotFoundError(f"image root {image_root} is not a folder; correct the path")
    check = ImageCheck(image_root, max_pixels)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pending: deque[Future[Record | Reject] | Record | Reject] = deque()
        for number, row in enumerate(read_rows(source)):
            image = row.get("image") if isinstance(row, dict) else None
            # What needs no decoding is quicker done than handed to a thread.
            at_once = image is None or (isinstance(image, str) and image in check)
            arguments = (row, f"#{number}", check)
            pending.append(check_row(*arguments) if at_once else pool.submit(check_row, *arguments))
            if len(pending) == _AHEAD:
                yield _result(pending.popleft())
        yield from map(_result, pending)


def _result(checked: Future[Record | Reject] | Record | Reject) -> Record | Reject:
    return checked.result() if isinstance(checked, Future) else checked


class ImageCheck:
    """Whether images below ``root`` can be used; the verdicts on the first ``REMEMBERED`` of them are kept."""

    def __init__(self, root: Path, max_pixels: int) -> None:
        self.root, self.max_pixels = root, max_pixels
        self._verdicts: dict[str, tuple[ImageReason, str] | None] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._verdicts

    def __call__(self, path: str) -> None:
        """Decode ``root / path`` in full, unless its verdict is known.

        Raises:
            ImageRejected: as :func:`normalign.data.images.open_image`.
        """
        verdict = self._verdicts[path] if path in self else self._decode(path)
        if len(self._verdicts) < REMEMBERED and len(path) <= _REMEMBERED_LENGTH:
            self._verdicts[path] = verdict
        if verdict is not None:
            raise ImageRejected(*verdict)

    def _decode(self, path: str) -> tuple[ImageReason, str] | None:
        try:
            open_image(path, self.root, self.max_pixels)
        except ImageRejected as error:
            return error.reason, str(error)
        return None


def check_row(row: Any, fallback_id: str, check: ImageCheck) -> Record | Reject:
    """One row as a record, or why not; ``fallback_id`` names a row that has no ``id``.

    An embedded image of a good record is written under the image root, and the record names that file.
    """
    name = _whole(row.get("id")) if isinstance(row, dict) else None
    # A lone surrogate, which UTF-8 lacks, is shown escaped; parse_conversation refuses it.
    record_id = _escaped(str(name)) if isinstance(name, str | int) else fallback_id
    embedded = row.get("image") if isinstance(row, dict) else None
    try:
        if isinstance(embedded, EmbeddedImage):
            record = parse_conversation({**row, "image": embedded.name}, record_id)
            stored = store_image(embedded.content, embedded.name, check.root, check.max_pixels)
            return replace(record, image=stored)
        record = parse_conversation(row, record_id)
        if record.image is not None:
            check(record.image)
    except (_Rejected, ImageRejected) as error:
        return Reject(record_id, error.reason, str(error))
    return record


def parse_conversation(row: Any, record_id: str) -> Record:
    """Check the structure, count the placeholder and take it out; the image is not looked at."""
    if not isinstance(row, dict):
        raise _Rejected("malformed_record", f"expected a JSON object, got {reprlib.repr(row)}")
    if not isinstance(_whole(row.get("id")), str | int):
        got = reprlib.repr(row.get("id"))
        raise _Rejected("malformed_record", f"field 'id' must be text or a whole number, got {got}")
    _require_utf8("id", str(row["id"]))
    image, conversation = row.get("image"), row.get("conversations")
    if image is not None and not isinstance(image, str):
        raise _Rejected("malformed_record", f"field 'image' must be one path or null, got {reprlib.repr(image)}")
    _require_utf8("image", image or "")
    if not isinstance(conversation, list):
        got = reprlib.repr(conversation)
        raise _Rejected("malformed_record", f"field 'conversations' must be a list, got {got}")
    if not conversation:
        raise _Rejected("no_turns", "field 'conversations' is empty")
    values = [_message(message, index) for index, message in enumerate(conversation)]
    if len(values) % 2:
        raise _Rejected("roles_out_of_order", "the last question has no answer")
    questions, answers = _without_placeholder(values[0::2], has_image=image is not None), values[1::2]
    if any(PLACEHOLDER in answer for answer in answers):
        raise _Rejected("placeholder_in_answer", f"an answer contains {PLACEHOLDER}")
    turns = []
    for index, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        turn = Turn(question.strip(), answer.strip())
        if _is_blank(turn.question):
            raise _Rejected("blank_question", f"question {index} is blank")
        if _is_blank(turn.answer):
            raise _Rejected("blank_answer", f"answer {index} is blank")
        turns.append(turn)
    return Record(record_id, image, tuple(turns))


def _whole(value: Any) -> Any:
    """1.0 as 1: a table of numbers has all of them as floats once one is missing."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _require_utf8(field: str, text: str) -> None:
    """Refuse lone surrogates: JSON can spell them, but no file in UTF-8 and no tokenizer can hold them."""
    if not text.isascii() and text != _escaped(text):
        raise _Rejected("malformed_record", f"{field} has half a surrogate pair: {reprlib.repr(text)}")


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _message(message: Any, index: int) -> str:
    """Text of one message, whose speaker has to be the one whose turn it is."""
    if not isinstance(message, dict) or not isinstance(message.get("value"), str):
        raise _Rejected("malformed_record", f"conversations[{index}] must have 'from' and 'value' as text")
    expected = ("human", "gpt")[index % 2]
    if message.get("from") != expected:
        raise _Rejected(
            "roles_out_of_order",
            f"conversations[{index}] is from {reprlib.repr(message.get('from'))}, not {expected!r}",
        )
    _require_utf8(f"conversations[{index}]", message["value"])
    return message["value"]


def _is_blank(stripped: str) -> bool:
    """No character that can be seen; zero-width spaces and control characters cannot."""
    return not any(character.isprintable() and not character.isspace() for character in stripped)


def _without_placeholder(questions: list[str], has_image: bool) -> list[str]:
    """The questions less the placeholder: exactly one, in the first, if there is an image; else none."""
    total = sum(question.count(PLACEHOLDER) for question in questions)
    if not has_image and total:
        raise _Rejected("placeholder_without_image", f"{PLACEHOLDER} in a record without field 'image'")
    if has_image and PLACEHOLDER not in questions[0]:
        raise _Rejected("placeholder_missing", f"the first question has no {PLACEHOLDER}")
    first = questions[0].replace(PLACEHOLDER, "", 1)
    if total > 1 or PLACEHOLDER in first:  # taking one out of "<im<image>age>" leaves another
        raise _Rejected("placeholder_repeated", f"{PLACEHOLDER} occurs {max(total, 2)} times, 1 expected")
    return [first, *questions[1:]]


class Records(Sequence[Record]):
    """The records of a prepared ``stage1.jsonl`` or ``stage2.jsonl``, read one at a time where they are asked for.

    Only where each line begins is held (8 bytes a record), so that any order of reading costs the same.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._starts = _line_starts(self._file)

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]  # negative ones count from the end, others out of range raise IndexError
        start, end = int(self._starts[place]), int(self._starts[place + 1])
        return Record.from_line(os.pread(self._file.fileno(), end - start, start))


def _line_starts(file: FileIO) -> np.ndarray:
    """Byte offsets (records + 1,) of the lines of ``file``; the last is where the file ends."""
    found, size = [np.zeros(1, dtype=np.int64)], 0
    while chunk := file.read(_INDEX_CHUNK):
        found.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")) + (size + 1))
        size += len(chunk)
    starts = np.concatenate(found)
    return starts if starts[-1] == size else np.append(starts, size)
