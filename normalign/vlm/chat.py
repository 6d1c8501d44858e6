"""Conversations to token ids and labels, turn by turn.

Ids and labels are made together, segment by segment: labels are never found again by searching re-tokenised text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

IGNORE = -100  # label of a position that is not supervised
TEMPLATE_DATE = "01 Jan 2025"  # templates that print the date must not make ids depend on the day


class SampleDroppedError(ValueError):
    """A sample that cannot be trained on; ``reason`` is a short name to count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _too_long(sample_id: str, max_tokens: int) -> SampleDroppedError:
    return SampleDroppedError(
        "longer_than_context", f"sample {sample_id}: no answer fits into max_tokens = {max_tokens}"
    )


@dataclass
class Encoded:
    """One sample as a tree of segments, laid out as parallel lists of length L.

    A token sees the tokens before it in its own segment and in the segments above it. A plain conversation is one
    segment; turns that share an image but do not see each other are siblings below the image's segment; answer options
    are siblings below their question.

    ``segment`` numbers each token's segment, ``parents`` gives each segment's parent (-1: none). ``positions`` are what
    rotary embeddings get: a segment continues where its parent ends. ``previous`` is the index of the token that
    predicts this one (-1: none), and ``labels`` holds the targets.
    """

    id: str
    image: str | None = None
    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    segment: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    previous: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    _ends: list[tuple[int, int]] = field(default_factory=list)

    def add(self, ids: Sequence[int], labels: Sequence[int] | None = None, parent: int = -1) -> int:
        """Append a segment below ``parent`` and return its number; without ``labels`` nothing in it is a target."""
        last, position = self._ends[parent] if parent >= 0 else (-1, 0)
        number = len(self.parents)
        self.parents.append(parent)
        for offset, token in enumerate(ids):
            self.previous.append(last)
            last = len(self.ids)
            self.ids.append(token)
            self.labels.append(IGNORE if labels is None else labels[offset])
            self.segment.append(number)
            self.positions.append(position)
            position += 1
        self._ends.append((last, position))
        return number

    @property
    def supervised(self) -> int:
        """Number of targets: labelled positions that another token predicts."""
        return sum(label != IGNORE and before >= 0 for label, before in zip(self.labels, self.previous, strict=True))


