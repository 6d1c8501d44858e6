"""Activations and operations, against a forward and backward pass of the real model; and what follows from them."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normalign.plan.activations import Precision, logits
from normalign.plan.compute import per_token, training_flops
from normalign.plan.memory import Model, activations, memory
from normalign.plan.parts import counts
from normalign.plan.workload import Workload
from normalign.training.optim import TrainableTable
from normalign.vlm.build import build_model, build_processor
from normalign.vlm.chat import IGNORE, Encoded
from normalign.vlm.forward import SupervisedLoss, Visual
from normalign.vlm.packing import pack

from .conftest import SETTINGS, STAGE1, STAGE2, Shaped, options, profile_at

PLAIN = Precision(compute=4, sharded=False, cpu=True)
WORK = Workload(samples=3, visual=16, text=84, supervised=10, epochs=1, global_batch=3, micro_batch=3, devices=1)
RATES = {"stage 1": STAGE1, "stage 2": STAGE2}


def estimated(shaped: Shaped, rates: dict[str, float]) -> Model:
    parts = counts(shaped.vision, shaped.language, SETTINGS, options(profile_at("ci"), rates))
    return Model(shaped.vision, shaped.language, SETTINGS, parts)


class Pass:
    """One forward and backward pass of the real model over WORK's batch."""

    def __init__(self, shaped: Shaped, rates: dict[str, float]) -> None:
        processor = build_processor(shaped.folder, 56)
        self.model = build_model(
            shaped.folder,
            processor,
            image_size=56,
            feature_layer=SETTINGS.feature_layer,
            feature_norm=SETTINGS.feature_norm,
            aligner={"aligner": "layernorm", "gwc": True},
            text_norm=0.5,
            seed=1,
        )
        self.model.model.language_model.set_attn_implementation("eager")
        TrainableTable(self.model, options(profile_at("ci"), rates))
        self.loss = SupervisedLoss(self.model.train())
        self.pixels = torch.randn(WORK.samples, 3, 56, 56)

    def samples(self) -> list[Encoded]:
        image = self.model.config.image_token_index
        made = []
        for number in range(WORK.samples):
            sample = Encoded(f"sample {number}", image="picture")
            # The last target is not fed, since nothing follows it: one more token keeps the row at its length.
            prompt = [image] * WORK.visual + [5] * (WORK.text - WORK.supervised + 1)
            answer = list(range(10, 10 + WORK.supervised))
            sample.add(prompt + answer, [IGNORE] * len(prompt) + answer)
            made.append(sample)
        return made

    def run(self) -> torch.Tensor:
        packed = pack(self.samples(), share_rows=False, pad_id=0)
        return self.loss(packed, Visual(pixels=self.pixels)).total


def kept_bytes(run: Pass) -> int:
    """Bytes of what autograd keeps for the backward pass, each storage once and weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        total = run.run()
    kept = sum(storages.values())
    total.backward()
    return kept


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
def test_activations_are_what_autograd_keeps_in_a_pass_of_the_real_model(
    shaped: Shaped, rates: dict[str, float]
) -> None:
    full, _ = activations(estimated(shaped, rates), WORK, PLAIN)
    probabilities = WORK.samples * WORK.supervised * shaped.language.vocabulary * 4
    assert full + probabilities == pytest.approx(kept_bytes(Pass(shaped, rates)), rel=0.05)


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
def test_operations_are_those_that_torch_counts_in_a_pass_of_the_real_model(
    shaped: Shaped, rates: dict[str, float]
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    run = Pass(shaped, rates)
    run.model.model.vision_tower.set_attn_implementation("eager")  # the counter does not know the CPU's fused kernel
    with FlopCounterMode(display=False) as counter:
        run.run().backward()
    flops = training_flops(estimated(shaped, rates), WORK, cached=False)
    assert flops.total == pytest.approx(counter.get_total_flops(), rel=0.03)


@pytest.mark.parametrize(("trained", "upstream", "expected"), [(True, True, 6), (False, True, 4), (False, False, 2)])
def test_a_parameter_costs_six_four_or_two_operations_a_token(trained: bool, upstream: bool, expected: int) -> None:
    assert per_token(trained, upstream) == expected


def test_logits_by_hand(shaped: Shaped) -> None:
    vocabulary = shaped.language.vocabulary
    assert logits(shaped.language, 7, PLAIN) == 7 * vocabulary * (4 + 4)
    assert logits(shaped.language, 7, Precision(2, True, False)) == 7 * vocabulary * (4 + 4 + 2)


def test_memory_of_one_device_by_hand(shaped: Shaped) -> None:
    model = estimated(shaped, STAGE2)
    made = memory(model, WORK, PLAIN)
    trained = model.parameters - shaped.vision.unused(-1, True)
    assert (made.weights, made.gradients, made.optimizer) == (4 * model.parameters, 4 * trained, 8 * trained)
    assert made.copies == made.saving == 0
    frozen = memory(estimated(shaped, STAGE1), WORK, PLAIN)
    assert frozen.optimizer == 2 * frozen.gradients == 8 * (48 * 64 + 64 + 64 * 64 + 64 + 2 * 64)
    assert frozen.activations < made.activations


def shards(devices: int, accumulation: int) -> Workload:
    return dataclasses.replace(WORK, devices=devices, micro_batch=1, global_batch=devices * accumulation)


@given(devices=st.integers(2, 64))
def test_sharding_divides_weights_and_moments_by_the_devices(devices: int) -> None:
    model = paper_model()
    made = memory(model, shards(devices, 1), Precision(2, True, False))
    assert made.weights == 4 * model.parameters // devices
    assert made.optimizer == 8 * model.trained() // devices
    assert made.gradients == 4 * model.trained() // devices


def test_gradients_are_sharded_and_kept_between_the_passes_of_a_step() -> None:
    model = paper_model()
    once, often = (memory(model, shards(8, passes), Precision(2, True, False)) for passes in (1, 16))
    assert once.gradients == often.gradients == 4 * model.trained() // 8
    assert once.peak <= often.peak <= once.peak + once.gradients


def paper_model() -> Model:
    """Llama-3.2-3B behind SigLIP, from the published dimensions."""
    from normalign.plan.architecture import language_model, vision_tower
    from normalign.plan.sources import published

    profile = profile_at("llama32_3b")
    vision = vision_tower(published()["vision"][profile.weights.vision.source], "published")
    language = language_model(published()["language"][profile.weights.language.source], "published", 128258)
    return Model(vision, language, profile.model, counts(vision, language, profile.model, profile.stage2))


@pytest.mark.parametrize(("field", "value"), [("text", 2 * WORK.text), ("micro_batch", 2 * WORK.micro_batch)])
def test_more_tokens_need_more_memory_and_checkpointing_less(shaped: Shaped, field: str, value: int) -> None:
    model = estimated(shaped, STAGE2)
    small, large = memory(model, WORK, PLAIN), memory(model, dataclasses.replace(WORK, **{field: value}), PLAIN)
    assert large.activations > small.activations
    assert large.activations_checkpointed < large.activations / 2


def test_attention_grows_with_the_square_of_the_length_and_the_rest_linearly(shaped: Shaped) -> None:
    model = estimated(shaped, STAGE2)
    one = training_flops(model, dataclasses.replace(WORK, visual=16, text=112), cached=True)
    two = training_flops(model, dataclasses.replace(WORK, visual=16, text=240), cached=True)
    assert two.attention == 4 * one.attention
    assert two.language == 2 * one.language
    assert (two.projector, two.head) == (one.projector, one.head)
    assert one.vision == two.vision == 0
