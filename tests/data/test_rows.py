"""Rows as data sets are published: the streamed array equals json.loads, parquet equals what was written to it."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from normalign.data import rows
from normalign.data.llava import Record, Reject, Turn, read_llava
from normalign.data.rows import EmbeddedImage, embeds_images, read_rows

LIMIT = 10_000
TALK = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "That."}]
IMAGE_TYPE = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=8,
)


def write(folder: Path, text: str, name: str = "array.json") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@given(
    array=st.lists(values, max_size=6),
    chunk=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
@settings(deadline=None)
def test_streamed_array_equals_json_loads_whatever_the_chunks(
    tmp_path_factory: pytest.TempPathFactory, array: list[Any], chunk: int, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(array, indent=indent, ensure_ascii=ascii_only)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "CHUNK", chunk)
        assert list(read_rows(write(tmp_path_factory.getbasetemp(), f" \n{text}\r\n"))) == array


@given(
    array=st.lists(values, min_size=1, max_size=3),
    chunk=st.integers(1, 40),
    edit=st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(["", "]", "}", '"', ",", "x", "\\", "\n"])),
)
@settings(deadline=None)
def test_spoilt_array_is_refused_exactly_where_json_loads_refuses_it(
    tmp_path_factory: pytest.TempPathFactory, array: list[Any], chunk: int, edit: tuple[float, str]
) -> None:
    text = json.dumps(array)
    place = 1 + int(edit[0] * (len(text) - 1))
    text = text[:place] + edit[1] + text[place + 1 :]
    path = write(tmp_path_factory.getbasetemp(), text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "CHUNK", chunk)
        try:
            expected = json.loads(text)
        except json.JSONDecodeError:
            with pytest.raises(ValueError, match=r"array\.json is neither a JSON array nor JSON lines: .*\(char \d+\)"):
                list(read_rows(path))
        else:
            assert list(read_rows(path)) == expected


@pytest.mark.parametrize("text", ["[1,2", "[1 2]", "[1,]", "[1] 2", "[,1]", "[", '["a', '[{"a": tru'])
def test_error_names_the_character_that_json_names(tmp_path: Path, text: str) -> None:
    with pytest.raises(json.JSONDecodeError) as plain:
        json.loads(text)
    with pytest.raises(ValueError, match="array") as streamed:
        list(read_rows(write(tmp_path, text)))
    assert f"(char {plain.value.pos})" in str(streamed.value)


def test_error_early_in_a_long_file_is_found_without_reading_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "CHUNK", 100)
    path = write(tmp_path, '[{"a": 1}, {"a" 1}, ' + "{}," * 10_000 + "{}]")
    with path.open(encoding="utf-8") as handle:
        array = rows._ArrayText(handle, path)
        array.next_character()
        with pytest.raises(ValueError, match=r"Expecting ':' delimiter \(char 16\)"):
            list(array.rows())
        assert array.before + len(array.text) <= 100


def test_text_that_is_not_utf8_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "latin.json").write_bytes('["é"]'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.json is not UTF-8"):
        list(read_rows(tmp_path / "latin.json"))


def test_lines_of_any_ending_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    assert list(read_rows(write(tmp_path, '\ufeff{"a": 1}\r\n\r\n{"b": \n[2]', "lines.jsonl"))) == [
        {"a": 1},
        '{"b": ',
        [2],
    ]
    assert list(read_rows(write(tmp_path, "", "empty.jsonl"))) == []
    assert list(read_rows(write(tmp_path, "\ufeff[3]", "marked.json"))) == [3]


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    record = {"id": "x", "image": None, "conversations": [{"from": "human", "value": "q" * 500}] * 2}
    line = json.dumps(record)
    path = tmp_path / "long.json"
    with path.open("w") as handle:
        handle.write("[" + line)
        handle.writelines([f",\n{line}"] * 60_000)  # about 65 MB of text, 150 MB as objects
        handle.write("]")
    code = f"""
