"""The lmms-eval adapter: shuffled images, and the two faults of lmms-eval that are worked around."""

import importlib
import json
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ImageFile

from normalign.data.tasks import write_tasks
from normalign.vlm.scoring import Question, score

from ..conftest import Tiny
from .helpers import picture

lmms_adapter = importlib.import_module("normalign.vlm.lmms_adapter")
ITEMS = [
    {"id": "0", "kind": "x", "image": "a.png", "question": "What?", "choices": ["a dot", "a box"], "answer": 0},
    {"id": "1", "kind": "x", "image": "b.png", "question": "Where?", "choices": ["left", "right"], "answer": 1},
    {"id": "2", "kind": "x", "image": "a.png", "question": "How many?", "choices": ["one", "two", "six"], "answer": 2},
]


@given(st.lists(st.sampled_from([None, "a", "b", "c", "d"]), min_size=1, max_size=12), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_shuffling_gives_no_item_its_own_image_and_is_a_function_of_the_seed(own: list[str | None], seed: int) -> None:
    adapter = object.__new__(lmms_adapter.LmmsAdapter)
    adapter.seed = seed
    documents = {("task", number): key for number, key in enumerate(own)}
    distinct = {key for key in own if key is not None}
    if len(distinct) < 2:
        with pytest.raises(ValueError, match="two different"):
            adapter._derange(documents)
        return
    shown = adapter._derange(documents)
    assert shown == adapter._derange(documents) and shown.keys() == documents.keys()
    assert {key for key in shown.values() if key is not None} == distinct
    for document, key in documents.items():
        assert shown[document] is None if key is None else shown[document] not in (None, key)
    by_own = {key: {shown[d] for d, k in documents.items() if k == key} for key in distinct}
    assert all(len(others) == 1 for others in by_own.values()), "questions that share an image still share one"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with one benchmark of three questions about two images."""
    folder = tmp_path_factory.mktemp("dataset")
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "tiny.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    for key in "ab":
        picture(key).save(folder / f"{key}.png")
    return folder


@pytest.mark.parametrize("shuffled", [False, True])
def test_lmms_eval_gives_each_item_its_own_likelihoods_and_accuracy(
    tiny: Tiny, dataset: Path, tmp_path: Path, shuffled: bool
) -> None:
    model, processor = tiny.model(), tiny.processor()
    adapter = lmms_adapter.LmmsAdapter(model, processor, 4096, 3)
    adapter.shuffled = shuffled
    write_tasks(dataset, ("tiny",), tmp_path)
    samples = lmms_adapter.run_task(adapter, "tiny", [tmp_path])
    images = {f"{key}.png": picture({"a": "b", "b": "a"}[key] if shuffled else key) for key in "ab"}
    questions = [Question(i["question"], tuple(i["choices"]), i["image"]) for i in ITEMS]  # type: ignore[arg-type]
    expected = score(model, processor, questions, images, 4096)
    for item, sample, result in zip(ITEMS, samples, expected, strict=True):
        nll: list[Any] = [response[0] for response in sample["filtered_resps"]]
        assert nll == pytest.approx(result.nll, rel=1e-5)
        assert sample["acc"] == float(min(range(len(nll)), key=nll.__getitem__) == item["answer"])


def test_documents_of_a_groups_tasks_keep_their_own_images(tiny: Tiny, dataset: Path, tmp_path: Path) -> None:
    backwards = "".join(json.dumps(item) + "\n" for item in reversed(ITEMS))
    (dataset / "benchmarks" / "backwards.jsonl").write_text(backwards)
    write_tasks(dataset, ("tiny", "backwards"), tmp_path)
    (tmp_path / "both.yaml").write_text("group: both\ntask: [tiny, backwards]\n")
    adapter = lmms_adapter.LmmsAdapter(tiny.model(), tiny.processor(), 4096, 3)
    samples = lmms_adapter.run_task(adapter, "both", [tmp_path])
    assert [sample["task"] for sample in samples] == ["backwards"] * len(ITEMS) + ["tiny"] * len(ITEMS)
    by_question = [
        {s["doc"]["question"]: s["filtered_resps"] for s in samples if s["task"] == t} for t in ("tiny", "backwards")
    ]
    for question, responses in by_question[0].items():
        assert [r[0] for r in responses] == pytest.approx([r[0] for r in by_question[1][question]], rel=1e-5)


def test_a_text_task_whose_visual_function_returns_none_has_no_image(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    item = {"id": "t", "image": None, "kind": "k", "question": "Who?", "choices": ["me", "you"], "answer": 0}
    (tmp_path / "benchmarks" / "words.jsonl").write_text(json.dumps(item) + "\n")
    write_tasks(tmp_path, ("words",), tmp_path / "tasks")
    (tmp_path / "tasks" / "utils.py").write_text("def doc_to_visual(doc):\n    return None\n")
    adapter = lmms_adapter.LmmsAdapter(tiny.model(), tiny.processor(), 100, 1)
    (sample,) = lmms_adapter.run_task(adapter, "words", [tmp_path / "tasks"])
    assert adapter.image_keys == {("words", 0): None} and len(sample["filtered_resps"]) == 2


def test_workaround_likelihood_tuples_pass_and_everything_else_is_left_to_lmms_eval() -> None:
    from lmms_eval import evaluator

    original = evaluator.unwrap_generation_output
    with lmms_adapter.quiet_lmms_eval():
        assert evaluator.unwrap_generation_output((1.5, True)) == ((1.5, True), None)
        assert evaluator.unwrap_generation_output("text") == original("text")
    assert evaluator.unwrap_generation_output is original


def test_importing_lmms_eval_does_not_make_truncated_images_pass() -> None:
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    with pytest.raises(KeyError), lmms_adapter.quiet_lmms_eval():
        assert ImageFile.LOAD_TRUNCATED_IMAGES is True
        raise KeyError
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_workaround_filelock_is_pinned_below_the_release_that_lost_what_lmms_eval_imports() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert "filelock<4.3" in project["optional-dependencies"]["pipeline"]
    assert [int(part) for part in re.findall(r"\d+", version("filelock"))[:2]] < [4, 3]
    importlib.import_module("filelock._api")


def test_a_task_that_cannot_be_run_is_named(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    write_tasks(tmp_path, ("absent",), tmp_path / "tasks")
    adapter = lmms_adapter.LmmsAdapter(tiny.model(), tiny.processor(), 100, 1)
    with pytest.raises(ValueError, match="lmms-eval task 'absent'"):
        lmms_adapter.run_task(adapter, "absent", [tmp_path / "tasks"])
