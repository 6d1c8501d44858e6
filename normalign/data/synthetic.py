"""Deterministic data sets with known answers: captions, questions and benchmarks about generated scenes.

Everything about item i follows from (seed, split, i) alone, so a larger data set begins with the smaller one.
What benchmarks ask about (colour, shape, position, count, word) and the place of the right option are dealt
out evenly, block by block, so that the question alone never tells the answer.
"""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from normalign.data.facts import Fact, held_out_facts, training_facts
from normalign.data.llava import PLACEHOLDER
from normalign.data.scenes import (
    COLORS,
    COUNTS,
    POSITIONS,
    SHAPES,
    WORDS,
    Scene,
    Split,
    Thing,
    render,
    shape_scene,
    with_article,
    word_scene,
)
from normalign.files import write_json, write_jsonl
from normalign.settings import SyntheticSettings

VISUAL = ("presence", "choice", "reading")
BENCHMARKS = (*VISUAL, "text", "validation")
YES_NO = ("Yes", "No")
CAPTION_QUESTION = "What is in the image?"
TEXT_RECORD_SHARE = 0.1
_OPTIONS = 4
_FACTS_PER_RECORD = 2
_WORD_SCENES = 3  # every third training scene shows words
_HARD_NEGATIVES = 1 / 3
# Half of the training scenes hold one thing: what a colour or a shape looks like is learnt before what belongs to what.
_TRAINING_COUNTS = (1, 1, 1, 2, 3, 4)


@dataclass(frozen=True)
class Question:
    """A question about a scene and its one-word answer."""

    kind: str
    text: str
    answer: str


@dataclass(frozen=True)
class BenchmarkItem:
    """A multiple-choice item; ``answer``: index of the right choice; ``image``: under the image root."""

    id: str
    image: str | None
    kind: str
    question: str
    choices: tuple[str, ...]
    answer: int