from pathlib import Path
from normalign.data.rows import read_rows
def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024
before = peak()
count = sum(1 for _ in read_rows(Path({str(path)!r})))
print(count, peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, grown = map(int, done.stdout.split())
    assert count == 60_001
    assert grown < 30  # MB


def picture(kind: str, colour: tuple[int, int, int] = (1, 2, 3), side: int = 8) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(buffer, kind)
    return buffer.getvalue()


def shard(path: Path, images: list[Any], image_type: pyarrow.DataType = IMAGE_TYPE, group: int = 2) -> None:
    path.parent.mkdir(exist_ok=True)
    ids = [f"{path.stem}{i}" for i in range(len(images))]
    columns = {
        "id": ids,
        "conversations": [TALK if image is not None else [{**TALK[0], "value": "What?"}, TALK[1]] for image in images],
        "image": pyarrow.array(images, image_type),
        "data_source": ["somewhere"] * len(images),
    }
    parquet.write_table(pyarrow.table(columns), path, row_group_size=group)


def test_shards_with_embedded_images_are_read_in_order_and_their_images_written_once(tmp_path: Path) -> None:
    shards, root = tmp_path / "shards", tmp_path / "images"
    root.mkdir()
    jpeg, png = picture("JPEG"), picture("PNG", (9, 9, 9))
    shard(shards / "b.parquet", [{"bytes": jpeg, "path": "wrong.png"}])
    shard(shards / "a.parquet", [{"bytes": png, "path": None}, None, {"bytes": None, "path": None}, {"bytes": b""}])
    assert embeds_images(shards)
    first, second, third, empty, last = read_llava(shards, root, LIMIT)
    assert first == Record("a0", "a-0.png", (Turn("What?", "That."),))
    assert second == Record("a1", None, (Turn("What?", "That."),))
    assert isinstance(third, Reject) and third.reason == "placeholder_without_image"
    assert isinstance(empty, Reject) and (empty.id, empty.reason) == ("a3", "image_empty")
    assert last == Record("b0", "b-0.jpeg", (Turn("What?", "That."),))
    assert {file.name: file.read_bytes() for file in root.iterdir()} == {"a-0.png": png, "b-0.jpeg": jpeg}


def test_bad_embedded_images_are_rejected_by_reason_and_not_written(tmp_path: Path) -> None:
    root = tmp_path / "images"
    root.mkdir()
    contents = {
        "image_undecodable": picture("JPEG")[:200],
        "image_too_large": picture("PNG", side=101),
        "image_empty": b"",
    }
    shard(tmp_path / "bad.parquet", [{"bytes": content} for content in contents.values()])
    verdicts = list(read_llava(tmp_path / "bad.parquet", root, LIMIT))
    assert [v.reason for v in verdicts if isinstance(v, Reject)] == list(contents)
    assert not list(root.iterdir())


def test_parquet_that_names_files_is_read_like_json(tmp_path: Path) -> None:
    (tmp_path / "ok.png").write_bytes(picture("PNG"))
    shard(tmp_path / "named.parquet", ["ok.png", None, "none.png"], pyarrow.string())
    assert not embeds_images(tmp_path / "named.parquet")
    first, second, third = read_llava(tmp_path / "named.parquet", tmp_path, LIMIT)
    assert isinstance(first, Record) and first.image == "ok.png"
    assert isinstance(second, Record) and second.image is None
    assert isinstance(third, Reject) and third.reason == "image_missing"


def test_more_rows_than_a_batch_are_numbered_through(tmp_path: Path) -> None:
    content = picture("PNG")
    shard(tmp_path / "many.parquet", [{"bytes": content}] * 71, group=50)
    names = [row["image"] for row in read_rows(tmp_path / "many.parquet")]
    assert names == [EmbeddedImage(f"many-{i}", content) for i in range(71)]


def test_what_is_no_shard_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no"):
        embeds_images(tmp_path)
    (tmp_path / "a.parquet").write_text("no parquet at all")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as parquet"):
        embeds_images(tmp_path)
    parquet.write_table(pyarrow.table({"id": ["1"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no column 'conversations'; its columns are id"):
        embeds_images(tmp_path)
    shard(tmp_path / "a.parquet", ["ok.png"], pyarrow.string())
    shard(tmp_path / "b.parquet", [{"bytes": b"x"}])
    with pytest.raises(ValueError, match=r"b\.parquet embeds its images, a\.parquet names files"):
        embeds_images(tmp_path)


def test_a_byte_order_mark_of_utf8_is_no_part_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "array.json").write_text('[{"id": 1}]', encoding="utf-8-sig")
    (tmp_path / "lines.jsonl").write_text('{"id": 1}\n{"id": 2}\n', encoding="utf-8-sig")
    assert list(read_rows(tmp_path / "array.json")) == [{"id": 1}]
    assert list(read_rows(tmp_path / "lines.jsonl")) == [{"id": 1}, {"id": 2}]


@pytest.mark.parametrize(
    "content", ['[{"id": 1}]'.encode("utf-16"), b"\x00\xff\x00", b"[" * 100_000, b"[" + b"1" * 5000]
)
def test_what_is_no_json_at_all_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"odd\.json is n(ot UTF-8|either a JSON array nor JSON lines)"):
        list(read_rows(tmp_path / "odd.json"))


@pytest.mark.parametrize("line", ['{"id": ' + "[" * 100_000, '{"id": ' + "1" * 5000 + "}"])
def test_a_line_that_no_parser_takes_costs_itself_alone(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, line + '\n{"id": 2}\n', "lines.jsonl")
    assert list(read_rows(path)) == [line, {"id": 2}]


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.list_(pyarrow.uint8())])
def test_what_stands_in_the_place_of_an_images_bytes_is_malformed(tmp_path: Path, kind: pyarrow.DataType) -> None:
    content = [{"bytes": "abc" if kind == pyarrow.string() else [1, 2], "path": None}]
    shard(tmp_path / "odd.parquet", content, pyarrow.struct([("bytes", kind), ("path", pyarrow.string())]))
    (verdict,) = read_llava(tmp_path / "odd.parquet", tmp_path, LIMIT)
    assert isinstance(verdict, Reject) and verdict.reason == "malformed_record"


def test_a_column_that_python_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    far = pyarrow.array([2**62], pyarrow.timestamp("us"))
    parquet.write_table(pyarrow.table({"id": far, "conversations": [TALK]}), tmp_path / "far.parquet")
    with pytest.raises(ValueError, match=r"far\.parquet cannot be read as parquet after row 0"):
        list(read_rows(tmp_path / "far.parquet"))


def test_a_damaged_shard_is_named_wherever_the_damage_lies(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    shard(path, [{"bytes": picture("PNG"), "path": None}] * 4)
    whole = path.read_bytes()
    for place in range(0, len(whole), 23):
        path.write_bytes(whole[:place] + bytes(b ^ 0xFF for b in whole[place : place + 20]) + whole[place + 20 :])
        try:
            embeds_images(path)
            list(read_rows(path))
        except ValueError as error:
            assert "a.parquet" in str(error), place


def test_text_in_a_shard_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    odd = pyarrow.array([b"\xff"]).cast(pyarrow.binary()).view(pyarrow.string())
    talk = pyarrow.array([TALK])
    parquet.write_table(pyarrow.table({"id": odd, "conversations": talk}), tmp_path / "odd.parquet")
    with pytest.raises(ValueError, match=r"odd\.parquet cannot be read as parquet after row 0"):
        list(read_rows(tmp_path / "odd.parquet"))
