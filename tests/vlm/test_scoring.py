"""Option likelihoods equal those of scoring each option alone with the model's plain forward pass."""

import pytest
import torch

from normalign.vlm.checkpoint import chat_format
from normalign.vlm.generate import answer, pixels_of
from normalign.vlm.model import NormalignForConditionalGeneration
from normalign.vlm.scoring import Question, score

from ..conftest import Tiny
from .helpers import picture

QUESTIONS = [
    Question("What is it?", ("a dot", "a box", "nothing at all"), "a"),
    Question("Which colour?", ("red", "green"), "b"),
    Question("2 + 2?", ("3", "4", "five"), None),
    Question("Where is it, then?", ("left", "right"), "a"),
]
IMAGES = {key: picture(key) for key in "ab"}


@pytest.fixture(scope="module", params=["siglip_vision_model", "dinov2"])
def model(tiny: Tiny, request: pytest.FixtureRequest) -> NormalignForConditionalGeneration:
    """A model per kind of tower."""
    return tiny.model(tower=request.param)


@torch.no_grad()
def plain(model: NormalignForConditionalGeneration, tiny: Tiny, question: Question, option: str) -> tuple[float, bool]:
    """The option's negative log-likelihood from one full sequence, and whether it is greedy."""
    processor = tiny.processor(model.config.vision_config.model_type)
    chat = chat_format(model, processor)
    shared, own = chat.prompt(question.text, question.image is not None)
    target = chat.option(question.text, option, question.image is not None)
    ids = torch.tensor([shared + own + target])
    pixels = None if question.image is None else pixels_of(processor, [IMAGES[question.image]])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels).logits[0]
    predicted = logits[-len(target) - 1 : -1].double()
    labels = torch.tensor(target)
    nll = -predicted.log_softmax(-1).gather(1, labels[:, None]).sum().item()
    return nll, bool((predicted.argmax(-1) == labels).all())


@pytest.mark.parametrize("batch_tokens", [1, 150, 4096])
def test_scores_equal_scoring_each_option_alone(
    tiny: Tiny, model: NormalignForConditionalGeneration, batch_tokens: int
) -> None:
    processor = tiny.processor(model.config.vision_config.model_type)
    results = score(model, processor, QUESTIONS, IMAGES, batch_tokens)
    for question, result in zip(QUESTIONS, results, strict=True):
        expected = [plain(model, tiny, question, option) for option in question.options]
        assert result.nll == pytest.approx([nll for nll, _ in expected], rel=1e-4)
        assert result.greedy == tuple(greedy for _, greedy in expected)


def test_a_models_own_answer_is_greedy(tiny: Tiny, model: NormalignForConditionalGeneration) -> None:
    processor = tiny.processor(model.config.vision_config.model_type)
    chat = chat_format(model, processor)
    shared, own = chat.prompt("What is it?", True)
    ids = torch.tensor([shared + own])
    with torch.no_grad():
        pixels = pixels_of(processor, [IMAGES["a"]])
        first = model(input_ids=ids, pixel_values=pixels).logits[0, -1].argmax().item()
    said = processor.tokenizer.decode([first])
    if first not in processor.tokenizer.all_special_ids and chat.option("What is it?", said, True) == [first]:
        assert score(model, processor, [Question("What is it?", (said,), "a")], IMAGES, 100)[0].greedy == (True,)
    assert isinstance(answer(model, processor, IMAGES["a"], "What is it?", 4), str)
    assert isinstance(answer(model, processor, None, "2 + 2?", 4), str)