def load_benchmark(path: Path) -> list[BenchmarkItem]:
    """The items of a ``benchmarks/*.jsonl`` file."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [BenchmarkItem(**{**row, "choices": tuple(row["choices"])}) for row in rows]


class _Dealer:
    """Random and evenly dealt numbers of one split, each a function of (seed, split, purpose, index)."""

    def __init__(self, seed: int, split: str) -> None:
        self.key = f"{seed}/{split}"

    def rng(self, purpose: str, index: int) -> random.Random:
        return random.Random(f"{self.key}/{purpose}/{index}")

    def order(self, purpose: str, block: int, values: int) -> list[int]:
        order = list(range(values))
        self.rng(purpose, block).shuffle(order)
        return order

    def deal(self, purpose: str, index: int, values: int) -> int:
        """A number below ``values``; every block of ``values`` indices gets each number once, shuffled."""
        block, place = divmod(index, values)
        return self.order(purpose, block, values)[place]

    def shapes(self, index: int, split: Split, counts: tuple[int, ...] = (1, 2, 3, 4)) -> Scene:
        """A scene of shapes; every block of scenes has each number of things in ``counts`` once."""
        first = Thing(
            list(COLORS)[self.deal("color", index, len(COLORS))],
            SHAPES[self.deal("shape", index, len(SHAPES))],
            list(POSITIONS)[self.deal("position", index, len(POSITIONS))],
        )
        count = counts[self.deal("count", index, len(counts))]
        return shape_scene(first, count, split, self.rng("shapes", index))

    def words(self, index: int, split: Split) -> Scene:
        """Every block of scenes shows each word once at the top and once at the bottom."""
        block, place = divmod(index, len(WORDS))
        order = self.order("word", block, len(WORDS))
        shift = self.rng("shift", block).randrange(1, len(WORDS))
        top, bottom = WORDS[order[place]], WORDS[order[(place + shift) % len(WORDS)]]
        return word_scene(top, bottom, split, self.rng("words", index))


def _ask_color(thing: Thing) -> Question:
    return Question("color", f"What color is the {thing.shape}?", thing.color)


def _ask_shape(thing: Thing) -> Question:
    return Question("shape", f"What shape is the {thing.color} object?", thing.shape)


def _ask_position(thing: Thing) -> Question:
    return Question("position", f"Where is the {thing.color} {thing.shape}?", thing.position)


def _ask_count(scene: Scene) -> Question:
    return Question("count", "How many objects are there?", COUNTS[len(scene.things) - 1])


def _ask_words(scene: Scene) -> list[Question]:
    return [
        Question("reading", f"Which word is at the {place}?", word)
        for place, word in zip(("top", "bottom"), scene.words, strict=True)
    ]


def _presence(kind: str, noun: str, answer: bool) -> Question:
    return Question(kind, f"Is there {with_article(noun)}?", YES_NO[not answer])


def presence_pairs(scene: Scene, rng: random.Random) -> list[tuple[Question, Question]]:
    """Three or four pairs of yes/no questions, answered Yes and No, on coloured shapes, a colour, a shape.

    Of the "no" questions on coloured shapes a minority is hard: the colour is there, on another shape.
    A scene of every shape has no pair on a shape; one of a single thing has one pair on coloured shapes, not two.
    """
    colors, shapes = [t.color for t in scene.things], [t.shape for t in scene.things]
    absent = [color for color in COLORS if color not in colors]
    missing = [shape for shape in SHAPES if shape not in shapes]
    by_kind: dict[str, list[tuple[str, str]]] = {
        "presence-color": [],
        "presence-shape": [],
        "presence-object": [],
    }
    by_kind["presence-color"].append((f"{rng.choice(colors)} object", f"{rng.choice(absent)} object"))
    if missing:
        by_kind["presence-shape"].append((rng.choice(shapes), rng.choice(missing)))
    negatives: dict[str, None] = {}  # a dict keeps its order and holds no question twice
    while len(negatives) < 2:
        thing = rng.choice(scene.things)
        hard = rng.random() < _HARD_NEGATIVES
        wrong = rng.choice([shape for shape in SHAPES if shape != thing.shape])
        negatives[f"{thing.color} {wrong}" if hard else f"{rng.choice(absent)} {rng.choice(SHAPES)}"] = None
    things = rng.sample(scene.things, min(2, len(scene.things)))
    by_kind["presence-object"] = [
        (f"{thing.color} {thing.shape}", negative) for thing, negative in zip(things, negatives, strict=False)
    ]
    pairs = [
        (_presence(kind, yes, True), _presence(kind, no, False)) for kind, nouns in by_kind.items() for yes, no in nouns
    ]
    rng.shuffle(pairs)
    return pairs


def training_questions(scene: Scene, limit: int, rng: random.Random) -> list[Question]:
    """At most ``limit`` questions about the scene, no two alike, in random order; Yes and No balance."""
    if scene.words:
        absent = rng.sample([word for word in WORDS if word not in scene.words], 2)
        nouns = list(zip(rng.sample(scene.words, 2), absent, strict=True))
        pairs = [
            tuple(
                Question("presence-word", f"Is the word {word} there?", answer)
                for word, answer in zip(pair, YES_NO, strict=True)
            )
            for pair in nouns
        ]
        open_questions = _ask_words(scene)
    else:
        pairs = [*presence_pairs(scene, rng)]
        first, others = scene.things[0], scene.things[1:]
        open_questions = [_ask_color(first), _ask_shape(first), _ask_position(first), _ask_count(scene)]
        rng.shuffle(open_questions)
        open_questions += [ask(thing) for thing in others for ask in (_ask_color, _ask_shape, _ask_position)]
    asked: list[Question] = []
    while pairs or open_questions:  # in turns, so that any limit gets a mixture
        asked += rng.sample(pairs.pop(), 2) if pairs else []
        asked += open_questions[:2]
        del open_questions[:2]
    asked = asked[:limit]
    rng.shuffle(asked)
    return asked


def _conversation(record_id: str, image: str | None, turns: list[tuple[str, str]]) -> dict[str, Any]:
    messages = []
    for index, (question, answer) in enumerate(turns):
        prefix = f"{PLACEHOLDER}\n" if image is not None and index == 0 else ""
        messages += [{"from": "human", "value": prefix + question}, {"from": "gpt", "value": answer}]
    row = {"id": record_id, "image": image, "conversations": messages}
    return row if image is not None else {key: value for key, value in row.items() if key != "image"}


class _Writer:
    """Writes pictures under ``folder/images``."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        (folder / "images").mkdir(parents=True)

    def image(self, name: str, scene: Scene, rng: random.Random) -> str:
        relative = f"images/{name}.png"
        render(scene, self.size, rng).save(self.folder / relative, optimize=False)
        return relative


