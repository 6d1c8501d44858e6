"""The loss: independent of how samples are laid out, and of what lies beside them."""

import copy

import pytest
import torch
from torch import Tensor

from normalign.vlm.chat import Encoded
from normalign.vlm.forward import SupervisedLoss, Visual, hidden_states, target_logits
from normalign.vlm.model import NormalignForConditionalGeneration
from normalign.vlm.packing import Packed, pack

from ..conftest import TEXT_NORM, Tiny
from .helpers import CONVERSATIONS, encoded, visual_of


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> NormalignForConditionalGeneration:
    """The tiny model, its aligner in training mode."""
    built = tiny.model()
    built.model.multi_modal_projector.aligner.train()
    return built


def gradients(
    model: NormalignForConditionalGeneration, tiny: Tiny, samples: list[Encoded], micro_batch: int, share_rows: bool
) -> tuple[float, dict[str, Tensor]]:
    """Summed loss and its gradients, accumulated over micro-batches."""
    processor = tiny.processor()
    loss = SupervisedLoss(model)
    model.zero_grad()
    total = 0.0
    for start in range(0, len(samples), micro_batch):
        packed = pack(samples[start : start + micro_batch], share_rows=share_rows, pad_id=0)
        part = loss(packed, visual_of(processor, packed.order))
        part.total.backward()
        total += part.total.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("per_turn", [False, True])
@pytest.mark.parametrize(("micro_batch", "share_rows"), [(2, False), (6, False), (3, True), (6, True)])
def test_fault_10_loss_and_gradients_do_not_depend_on_accumulation_or_packing(
    tiny: Tiny, model: NormalignForConditionalGeneration, per_turn: bool, micro_batch: int, share_rows: bool
) -> None:
    samples = encoded(model, tiny.processor(), per_turn=per_turn)
    total, expected = gradients(model, tiny, samples, 1, False)
    other, found = gradients(model, tiny, samples, micro_batch, share_rows)
    assert other == pytest.approx(total, rel=1e-5)
    assert found.keys() == expected.keys()
    # Rounding is relative to the largest gradient: a key's bias, for one, has none but rounding.
    rounding = 1e-6 * max(value.abs().max().item() for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=rounding, msg=name)


def test_the_loss_equals_llavas_own_on_one_conversation(tiny: Tiny, model: NormalignForConditionalGeneration) -> None:
    sample = encoded(model, tiny.processor(), per_turn=False)[0]
    visual = visual_of(tiny.processor(), [sample])
    ours = SupervisedLoss(model)(pack([sample], share_rows=False, pad_id=0), visual)
    ids = torch.tensor([sample.ids])
    theirs = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=visual.pixels,
        labels=torch.tensor([sample.labels]),
    ).loss
    assert ours.targets == sample.supervised
    assert ours.total.item() / ours.targets == pytest.approx(theirs.item(), rel=1e-5)


@torch.no_grad()
def logits(model: NormalignForConditionalGeneration, packed: Packed, visual: Visual) -> Tensor:
    """Logits of every target."""
    pixels = visual.pixels
    tokens = None if pixels is None else model.model.project(model.model.encode(pixels))
    return target_logits(model, packed, hidden_states(model, packed, model.model.embed(packed.input_ids_BL, tokens)))


def owners(packed: Packed) -> list[tuple[str, int]]:
    """Which (sample, segment) every target belongs to."""
    return [
        (sample.id, sample.segment[index])
        for sample in packed.order
        for index, (label, before) in enumerate(zip(sample.labels, sample.previous, strict=True))
        if label >= 0 and before >= 0
    ]


def test_fault_9_changing_one_packed_sample_changes_no_other(
    tiny: Tiny, model: NormalignForConditionalGeneration
) -> None:
    samples = encoded(model, tiny.processor(), per_turn=False)
    changed = copy.deepcopy(samples)
    changed[0].ids = [t if t == model.config.image_token_index else (t + 11) % 200 + 3 for t in changed[0].ids]
    changed[0].image = "another"
    found = []
    for version in (samples, changed):
        packed = pack(version, share_rows=True, pad_id=0)
        assert len(packed.input_ids_BL) < len(samples)
        found.append(logits(model, packed, visual_of(tiny.processor(), packed.order)))
    same = torch.tensor([sample != "sample 0" for sample, _ in owners(packed)])
    torch.testing.assert_close(found[0][same], found[1][same], rtol=0, atol=1e-6)
    assert (found[0] - found[1])[~same].abs().amax(-1).min() > 1e-4


