"""transformers.Trainer on an attached model: one compensation, the gain trained, and what NormWatch logs."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from normalign import NormWatch
from normalign.anatomy import find_anatomy, visual_mask
from normalign.attach.aligned import NAME, RECORD
from tests.anatomy.tiny import tiny_vlm
from tests.attach.test_live import attached

Train = Callable[..., Trainer]


class Gradients(TrainerCallback):
    """Keeps the gradients of the first step."""

    def __init__(self) -> None:
        self.of: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.of:
            self.of = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def sample(family: str = "llava") -> tuple[Any, dict[str, Tensor]]:
    model, _, inputs = tiny_vlm(family)
    labels = inputs["input_ids"].clone()
    labels[visual_mask(find_anatomy(model), labels)] = -100
    return model, {**inputs, "labels": labels}


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Two steps (unless told otherwise) on one sample, logged at each."""

    def run(model: nn.Module, row: dict[str, Tensor], *callbacks: TrainerCallback, **settings: Any) -> Trainer:
        settings = {"max_steps": 2, "logging_steps": 1, "max_grad_norm": 0.0, "weight_decay": 0.1} | settings
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "trainer"),
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            **settings,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=[row] * 4,
            eval_dataset=[row],
            data_collator=lambda rows: rows[0],
            callbacks=list(callbacks),
        )
        trainer.train()
        return trainer

    return run


def checkpointing(reentrant: bool | None) -> dict[str, Any]:
    if reentrant is None:
        return {}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}


@pytest.mark.parametrize(("family", "reentrant"), [("llava", None), ("llava", True), ("qwen2_vl", False)])
def test_a_step_compensates_exactly_once_and_trains_the_gain_without_weight_decay(
    family: str, reentrant: bool | None, train: Train
) -> None:
    gradients = {}
    for gwc in (False, True):
        model, row = sample(family)
        attached(model, gwc=gwc)
        kept = Gradients()
        trainer = train(model, row, kept, max_steps=1, **checkpointing(reentrant))
        gradients[gwc] = kept.of
        assert math.isfinite(trainer.state.log_history[0]["loss"])
        record = getattr(model.config, RECORD)
        gain = model.get_parameter(f"{record['projector']}.{NAME}.weight")
        optimizer: Any = trainer.optimizer
        decay = [g["weight_decay"] for g in optimizer.param_groups if any(p is gain for p in g["params"])]
        assert decay == [0.0]
        assert not torch.equal(gain, torch.full_like(gain, record["target"] / math.sqrt(record["width"])))
    factor = math.sqrt(record["width"]) / record["target"]
    vision = (record["projector"], find_anatomy(model).tower_path)
    seen, largest = 0, max(gradient.abs().max().item() for gradient in gradients[True].values())
    for name, plain in gradients[False].items():
        before_aligner = name.startswith(vision) and NAME not in name
        seen += before_aligner
        wanted = plain * factor if before_aligner else plain
        torch.testing.assert_close(gradients[True][name], wanted, rtol=1e-4, atol=1e-6 * largest)
    assert seen > 4


def direct(model: Any, row: dict[str, Tensor]) -> dict[str, float]:
    """Norm at the merge and gap of one forward pass in float64, from the layers' whole inputs and outputs."""
    anatomy = find_anatomy(model)
    states: list[Tensor] = []

    def keep(layer: nn.Module, args: Any, keywords: Any, output: Any) -> None:
        states.extend([args[0] if args else keywords["hidden_states"]] if not states else [])
        states.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in anatomy.layers]
    with torch.no_grad():
        model(**row)
    for handle in handles:
        handle.remove()
    visual = visual_mask(anatomy, row["input_ids"])
    stream = [state.double() for state in states]
    gaps = []
    for before, after in pairwise(stream):
        cosine = torch.cosine_similarity(before, after, dim=-1)
        gaps.append(abs(cosine[visual].mean() - cosine[~visual].mean()).item())
    norms = stream[0].norm(dim=-1)
    return {
        "norm_visual": norms[visual].mean().item(),
        "norm_text": norms[~visual].mean().item(),
        "norm_gap_first8": sum(gaps) / len(gaps),
    }


def watched(model: nn.Module) -> bool:
    """Whether a hook of NormWatch is on any module."""
    hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return any("NormWatch" in getattr(hook, "__qualname__", "") for hook in hooks)


class Seen(TrainerCallback):
    """Asks while training runs."""

    def __init__(self) -> None:
        self.watched = False

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.watched = watched(model)


@pytest.mark.parametrize(
    ("family", "reentrant"),
    [("llava", None), ("llava", True), ("qwen2_vl", False), ("gemma3", None), ("molmo2", False)],
)
def test_norm_watch_logs_what_a_direct_computation_gives_also_when_layers_run_twice(
    family: str, reentrant: bool | None, train: Train
) -> None:
    model, row = sample(family)
    expected, seen = direct(model.eval(), row), Seen()
    trainer = train(model, row, NormWatch(gap=True), seen, max_steps=1, **checkpointing(reentrant))
    log = trainer.state.log_history[0]
    assert {name: log[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    embedding = tiny_vlm(family)[0].get_input_embeddings()
    rows = embedding(torch.arange(embedding.num_embeddings)).double().norm(dim=-1)
    assert log["norm_k"] == pytest.approx(expected["norm_visual"] / rows[rows > 0].mean().item(), rel=1e-5)
    assert seen.watched and not watched(model)


def test_norm_watch_follows_an_attached_aligner_through_training_and_evaluation(train: Train) -> None:
    model, row = sample()
    attached(model, multiple=2.0)
    record = getattr(model.config, RECORD)
    watch = NormWatch()
    trainer = train(model, row, watch, eval_strategy="steps", eval_steps=1)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    evaluations = [log for log in trainer.state.log_history if "eval_loss" in log]
    assert len(logs) == len(evaluations) == 2
    assert logs[0]["norm_k"] == pytest.approx(2.0, rel=1e-3)  # the first step's forward pass comes before its update
    gain = model.get_parameter(f"{record['projector']}.{NAME}.weight").detach()
    assert logs[-1]["norm_gain_l2"] == pytest.approx(gain.norm().item(), rel=1e-6)
    assert logs[-1]["norm_gain_mean_abs"] == pytest.approx(gain.abs().mean().item(), rel=1e-6)
    assert 0 < logs[0]["norm_gain_drift"] < logs[1]["norm_gain_drift"]
    assert evaluations[0]["eval_norm_k"] == pytest.approx(logs[1]["norm_k"], rel=1e-5)  # same weights, same sample
    assert not any(name.startswith("norm_") for name in evaluations[0])
    assert "norm_k" not in trainer.state.log_history[-1]  # the summary is no step


def test_norm_watch_averages_over_accumulated_batches_and_leaves_padding_out(train: Train) -> None:
    model, row = sample()
    padded = dict(row)
    for name, filler in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        padded[name] = torch.cat([row[name], torch.full((1, 3), filler)], dim=1)
    expected = direct(model.eval(), row)
    trainer = train(model, padded, NormWatch(gap=True), max_steps=1, gradient_accumulation_steps=2)
    log = trainer.state.log_history[0]
    assert {name: log[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_batch_of_text_alone_is_not_counted(train: Train) -> None:
    model, _ = sample()
    text = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3).long()}
    trainer = train(model, text | {"labels": text["input_ids"]}, NormWatch(), max_steps=1)
    assert "norm_k" not in trainer.state.log_history[0]
