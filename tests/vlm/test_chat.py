"""Conversations to ids and labels: what is supervised is the answers, and nothing is cut that must not be."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken

from normalign.vlm.build import IMAGE_TOKEN, load_tokenizer
from normalign.vlm.chat import IGNORE, ChatFormat, Encoded, SampleDroppedError

from ..conftest import Tiny

TOKENS = 4
TURNS = [("What is it?", "a red circle"), ("Where is it?", "on the left"), ("How many?", "2")]
END = "<|im_end|>"
text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>"), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def chat(tiny: Tiny) -> ChatFormat:
    """The tiny model's chat format, without a system prompt."""
    return ChatFormat(tiny.processor().tokenizer, TOKENS, IMAGE_TOKEN, None)


def answers(chat: ChatFormat, encoded: Encoded) -> list[str]:
    """Runs of supervised positions, decoded."""
    runs: list[list[int]] = []
    for index, label in enumerate(encoded.labels):
        if label == IGNORE:
            continue
        assert label == encoded.ids[index]
        if index == 0 or encoded.labels[index - 1] == IGNORE:
            runs.append([])
        runs[-1].append(label)
    return [str(chat.tokenizer.decode(run)) for run in runs]


@pytest.mark.parametrize("per_turn", [False, True])
@pytest.mark.parametrize("image", [None, "a.png"])
@given(turns=st.lists(st.tuples(text, text), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_fault_1_decoded_labels_equal_the_answers(
    chat: ChatFormat, per_turn: bool, image: str | None, turns: list[tuple[str, str]]
) -> None:
    encoded = chat.encode("s", turns, image, per_turn=per_turn, max_tokens=4096)
    assert answers(chat, encoded) == [answer + END for _, answer in turns]


@pytest.mark.parametrize("system", [None, "", "Be brief."])
@pytest.mark.parametrize("image", [None, "a.png"])
def test_ids_of_a_single_turn_equal_the_tokenizers_own_chat_template(
    tiny: Tiny, system: str | None, image: str | None
) -> None:
    tokenizer: Any = tiny.processor().tokenizer
    chat = ChatFormat(tokenizer, TOKENS, IMAGE_TOKEN, system)
    question, answer = TURNS[0]
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [
        {"role": "user", "content": f"{IMAGE_TOKEN}\n{question}" if image else question},
        {"role": "assistant", "content": answer},
    ]
    expected: list[int] = []
    for token in tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False):
        expected += [token] * (TOKENS if token == chat.image_token_id else 1)
    joint = chat.encode("s", TURNS[:1], image, per_turn=False, max_tokens=4096)
    assert joint.ids == expected
    branch = chat.encode("s", TURNS[:1], image, per_turn=True, max_tokens=4096)
    assert branch.ids == expected[: len(branch.ids)]
    assert tokenizer.decode(expected[len(branch.ids) :]) == "\n"  # nothing follows a branch's end of turn


@pytest.mark.parametrize("image", [None, "a.png"])
def test_prompt_and_option_are_what_training_saw_before_a_turn_ends(chat: ChatFormat, image: str | None) -> None:
    question, answer = TURNS[0]
    shared, own = chat.prompt(question, image is not None)
    option = chat.option(question, answer, image is not None)
    trained = chat.encode("s", TURNS[:1], image, per_turn=True, max_tokens=4096)
    assert shared + own + option == trained.ids[:-1]
    assert chat.tokenizer.decode(option) == answer and chat.tokenizer.decode(trained.ids[-1:]) == END
    assert (not shared) if image is None else shared[-TOKENS:] == [chat.image_token_id] * TOKENS


def test_branches_share_the_image_and_continue_its_positions(chat: ChatFormat) -> None:
    encoded = chat.encode("s", TURNS, "a.png", per_turn=True, max_tokens=4096)
    assert encoded.parents == [-1, 0, 0, 0] and encoded.ids.count(chat.image_token_id) == TOKENS
    root = encoded.segment.count(0)
    for branch in (1, 2, 3):
        members = [i for i, segment in enumerate(encoded.segment) if segment == branch]
        assert [encoded.positions[i] for i in members] == list(range(root, root + len(members)))
        assert [encoded.previous[i] for i in members] == [root - 1, *members[:-1]]


@pytest.mark.parametrize("per_turn", [False, True])
@given(max_tokens=st.integers(1, 220))
@settings(max_examples=60, deadline=None)
def test_fault_3_truncation_leaves_out_whole_turns_and_never_cuts_the_image(
    chat: ChatFormat, per_turn: bool, max_tokens: int
) -> None:
    whole = chat.encode("s", TURNS, "a.png", per_turn=per_turn, max_tokens=4096)
    try:
        cut = chat.encode("s", TURNS, "a.png", per_turn=per_turn, max_tokens=max_tokens)
    except SampleDroppedError as error:
        first = chat.encode("s", TURNS[:1], "a.png", per_turn=per_turn, max_tokens=4096)
        assert len(first.ids) + 1 > max_tokens and error.reason == "longer_than_context"
        return
    assert len(cut.ids) <= max_tokens and cut.ids == whole.ids[: len(cut.ids)]
    assert cut.ids.count(chat.image_token_id) == TOKENS
    kept = answers(chat, cut)
    assert kept == [answer + END for _, answer in TURNS[: len(kept)]]


@pytest.mark.parametrize("per_turn", [False, True])
def test_what_does_not_fit_costs_no_time(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, per_turn: bool) -> None:
    tokenizer: Any = tiny.processor().tokenizer
    template, calls = tokenizer.apply_chat_template, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return template(*arguments, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    chat = ChatFormat(tokenizer, TOKENS, IMAGE_TOKEN, None)
    encoded = chat.encode("s", TURNS[:1] * 100_000, "a.png", per_turn=per_turn, max_tokens=500)
    assert calls == 2 * (len(answers(chat, encoded)) + 1) < 40


def test_a_sample_without_room_for_an_answer_is_dropped_by_name(chat: ChatFormat) -> None:
    with pytest.raises(SampleDroppedError, match="sample s7: no answer fits into max_tokens = 20"):
        chat.encode("s7", TURNS, "a.png", per_turn=False, max_tokens=20)


@pytest.mark.parametrize("per_turn", [False, True])
def test_a_sample_whose_answers_render_to_nothing_is_dropped_for_another_reason(tiny: Tiny, per_turn: bool) -> None:
    tokenizer: Any = tiny.processor().tokenizer
    tokenizer.chat_template = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    chat = ChatFormat(tokenizer, TOKENS, IMAGE_TOKEN, None)
    with pytest.raises(SampleDroppedError, match="sample s8") as caught:
        chat.encode("s8", TURNS, None, per_turn=per_turn, max_tokens=4096)
    assert caught.value.reason == "no_supervised_token"


@pytest.mark.parametrize("per_turn", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_text_that_would_end_or_begin_a_turn_is_dropped_by_name(chat: ChatFormat, per_turn: bool, place: int) -> None:
    turn = ["What?", "That."]
    turn[place] += f" {END}\n"
    with pytest.raises(SampleDroppedError, match=r"sample s9: its text contains <\|im_end\|>") as caught:
        chat.encode("s9", [TURNS[0], (turn[0], turn[1])], None, per_turn=per_turn, max_tokens=4096)
    assert caught.value.reason == "special_token_in_text"


def test_tokens_that_only_the_vocabulary_marks_as_special_are_no_text_either(tiny: Tiny, tmp_path: Any) -> None:
    tokenizer: Any = tiny.processor().tokenizer
    tokenizer.add_tokens([AddedToken("<|header|>", special=True), AddedToken("<plain>", special=False)])
    tokenizer.save_pretrained(tmp_path)
    chat = ChatFormat(load_tokenizer(tmp_path), TOKENS, IMAGE_TOKEN, None)
    with pytest.raises(SampleDroppedError, match=r"contains <\|header\|>"):
        chat.encode("s", [("What <|header|>?", "That.")], None, per_turn=False, max_tokens=4096)
    assert chat.encode("s", [("What <plain>?", "That.")], None, per_turn=False, max_tokens=4096).supervised


def test_a_template_that_rewrites_earlier_turns_is_refused(tiny: Tiny) -> None:
    tokenizer: Any = tiny.processor().tokenizer
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        list(ChatFormat(tokenizer, TOKENS, IMAGE_TOKEN, None).render(TURNS[:2], False))


def test_a_template_that_prints_the_date_prints_the_same_one_every_day(tiny: Tiny) -> None:
    tokenizer: Any = tiny.processor().tokenizer
    tokenizer.chat_template = "{{ date_string }}: " + tokenizer.chat_template
    rendered = next(ChatFormat(tokenizer, TOKENS, IMAGE_TOKEN, None).render(TURNS[:1], False))
    assert rendered.startswith("01 Jan 2025: ")


@pytest.mark.parametrize("pad", [None, END])
def test_fault_6_the_pad_token_is_never_the_end_of_a_turn(tiny: Tiny, tmp_path: Any, pad: str | None) -> None:
    tokenizer: Any = tiny.processor().tokenizer
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(tmp_path)
    loaded: Any = load_tokenizer(tmp_path)
    assert loaded.pad_token_id is not None and loaded.pad_token_id != loaded.eos_token_id


def test_a_tokenizer_without_chat_template_is_refused(tiny: Tiny, tmp_path: Any) -> None:
    tokenizer: Any = tiny.processor().tokenizer
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(tmp_path)
