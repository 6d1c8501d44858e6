"""The generator: reproducible, balanced, without overlap between splits and without an answer in the question."""

import dataclasses
import hashlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from normalign.data.facts import held_out_facts, training_facts
from normalign.data.llava import Record, read_llava
from normalign.data.scenes import COLORS, POSITIONS, SHAPES, WORDS, Scene, Split, Thing, render
from normalign.data.synthetic import (
    BENCHMARKS,
    VISUAL,
    BenchmarkItem,
    benchmark_scenes,
    load_benchmark,
    presence_pairs,
    training_questions,
    training_scenes,
    write_dataset,
)
from normalign.settings import SyntheticSettings

SETTINGS = SyntheticSettings(
    seed=7,
    image_size=32,
    stage1_images=60,
    stage2_images=120,
    questions_per_image=8,
    presence_images=40,
    choice_images=120,
    reading_images=120,
    validation_images=40,
    text_items=200,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic")
    write_dataset(SETTINGS, path)
    return path


@pytest.fixture(scope="module")
def benchmarks(folder: Path) -> dict[str, list[BenchmarkItem]]:
    return {name: load_benchmark(folder / "benchmarks" / f"{name}.jsonl") for name in BENCHMARKS}


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def training_turns(folder: Path) -> list[tuple[str, str]]:
    records = list(read_llava(folder / "stage2.json", folder, 10_000))
    assert all(isinstance(record, Record) for record in records)
    return [(t.question, t.answer) for r in records if isinstance(r, Record) for t in r.turns]


def test_two_runs_are_byte_identical(folder: Path, tmp_path: Path) -> None:
    write_dataset(SETTINGS, tmp_path)
    assert digests(tmp_path) == digests(folder)


def test_an_item_does_not_depend_on_how_many_there_are(folder: Path, tmp_path: Path) -> None:
    sizes = {f.name: 10 for f in dataclasses.fields(SETTINGS) if f.name.endswith(("_images", "_items"))}
    write_dataset(dataclasses.replace(SETTINGS, **sizes), tmp_path)
    small, large = digests(tmp_path), digests(folder)
    pictures = [name for name in small if name.endswith(".png")]
    assert len(pictures) == 80
    assert all(small[name] == large[name] for name in pictures)
    for stage in ("stage1.json", "stage2.json"):
        ours, theirs = (json.loads((f / stage).read_text()) for f in (tmp_path, folder))
        assert ours[:10] == theirs[:10]
    for name in BENCHMARKS:
        ours, theirs = ((f / "benchmarks" / f"{name}.jsonl").read_text().splitlines() for f in (tmp_path, folder))
        assert set(ours) <= set(theirs)


def test_another_seed_gives_other_scenes() -> None:
    assert training_scenes(1, "stage1", 20) != training_scenes(2, "stage1", 20)


def test_no_scene_is_in_two_of_training_validation_and_benchmarks() -> None:
    training = {s.description() for stage in ("stage1", "stage2") for s in training_scenes(7, stage, 2000)}
    splits: tuple[Split, ...] = ("validation", "held_out")
    validation, held_out = (
        {s.description() for benchmark in VISUAL for s in benchmark_scenes(7, benchmark, 500, split)}
        for split in splits
    )
    assert training.isdisjoint(validation) and training.isdisjoint(held_out) and validation.isdisjoint(held_out)


def test_facts_of_training_and_benchmark_are_disjoint() -> None:
    assert not {f.question for f in training_facts()} & {f.question for f in held_out_facts()}
    questions = [f.question for f in training_facts() + held_out_facts()]
    assert len(questions) == len(set(questions))
    assert all(f.answer not in f.wrong and len(f.wrong) >= 3 for f in held_out_facts())


def test_things_of_a_scene_differ_in_colour_shape_and_position() -> None:
    for scene in training_scenes(7, "stage2", 300) + benchmark_scenes(7, "choice", 100):
        for field in ("color", "shape", "position"):
            values = [getattr(thing, field) for thing in scene.things]
            assert len(values) == len(set(values))
        assert bool(scene.things) != bool(scene.words)


def test_presence_pairs_say_what_is_there() -> None:
    hard = easy = 0
    for index, scene in enumerate(benchmark_scenes(3, "presence", 300)):
        pairs = presence_pairs(scene, random.Random(index))
        assert len(pairs) >= 3
        for yes, no in pairs:
            assert (yes.answer, no.answer) == ("Yes", "No")
            for question in (yes, no):
                noun = question.text.removesuffix("?").split(" ", 3)[3].split()
                there = any(
                    all(word in (thing.color, thing.shape, "object") for word in noun) for thing in scene.things
                )
                assert there == (question.answer == "Yes"), (question, scene)
                if question.answer == "No" and question.kind == "presence-object":
                    known = noun[0] in [thing.color for thing in scene.things]
                    hard, easy = hard + known, easy + (not known)
    assert 0.2 < hard / (hard + easy) < 0.5


@pytest.mark.parametrize("limit", [1, 4, 8, 30])
def test_training_questions_are_distinct_and_at_most_the_limit(limit: int) -> None:
    for index, scene in enumerate(training_scenes(5, "stage2", 60)):
        questions = training_questions(scene, limit, random.Random(index))
        assert len({q.text for q in questions}) == len(questions) <= limit
        assert limit > 8 or scene.words or len(questions) == limit


def test_training_answers_are_balanced(folder: Path) -> None:
    answers = Counter(answer for _, answer in training_turns(folder))
    assert answers["Yes"] == answers["No"] > 0
    for names in (COLORS, SHAPES, POSITIONS):
        counts = [answers[name] for name in names]
        assert min(counts) > 0.6 * max(counts)
    assert all(answers[word] for word in WORDS)


def test_benchmarks_have_the_asked_size_and_valid_items(
    folder: Path, benchmarks: dict[str, list[BenchmarkItem]]
) -> None:
    sizes = {name: len(items) for name, items in benchmarks.items()}
    assert sizes == {"presence": 240, "choice": 240, "reading": 240, "text": 200, "validation": 400}
    for items in benchmarks.values():
        assert len({item.id for item in items}) == len(items)
        for item in items:
            assert len(set(item.choices)) == len(item.choices)
            assert 0 <= item.answer < len(item.choices)
            assert item.image is None or (folder / item.image).is_file()


def test_places_of_the_right_option_are_uniform(benchmarks: dict[str, list[BenchmarkItem]]) -> None:
    for items in benchmarks.values():
        series = defaultdict(list)
        for item in items:
            series[item.id.rsplit("-", 1)[0]].append(item.answer)
        for answers in series.values():
            counts = Counter(answers)
            assert max(counts.values()) - min(counts.values()) == 0


def test_presence_is_half_yes_in_every_kind_and_image(benchmarks: dict[str, list[BenchmarkItem]]) -> None:
    for key in ("kind", "image"):
        groups = defaultdict(list)
        for item in benchmarks["presence"]:
            groups[getattr(item, key)].append(item.answer)
        assert all(sum(answers) * 2 == len(answers) for answers in groups.values())


def template(question: str) -> str:
    """The question with every word that a scene fills in taken out."""
    names = {*COLORS, *SHAPES, *WORDS}
    return " ".join("_" if word.strip("?") in names else word for word in question.split())


def majority_accuracy(fitted_on: list[tuple[str, str]], items: list[BenchmarkItem], key: Callable[[str], str]) -> float:
    """Accuracy of choosing, without the image, the option that was most often the answer to such a question."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for question, answer in fitted_on:
        counts[key(question)][answer] += 1
    right = 0.0
    for item in items:
        scores = [counts[key(item.question)][choice] for choice in item.choices]
        best = [i for i, score in enumerate(scores) if score == max(scores)]
        right += (item.answer in best) / len(best)
    return right / len(items)


@pytest.mark.parametrize(("name", "chance"), [("presence", 0.5), ("choice", 0.25), ("reading", 0.25)])
def test_the_question_alone_does_not_tell_the_answer(
    folder: Path, benchmarks: dict[str, list[BenchmarkItem]], name: str, chance: float
) -> None:
    items = benchmarks[name]
    training = training_turns(folder)
    # Fitted on the items of half the images and tried on the others': an image's own items do not count as knowledge.
    images = sorted({str(item.image) for item in items})
    halves = [[item for item in items if images.index(str(item.image)) % 4 in part] for part in ((0, 1), (2, 3))]
    for fitted_on, tried in (halves, halves[::-1]):
        own = [(item.question, item.choices[item.answer]) for item in fitted_on]
        assert majority_accuracy(own, tried, template) <= chance + 0.08
    assert majority_accuracy(training, items, template) <= chance + 0.08
    assert majority_accuracy(training, items, str) <= chance + 0.08


def test_benchmark_questions_use_the_training_templates(
    folder: Path, benchmarks: dict[str, list[BenchmarkItem]]
) -> None:
    known = {template(question) for question, _ in training_turns(folder)}
    for name in VISUAL:
        assert {template(item.question) for item in benchmarks[name]} <= known


def test_a_thing_is_drawn_in_its_colour_at_its_position() -> None:
    scene = Scene((Thing("red", "circle", "left"), Thing("blue", "square", "bottom")), (), 0)
    image = render(scene, 100, random.Random(0))
    assert image.getpixel((20, 50)) == COLORS["red"]
    assert image.getpixel((50, 80)) == COLORS["blue"]
    assert image.getpixel((80, 50)) == image.getpixel((50, 20)) == (252, 252, 252)
    assert scene.caption() == "red circle left, blue square bottom"


def test_more_text_items_than_facts_are_refused_with_the_limit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"set at most {len(held_out_facts())}"):
        write_dataset(dataclasses.replace(SETTINGS, text_items=10_000), tmp_path)