def test_fault_9_changing_one_turn_changes_no_other_when_turns_are_trained_apart(
    tiny: Tiny, model: NormalignForConditionalGeneration
) -> None:
    sample = encoded(model, tiny.processor(), per_turn=True)[0]
    changed = copy.deepcopy(sample)
    changed.ids = [t + 3 if s == 1 else t for t, s in zip(sample.ids, sample.segment, strict=True)]
    found = []
    for version in (sample, changed):
        packed = pack([version], share_rows=True, pad_id=0)
        found.append(logits(model, packed, visual_of(tiny.processor(), [version])))
    same = torch.tensor([segment != 1 for _, segment in owners(packed)])
    assert torch.equal(found[0][same], found[1][same])
    assert (found[0] - found[1])[~same].abs().amax(-1).min() > 1e-4


def test_a_turn_trained_apart_sees_what_it_would_see_alone(
    tiny: Tiny, model: NormalignForConditionalGeneration
) -> None:
    from normalign.vlm.checkpoint import chat_format

    chat = chat_format(model, tiny.processor())
    image, turns = CONVERSATIONS[0]
    together = chat.encode("s", turns, image, per_turn=True, max_tokens=4096)
    apart = [chat.encode("s", [turn], image, per_turn=False, max_tokens=4096) for turn in turns]
    outputs = []
    for samples in ([together], apart):
        packed = pack(samples, share_rows=False, pad_id=0)
        outputs.append(logits(model, packed, visual_of(tiny.processor(), packed.order)))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_fault_6_what_fills_the_padding_does_not_matter(tiny: Tiny, model: NormalignForConditionalGeneration) -> None:
    for per_turn in (False, True):
        samples = encoded(model, tiny.processor(), per_turn=per_turn)
        found = []
        for pad in (0, samples[0].ids[-1]):
            packed = pack(samples, share_rows=False, pad_id=pad)
            assert (packed.input_ids_BL == pad).any()
            found.append(logits(model, packed, visual_of(tiny.processor(), packed.order)))
        assert torch.equal(*found)


def test_fault_8_a_text_only_batch_gives_the_language_model_its_plain_gradients_and_the_vision_side_zeros(
    tiny: Tiny, model: NormalignForConditionalGeneration
) -> None:
    model.requires_grad_(True)
    sample = encoded(model, tiny.processor(), per_turn=False)[5]
    assert sample.image is None
    model.zero_grad()
    SupervisedLoss(model)(pack([sample], share_rows=False, pad_id=0), Visual()).total.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    ids = torch.tensor([sample.ids])
    hidden = model.model.language_model(input_ids=ids).last_hidden_state
    labels = torch.tensor(sample.labels)[1:]
    torch.nn.functional.cross_entropy(model.lm_head(hidden)[0, :-1], labels, reduction="sum").backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6, msg=name)
        elif name in found:
            assert not found[name].any(), name
    assert any("multi_modal_projector.linear_1" in name for name in found), "the vision side takes part"


def test_a_text_only_batch_leaves_the_stored_norm_of_global_scale_alone(tiny: Tiny) -> None:
    model = tiny.model({"aligner": "global_scale"})
    aligner = model.model.multi_modal_projector.aligner.train()
    samples = encoded(model, tiny.processor(), per_turn=False)
    loss = SupervisedLoss(model)
    for stored in (0.0, 7.0):
        aligner.get_buffer("running_norm").fill_(stored)
        loss(pack([samples[1]], share_rows=False, pad_id=0), Visual()).total.backward()
        assert aligner.get_buffer("running_norm").item() == stored
    loss(pack([samples[0]], share_rows=False, pad_id=0), visual_of(tiny.processor(), samples[:1]))
    assert aligner.get_buffer("running_norm").item() != 7.0


def test_norms_are_measured_at_every_interface(tiny: Tiny, model: NormalignForConditionalGeneration) -> None:
    processor = tiny.processor()
    sample = encoded(model, processor, per_turn=False)[0]
    visual = visual_of(processor, [sample])
    assert visual.pixels is not None
    norms = SupervisedLoss(model)(pack([sample], share_rows=False, pad_id=0), visual).norms
    features = model.model.encode(visual.pixels)
    assert norms["vision_output"] == pytest.approx(features.norm(dim=-1).mean().item(), rel=1e-5)
    assert norms["aligner_output"] == pytest.approx(TEXT_NORM, rel=1e-3)
    ids = torch.tensor([t for t in sample.ids if t != model.config.image_token_index])
    assert norms["text"] == pytest.approx(model.get_input_embeddings()(ids).norm(dim=-1).mean().item(), rel=1e-5)