class ChatFormat:
    """Renders conversations with the tokenizer's own chat template, for training and evaluation alike."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        image_tokens: int,
        image_token: str,
        system_prompt: str | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.image_tokens = image_tokens
        self.image_token = image_token
        self.image_token_id: Any = tokenizer.convert_tokens_to_ids(image_token)
        self.system_prompt = system_prompt
        # Those that have a role, and those that only the vocabulary marks, such as Llama 3's headers.
        marked = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.special_tokens = sorted({*tokenizer.all_special_tokens, *marked} - {""})

    def render(self, turns: Sequence[tuple[str, str | None]], has_image: bool) -> Iterator[str]:
        """Text segments prompt 1, answer 1, prompt 2, ...; a last answer of None leaves its prompt open.

        Each is rendered when it is asked for: the template reads a conversation from its beginning for every turn,
        which of a long one need not be done beyond what fits.

        Raises:
            ValueError: the chat template rewrites earlier turns, so that segments cannot be told apart.
        """
        messages = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        done = ""
        for index, (question, answer) in enumerate(turns):
            content = f"{self.image_token}\n{question}" if has_image and index == 0 else question
            messages.append({"role": "user", "content": content})
            for generation_prompt in (True, False):
                if not generation_prompt:
                    if answer is None:
                        return
                    messages.append({"role": "assistant", "content": answer})
                text: Any = self.tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    date_string=TEMPLATE_DATE,
                )
                if not text.startswith(done):
                    raise ValueError("the chat template rewrites earlier turns; it cannot be used for training")
                yield text[len(done) :]
                done = text

    def _tokenise(self, text: str) -> list[int]:
        """Ids of one segment, each image placeholder repeated once per visual token."""
        ids: list[int] = []
        for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]:
            ids.extend([token] * (self.image_tokens if token == self.image_token_id else 1))
        return ids

    def _answer(self, text: str) -> tuple[list[int], list[int]]:
        """Ids and labels of an answer: supervised up to and including the token that ends the turn."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ends = [i for i, token in enumerate(ids) if token in self.tokenizer.all_special_ids]
        supervised = ends[0] + 1 if ends else len(ids)
        return ids, ids[:supervised] + [IGNORE] * (len(ids) - supervised)

    def prompt(self, question: str, has_image: bool) -> tuple[list[int], list[int]]:
        """(shared ids, own ids) of a single question: the shared part ends with the image, if there is one."""
        ids = self._tokenise(next(self.render([(question, None)], has_image)))
        return self._split_shared(ids, has_image)

    def option(self, question: str, option: str, has_image: bool) -> list[int]:
        """Ids of ``option`` as an answer to ``question``, without the token that ends the turn."""
        _, answer = self.render([(question, option)], has_image)
        ids, labels = self._answer(answer)
        supervised = [token for token, label in zip(ids, labels, strict=True) if label != IGNORE]
        ends = supervised and supervised[-1] in self.tokenizer.all_special_ids
        return supervised[:-1] if ends else supervised

    def _split_shared(self, ids: list[int], has_image: bool) -> tuple[list[int], list[int]]:
        if not has_image:
            return [], ids
        end = len(ids) - ids[::-1].index(self.image_token_id)
        return ids[:end], ids[end:]

    def encode(
        self,
        sample_id: str,
        turns: Sequence[tuple[str, str]],
        image: str | None,
        *,
        per_turn: bool,
        max_tokens: int,
    ) -> Encoded:
        """One conversation as ids and labels.

        Args:
            turns: (question, answer) pairs; the image, if any, belongs to the first question.
            per_turn: every turn is trained as if it were asked alone: turns share the image but do not see each other.
                Otherwise one joint multi-turn conversation, as LLaVA trains.
            max_tokens: whole turns are left out at the end until the sample fits; the image's tokens are never cut.

        Raises:
            SampleDroppedError: ``longer_than_context`` if not even the first turn fits, ``no_supervised_token`` if
                nothing is supervised in what fits, ``special_token_in_text`` if a turn spells one of the tokenizer's
                special tokens, which could end the turn or begin another.
        """
        for text in (text for turn in turns for text in turn):
            if found := next(filter(text.__contains__, self.special_tokens), None):
                raise SampleDroppedError(
                    "special_token_in_text",
                    f"sample {sample_id}: its text contains {found}, which the tokenizer does not read as text",
                )
        has_image = image is not None
        encode = self._encode_branches if per_turn else self._encode_joint
        encoded = encode(sample_id, turns, image, has_image, max_tokens)
        if encoded.supervised == 0:
            raise SampleDroppedError("no_supervised_token", f"sample {sample_id}: its answers render to no token")
        return encoded

    def _encode_joint(
        self,
        sample_id: str,
        turns: Sequence[tuple[str, str]],
        image: str | None,
        has_image: bool,
        max_tokens: int,
    ) -> Encoded:
        segments = self.render(turns, has_image)
        ids: list[int] = []
        labels: list[int] = []
        for prompt, answer in zip(segments, segments, strict=True):  # in pairs: both come from one iterator
            prompt_ids = self._tokenise(prompt)
            answer_ids, answer_labels = self._answer(answer)
            if len(ids) + len(prompt_ids) + len(answer_ids) > max_tokens:
                if not ids:
                    raise _too_long(sample_id, max_tokens)
                break
            ids += prompt_ids + answer_ids
            labels += [IGNORE] * len(prompt_ids) + answer_labels
        encoded = Encoded(sample_id, image)
        encoded.add(ids, labels)
        return encoded

    def _encode_branches(
        self,
        sample_id: str,
        turns: Sequence[tuple[str, str]],
        image: str | None,
        has_image: bool,
        max_tokens: int,
    ) -> Encoded:
        encoded = Encoded(sample_id, image)
        root = -1
        for index, turn in enumerate(turns):
            prompt, answer = self.render([turn], has_image)
            shared, own = self._split_shared(self._tokenise(prompt), has_image)
            answer_ids, answer_labels = self._answer(answer)
            if shared and root < 0:
                root = encoded.add(shared)
            if len(encoded.ids) + len(own) + len(answer_ids) > max_tokens:
                if index == 0:
                    raise _too_long(sample_id, max_tokens)
                break
            # Nothing follows a turn's end here, so what the template puts behind it is left out.
            end = max((i for i, label in enumerate(answer_labels) if label != IGNORE), default=-1) + 1
            encoded.add(own + answer_ids[:end], [IGNORE] * len(own) + answer_labels[:end], parent=root)
        return encoded