def training_scenes(seed: int, stage: str, images: int) -> list[Scene]:
    """The scenes of one training stage: two of shapes, then one of words."""
    dealer = _Dealer(seed, stage)
    scenes = []
    for index in range(images):
        block, place = divmod(index, _WORD_SCENES)
        shapes = _WORD_SCENES - 1
        scenes.append(
            dealer.words(block, "train")
            if place == shapes
            else dealer.shapes(block * shapes + place, "train", _TRAINING_COUNTS)
        )
    return scenes


def benchmark_scenes(seed: int, benchmark: str, images: int, split: Split = "held_out") -> list[Scene]:
    """The scenes of a visual benchmark or of its validation counterpart; no other split can hold any of them."""
    dealer = _Dealer(seed, _name(benchmark, split))
    if benchmark == "choice":
        counts_of = [(1, 2, 3, 4) if _asks_count(i) else (1,) for i in range(images)]
        return [dealer.shapes(i // 2, split, counts) for i, counts in enumerate(counts_of)]
    make = dealer.words if benchmark == "reading" else dealer.shapes
    return [make(index, split) for index in range(images)]


def _name(benchmark: str, split: Split) -> str:
    return f"validation-{benchmark}" if split == "validation" else benchmark


def _asks_count(index: int) -> bool:
    """Every second image of ``choice`` is asked for the number of things; the others hold a single one."""
    return index % 2 == 1


def _stage1(settings: SyntheticSettings, writer: _Writer) -> Iterator[dict[str, Any]]:
    dealer = _Dealer(settings.seed, "stage1")
    for index, scene in enumerate(training_scenes(settings.seed, "stage1", settings.stage1_images)):
        name = f"stage1-{index:05d}"
        image = writer.image(name, scene, dealer.rng("render", index))
        yield _conversation(name, image, [(CAPTION_QUESTION, scene.caption())])


def _stage2(settings: SyntheticSettings, writer: _Writer) -> Iterator[dict[str, Any]]:
    dealer = _Dealer(settings.seed, "stage2")
    for index, scene in enumerate(training_scenes(settings.seed, "stage2", settings.stage2_images)):
        name = f"stage2-{index:05d}"
        image = writer.image(name, scene, dealer.rng("render", index))
        questions = training_questions(scene, settings.questions_per_image, dealer.rng("questions", index))
        asked = [(CAPTION_QUESTION, scene.caption()), *((q.text, q.answer) for q in questions)]
        yield _conversation(name, image, asked)
    facts = _shuffled(training_facts(), dealer.rng("facts", 0))
    for index in range(round(settings.stage2_images * TEXT_RECORD_SHARE)):
        start = index * _FACTS_PER_RECORD
        turns = [facts[place % len(facts)] for place in range(start, start + _FACTS_PER_RECORD)]
        yield _conversation(f"stage2-text-{index:05d}", None, [(f.question, f.answer) for f in turns])


def _shuffled(facts: list[Fact], rng: random.Random) -> list[Fact]:
    rng.shuffle(facts)
    return facts


def _item(
    dealer: _Dealer, series: str, number: int, image: str | None, question: Question, wrong: list[str]
) -> BenchmarkItem:
    """Multiple-choice item ``number`` of a series, within which the right option's place is dealt evenly."""
    choices = dealer.rng(f"options-{series}", number).sample(wrong, _OPTIONS - 1)
    place = dealer.deal(f"place-{series}", number, _OPTIONS)
    choices.insert(place, question.answer)
    return BenchmarkItem(f"{series}-{number:05d}", image, question.kind, question.text, tuple(choices), place)


def _wrong(names: Any, *right: str) -> list[str]:
    return [name for name in names if name not in right]


def _presence_items(dealer: _Dealer, name: str, index: int, scene: Scene, image: str) -> Iterator[BenchmarkItem]:
    pairs = presence_pairs(scene, dealer.rng("questions", index))[:3]
    questions = [question for pair in pairs for question in pair]
    dealer.rng("order", index).shuffle(questions)
    for place, q in enumerate(questions):
        yield BenchmarkItem(f"{name}-{index * 6 + place:05d}", image, q.kind, q.text, YES_NO, YES_NO.index(q.answer))


def _choice_items(dealer: _Dealer, name: str, index: int, scene: Scene, image: str) -> Iterator[BenchmarkItem]:
    if _asks_count(index):
        question = _ask_count(scene)
        yield _item(dealer, f"{name}-count", index // 2, image, question, _wrong(COUNTS, question.answer))
        return
    for kind, names in (("color", COLORS), ("shape", SHAPES), ("position", POSITIONS)):
        wrong = [replace(scene.things[0], **{kind: value}) for value in names]
        question = Question(kind, CAPTION_QUESTION, scene.caption())
        captions = [replace(scene, things=(thing,)).caption() for thing in wrong if thing != scene.things[0]]
        yield _item(dealer, f"{name}-{kind}", index // 2, image, question, captions)


def _reading_items(dealer: _Dealer, name: str, index: int, scene: Scene, image: str) -> Iterator[BenchmarkItem]:
    for place, question in enumerate(_ask_words(scene)):
        yield _item(dealer, name, index * 2 + place, image, question, _wrong(WORDS, *scene.words))


_ITEMS_OF = {"presence": _presence_items, "choice": _choice_items, "reading": _reading_items}


def _visual_benchmark(
    settings: SyntheticSettings, writer: _Writer, benchmark: str, images: int, split: Split = "held_out"
) -> Iterator[BenchmarkItem]:
    name = _name(benchmark, split)
    dealer = _Dealer(settings.seed, name)
    for index, scene in enumerate(benchmark_scenes(settings.seed, benchmark, images, split)):
        image = writer.image(f"{name}-{index:05d}", scene, dealer.rng("render", index))
        yield from _ITEMS_OF[benchmark](dealer, name, index, scene, image)


def _text_benchmark(settings: SyntheticSettings) -> Iterator[BenchmarkItem]:
    dealer = _Dealer(settings.seed, "text")
    facts = _shuffled(held_out_facts(), dealer.rng("facts", 0))
    if settings.text_items > len(facts):
        raise ValueError(
            f"dataset.synthetic.text_items is {settings.text_items}, more than the "
            f"{len(facts)} held-out facts; set at most {len(facts)}"
        )
    for index, fact in enumerate(facts[: settings.text_items]):
        question = Question(fact.kind, fact.question, fact.answer)
        yield _item(dealer, "text", index, None, question, list(fact.wrong))


def write_dataset(settings: SyntheticSettings, folder: Path) -> None:
    """Write ``stage1.json``, ``stage2.json`` (LLaVA layout), ``images/``, ``benchmarks/*.jsonl``.

    Raises:
        ValueError: more text items are asked for than there are facts.
    """
    writer = _Writer(folder, settings.image_size)
    write_json(folder / "stage1.json", list(_stage1(settings, writer)))
    write_json(folder / "stage2.json", list(_stage2(settings, writer)))
    items: dict[str, Iterable[BenchmarkItem]] = {
        "presence": _visual_benchmark(settings, writer, "presence", settings.presence_images),
        "choice": _visual_benchmark(settings, writer, "choice", settings.choice_images),
        "reading": _visual_benchmark(settings, writer, "reading", settings.reading_images),
        "text": _text_benchmark(settings),
        "validation": chain.from_iterable(
            _visual_benchmark(settings, writer, name, settings.validation_images, "validation") for name in VISUAL
        ),
    }
    for name in BENCHMARKS:
        write_jsonl(folder / "benchmarks" / f"{name}.jsonl", map(asdict, items[name]))
