"""Reader of LLaVA-format conversations (``id``, ``image``, ``conversations``): a JSON array or JSON lines."""

import itertools
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from normalign.data.images import ImageReason, ImageRejected, open_image

PLACEHOLDER = "<image>"
_BATCH = 1024

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

    def to_json(self) -> dict[str, Any]:
        """The record as one line of a prepared data set."""
        return {"id": self.id, "image": self.image, "turns": [asdict(turn) for turn in self.turns]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Record":
        """Inverse of :meth:`to_json`."""
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


def read_llava(json_path: Path, image_root: Path, max_pixels: int) -> Iterator[Record | Reject]:
    """Yield every record of ``json_path`` in order, validated, its image decoded in full (on all processors).

    Raises:
        ValueError: the file as a whole is not JSON.
        FileNotFoundError: the file or the image root does not exist.
    """
    if not image_root.is_dir():
        raise FileNotFoundError(f"image root {image_root} is not a folder; correct the path in the settings")
    rows = _read_rows(json_path)
    bar = tqdm(total=len(rows), desc=json_path.name, unit="record", disable=None)

    def check(numbered: tuple[int, Any]) -> Record | Reject:
        return check_row(numbered[1], f"#{numbered[0]}", image_root, max_pixels)

    with bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        numbered = enumerate(rows)
        while batch := list(itertools.islice(numbered, _BATCH)):  # bounded: map() queues all it is given
            for result in pool.map(check, batch):
                bar.update()
                yield result


def _read_rows(json_path: Path) -> list[Any]:
    """Rows of an array, or of lines; a line that is not JSON stays a string, which no record is."""
    text = json_path.read_text(encoding="utf-8")
    if text.lstrip()[:1] == "[":
        try:
            return list(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"{json_path} is neither a JSON array nor JSON lines: {error}") from error
    return [_parse_line(line) for line in text.split("\n") if line.strip()]


def _parse_line(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return line


def check_row(row: Any, fallback_id: str, image_root: Path, max_pixels: int) -> Record | Reject:
    """One row of LLaVA JSON as a record, or why not; ``fallback_id`` names a row that has no ``id``."""
    name = row.get("id") if isinstance(row, dict) else None
    record_id = str(name) if isinstance(name, str | int) else fallback_id
    try:
        record = parse_conversation(row, record_id)
        if record.image is not None:
            open_image(record.image, image_root, max_pixels)
    except (_Rejected, ImageRejected) as error:
        return Reject(record_id, error.reason, str(error))
    return record


def parse_conversation(row: Any, record_id: str) -> Record:
    """Check the structure, count the placeholder and take it out; the image is not looked at."""
    if not isinstance(row, dict):
        raise _Rejected("malformed_record", f"expected a JSON object, got {str(row)[:80]!r}")
    if not isinstance(row.get("id"), str | int):
        raise _Rejected("malformed_record", f"field 'id' must be text or a number, got {row.get('id')!r}")
    image, conversation = row.get("image"), row.get("conversations")
    if image is not None and not isinstance(image, str):
        raise _Rejected("malformed_record", f"field 'image' must be one path or null, got {image!r}")
    if not isinstance(conversation, list):
        raise _Rejected("malformed_record", f"field 'conversations' must be a list, got {conversation!r}")
    if not conversation:
        raise _Rejected("no_turns", "field 'conversations' is empty")
    values = [_message(message, index) for index, message in enumerate(conversation)]
    if len(values) % 2:
        raise _Rejected("roles_out_of_order", "the last question has no answer")
    questions, answers = _without_placeholder(values[0::2], has_image=image is not None), values[1::2]
    if any(PLACEHOLDER in answer for answer in answers):
        raise _Rejected("placeholder_in_answer", f"an answer contains {PLACEHOLDER}")
    for index, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        if not question.strip():
            raise _Rejected("blank_question", f"question {index} is blank")
        if not answer.strip():
            raise _Rejected("blank_answer", f"answer {index} is blank")
    turns = tuple(Turn(q.strip(), a.strip()) for q, a in zip(questions, answers, strict=True))
    return Record(record_id, image, turns)


def _message(message: Any, index: int) -> str:
    """Text of one message, whose speaker has to be the one whose turn it is."""
    if not isinstance(message, dict) or not isinstance(message.get("value"), str):
        raise _Rejected("malformed_record", f"conversations[{index}] must have 'from' and 'value' as text")
    expected = ("human", "gpt")[index % 2]
    if message.get("from") != expected:
        raise _Rejected(
            "roles_out_of_order", f"conversations[{index}] is from {message.get('from')!r}, not {expected!r}"
        )
    return message["value"]


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


def load_records(path: Path) -> list[Record]:
    """The records of a prepared ``stage1.jsonl`` or ``stage2.jsonl``."""
    with path.open(encoding="utf-8") as lines:
        return [Record.from_json(json.loads(line)) for line in lines]
