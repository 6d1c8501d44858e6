"""The LLaVA reader: a record is valid or rejected under exactly one reason; the manifest counts all of them."""

import json
import math
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from normalign.data import llava
from normalign.data.images import ImageReason, open_image
from normalign.data.llava import (
    PLACEHOLDER,
    ConversationReason,
    ImageCheck,
    Record,
    Records,
    Reject,
    Turn,
    check_row,
    read_llava,
)
from normalign.data.manifest import Dropped, Manifest, Tally, count_dropped, explain_dropped, require_kept
from normalign.files import write_lines

LIMIT = 10_000


def collect(rows: Iterable[Record | Reject], root: Path) -> tuple[list[Record], Manifest]:
    """What passes a tally, and what it says in the end."""
    tally = Tally(root)
    return [Record.from_line(line) for line in tally.lines(rows)], tally.manifest()


def talk(*values: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[i % 2], "value": value} for i, value in enumerate(values)]


def row(name: str, image: str | None, *values: str) -> dict[str, Any]:
    return {"id": name, "image": image, "conversations": talk(*values)}


ASK = f"{PLACEHOLDER}\nWhat?"
# One bad row for each reason there is.
BAD: dict[str, Any] = {
    "malformed_record": {"id": "x", "image": ["a.png"], "conversations": talk("q", "a")},
    "no_turns": row("x", None),
    "roles_out_of_order": {"id": "x", "conversations": talk("q", "a")[::-1]},
    "blank_question": row("x", None, " ", "a"),
    "blank_answer": row("x", "ok.png", ASK, " \n"),
    "placeholder_missing": row("x", "ok.png", "What?", "a", ASK, "b"),
    "placeholder_repeated": row("x", "ok.png", ASK + PLACEHOLDER, "a"),
    "placeholder_in_answer": row("x", "ok.png", ASK, PLACEHOLDER),
    "placeholder_without_image": row("x", None, ASK, "a"),
    "image_outside_root": row("x", "../ok.png", ASK, "a"),
    "image_missing": row("x", "none.png", ASK, "a"),
    "image_empty": row("x", "zero.png", ASK, "a"),
    "image_too_large": row("x", "large.png", ASK, "a"),
    "image_undecodable": row("x", "text.png", ASK, "a"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    Image.new("RGB", (8, 8), (1, 2, 3)).save(tmp_path / "ok.png")
    Image.new("RGB", (101, 100)).save(tmp_path / "large.png")
    (tmp_path / "zero.png").touch()
    (tmp_path / "text.png").write_text("no picture")
    return tmp_path


def test_every_reason_has_a_row_that_is_rejected_for_it(root: Path) -> None:
    assert set(BAD) == {*typing.get_args(ConversationReason), *typing.get_args(ImageReason)}
    for reason, bad in BAD.items():
        verdict = check_row(bad, "#0", ImageCheck(root, LIMIT))
        assert isinstance(verdict, Reject), reason
        assert (verdict.id, verdict.reason) == ("x", reason)


@pytest.mark.parametrize(
    "bad",
    [
        "text",
        None,
        {"conversations": talk("q", "a")},
        {"id": True, "conversations": "no"},
        {"id": "x", "conversations": [{"from": "human"}, {"from": "gpt", "value": 3}]},
        row("x", None, "q \ud800", "a"),
        row("x", None, "q", "a \udfff"),
        row("x", "\ud800.png", ASK, "a"),
        row("x \ud800", None, "q", "a"),
    ],
)
def test_rows_of_another_shape_are_malformed(root: Path, bad: Any) -> None:
    verdict = check_row(bad, "#7", ImageCheck(root, LIMIT))
    assert isinstance(verdict, Reject)
    assert verdict.reason == "malformed_record"
    verdict.id.encode()  # it is written to dataset.json


def test_question_without_answer_is_out_of_order(root: Path) -> None:
    verdict = check_row(row("x", None, "q", "a", "q"), "#0", ImageCheck(root, LIMIT))
    assert isinstance(verdict, Reject)
    assert verdict.reason == "roles_out_of_order"


@pytest.mark.parametrize("remembered", [0, 1, 1 << 18])
def test_records_of_one_image_share_its_verdict(root: Path, monkeypatch: pytest.MonkeyPatch, remembered: int) -> None:
    decoded: list[str] = []

    def count(path: str, *arguments: Any) -> Image.Image:
        decoded.append(path)
        return open_image(path, *arguments)

    monkeypatch.setattr(llava, "open_image", count)
    monkeypatch.setattr(llava, "REMEMBERED", remembered)
    monkeypatch.setattr(llava, "_AHEAD", 1)
    rows = [row(f"{name}{i}", name, ASK, "a") for i in range(3) for name in ("ok.png", "text.png")]
    (root / "data.json").write_text(json.dumps(rows))
    verdicts = list(read_llava(root / "data.json", root, LIMIT))
    assert [isinstance(verdict, Record) for verdict in verdicts] == [True, False] * 3
    assert {verdict.reason for verdict in verdicts if isinstance(verdict, Reject)} == {"image_undecodable"}
    assert len({verdict.message for verdict in verdicts if isinstance(verdict, Reject)}) == 1
    assert len(decoded) == {0: 6, 1: 4, 1 << 18: 2}[remembered]


def test_array_and_lines_give_the_same_records_in_order(root: Path) -> None:
    rows = [row("1", "ok.png", ASK, "a", "And?", "b"), row("2", None, "q", "a"), BAD["blank_answer"]]
    (root / "array.json").write_text(json.dumps(rows))
    (root / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    array, lines = (list(read_llava(root / name, root, LIMIT)) for name in ("array.json", "lines.jsonl"))
    assert array == lines
    assert array[0] == Record("1", "ok.png", (Turn("What?", "a"), Turn("And?", "b")))
    assert array[1] == Record("2", None, (Turn("q", "a"),))


def test_order_is_kept_over_more_records_than_are_under_way_at_once(root: Path) -> None:
    rows = [row(str(i), "ok.png" if i % 3 else None, ASK if i % 3 else "q", "a") for i in range(300)]
    (root / "array.json").write_text(json.dumps(rows))
    read = list(read_llava(root / "array.json", root, LIMIT))
    assert [record.id for record in read] == [str(i) for i in range(300)]
    assert all(isinstance(record, Record) for record in read)


def test_broken_line_costs_itself_alone_and_is_named_by_its_place(root: Path) -> None:
    (root / "lines.jsonl").write_text('{"id": \n' + json.dumps(row("1", None, "q", "a")))
    first, second = read_llava(root / "lines.jsonl", root, LIMIT)
    assert isinstance(first, Reject)
    assert (first.id, first.reason) == ("#0", "malformed_record")
    assert isinstance(second, Record)


def test_broken_array_names_the_file(root: Path) -> None:
    (root / "array.json").write_text("[{")
    with pytest.raises(ValueError, match=r"array\.json"):
        list(read_llava(root / "array.json", root, LIMIT))


messages = st.fixed_dictionaries(
    {
        "from": st.sampled_from(["human", "gpt", "system"]),
        "value": st.lists(st.sampled_from([PLACEHOLDER, "<im", "age>", "word", " "]), max_size=4).map("".join),
    }
)
alternating = st.lists(messages, max_size=6).map(
    lambda talk: [{**message, "from": ("human", "gpt")[i % 2]} for i, message in enumerate(talk)]
)


@given(conversation=st.one_of(alternating, st.lists(messages, max_size=6)), has_image=st.booleans())
def test_no_conversation_yields_an_invalid_record(
    tmp_path_factory: pytest.TempPathFactory, conversation: list[dict[str, str]], has_image: bool
) -> None:
    root = tmp_path_factory.getbasetemp()
    if not (root / "ok.png").exists():
        Image.new("RGB", (8, 8)).save(root / "ok.png")
    image = "ok.png" if has_image else None
    record = check_row({"id": 1, "image": image, "conversations": conversation}, "#0", ImageCheck(root, LIMIT))
    if isinstance(record, Reject):
        return
    assert [message["from"] for message in conversation] == ["human", "gpt"] * len(record.turns)
    assert sum(message["value"].count(PLACEHOLDER) for message in conversation) == int(has_image)
    assert (PLACEHOLDER in conversation[0]["value"]) == has_image
    for turn in record.turns:
        assert turn.question.strip() and turn.answer.strip()
        assert PLACEHOLDER not in turn.question and PLACEHOLDER not in turn.answer


def test_records_survive_writing_and_loading(root: Path) -> None:
    records = [Record("ä", "ok.png", (Turn("q\n", "a"),)), Record("2", None, (Turn("x", "y"), Turn("z", "w")))]
    write_lines(root / "stage1.jsonl", (record.to_line() for record in records))
    loaded = Records(root / "stage1.jsonl")
    assert list(loaded) == records and len(loaded) == 2
    assert loaded[-1] == records[1] and loaded[::-1] == records[::-1]
    with pytest.raises(IndexError):
        loaded[2]


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=20))
def test_any_record_is_read_alone_in_any_order(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    records = [Record(str(i), None, (Turn(text, text),)) for i, text in enumerate(texts)]
    write_lines(path, (record.to_line() for record in records))
    loaded = Records(path)
    assert len(loaded) == len(records)
    assert [loaded[i] for i in reversed(range(len(records)))] == records[::-1]


def test_index_is_right_where_a_line_crosses_a_chunk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llava, "_INDEX_CHUNK", 7)
    records = [Record(str(i), None, (Turn("q" * i, "a"),)) for i in range(20)]
    write_lines(root / "stage1.jsonl", (record.to_line() for record in records))
    assert list(Records(root / "stage1.jsonl")) == records
    text = (root / "stage1.jsonl").read_text()
    (root / "stage1.jsonl").write_text(text.rstrip("\n"))
    assert list(Records(root / "stage1.jsonl")) == records  # also without a last line break


def test_manifest_counts_each_reason_and_keeps_ten_examples(root: Path) -> None:
    rows = [check_row(row(f"good{i}", "ok.png", ASK, "a", "q", "b"), "", ImageCheck(root, LIMIT)) for i in range(3)]
    rows += [check_row(row(f"bad{i}", None, "q", ""), "", ImageCheck(root, LIMIT)) for i in range(12)]
    records, manifest = collect(rows, root)
    assert (manifest.read, manifest.kept, manifest.dropped, manifest.turns) == (15, 3, 12, 6)
    assert manifest.dropped_by_reason["blank_answer"].count == 12
    assert manifest.dropped_by_reason["blank_answer"].examples == [f"bad{i}" for i in range(10)]
    assert [record.id for record in records] == ["good0", "good1", "good2"]
    assert manifest.summary() == "3 of 15 records kept, dropped: 12 blank_answer"


def test_reasons_are_explained_with_a_few_ids_and_what_was_wrong_with_the_first() -> None:
    dropped: dict[str, Dropped] = {}
    for number in range(12):
        count_dropped(dropped, "blank_answer", str(number), f"answer {number} is blank")
    count_dropped(dropped, "image_empty", "x", "long " * 1000)
    assert dropped["blank_answer"] == Dropped(12, [str(i) for i in range(10)], "answer 0 is blank")
    explained = explain_dropped(dropped)
    assert explained.startswith("12 blank_answer (0, 1, 2, ...; answer 0 is blank), 1 image_empty (x; long ")
    assert len(explained) < 400


@pytest.mark.parametrize(("number", "kept"), [(1.0, "1"), (2.0**70, str(2**70)), (1.5, None), (math.nan, None)])
def test_a_whole_number_may_be_written_as_a_float(root: Path, number: float, kept: str | None) -> None:
    verdict = check_row({"id": number, "conversations": talk("q", "a")}, "#0", ImageCheck(root, LIMIT))
    assert (verdict.id if isinstance(verdict, Record) else None) == kept
    assert kept is not None or (isinstance(verdict, Reject) and verdict.reason == "malformed_record")


@pytest.mark.parametrize("nothing", ["\u200b", "\u200b \u200b", "\0", "\u2060\n\u200d"])
@pytest.mark.parametrize("place", ["blank_question", "blank_answer"])
def test_text_of_which_nothing_can_be_seen_is_blank(root: Path, nothing: str, place: str) -> None:
    values = (nothing, "a") if place == "blank_question" else ("q", nothing)
    verdict = check_row(row("x", None, *values), "#0", ImageCheck(root, LIMIT))
    assert isinstance(verdict, Reject) and verdict.reason == place


def test_pictures_in_the_place_of_paths_are_refused_and_not_kept(root: Path) -> None:
    check = ImageCheck(root, LIMIT)
    for number in range(3):
        verdict = check_row(row("x", f"data:image/png;base64,{number}" + "A/" * 50_000, ASK, "a"), "#0", check)
        assert isinstance(verdict, Reject) and verdict.reason == "image_missing" and len(verdict.message) < 200
    assert not [path for path in check._verdicts if len(path) > 1000]


def test_fingerprint_depends_on_text_and_on_image_bytes(root: Path) -> None:
    def fingerprint(answer: str) -> str:
        return collect([Record("1", "ok.png", (Turn("q", answer),))], root)[1].fingerprint

    before = fingerprint("a")
    assert before == fingerprint("a") != fingerprint("b")
    Image.new("RGB", (8, 8), (9, 9, 9)).save(root / "ok.png")
    assert fingerprint("a") != before


def test_too_many_dropped_records_stop_the_stage_with_reasons_and_counts(root: Path) -> None:
    _, manifest = collect([Record("1", "ok.png", (Turn("q", "a"),)), Reject("2", "no_turns", "it is empty")], root)
    require_kept(manifest, 0.5, "data.json", "mend it")
    with pytest.raises(ValueError, match=r"data\.json: 1 of 2 .* 1 no_turns \(2; it is empty\); mend it"):
        require_kept(manifest, 0.49, "data.json", "mend it")
    with pytest.raises(ValueError, match="no record at all; mend it"):
        require_kept(collect([], root)[1], 1.0, "data.json", "mend it")


def test_records_without_any_image_stop_the_stage(root: Path) -> None:
    _, manifest = collect([Record("1", None, (Turn("q", "a"),))], root)
    with pytest.raises(ValueError, match=r"data\.json: none of the 1 records kept has an image.*; mend it"):
        require_kept(manifest, 1.0, "data.json", "mend it")
