"""The training loop: schedule, order, accumulation, stopping, resuming."""

import contextlib
import dataclasses
import math
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hypothesis import given
from hypothesis import strategies as st

from normalign.training import checkpoint, loop
from normalign.training.loop import (
    GAIN_COLUMNS,
    NORM_COLUMNS,
    TrainingStoppedError,
    batches,
    rate_factor,
    sample_order,
    train,
)
from normalign.training.options import MODULES
from normalign.training.prefetch import prefetch
from normalign.vlm.chat import SampleDroppedError
from normalign.vlm.forward import Visual

from ..conftest import Tiny
from .helpers import OPTIONS, STAGE1, STAGE2, options, run, samples_of

STEPS = 6


@given(st.integers(1, 500), st.floats(0, 0.5))
def test_the_rate_rises_linearly_to_one_and_falls_by_a_cosine_to_zero(total: int, ratio: float) -> None:
    factors = [rate_factor(step, total, ratio) for step in range(total + 1)]
    warmup = math.ceil(ratio * total)
    for step in range(warmup):
        assert factors[step] == pytest.approx((step + 1) / warmup)
    assert factors[warmup] == pytest.approx(1.0)
    for step in range(warmup, total):
        assert factors[step] == pytest.approx(math.cos(math.pi / 2 * (step - warmup) / (total - warmup)) ** 2)
    assert all(0 < factor <= 1 for factor in factors[:total])
    assert factors[total] == pytest.approx(0.0, abs=1e-12) or warmup == total


@given(st.integers(0, 200), st.integers(0, 1000), st.integers(0, 5))
def test_an_epochs_order_is_a_permutation_of_seed_and_epoch_alone(count: int, seed: int, epoch: int) -> None:
    order = sample_order(count, seed, epoch)
    torch.manual_seed(epoch + 17)
    assert order == sample_order(count, seed, epoch) and sorted(order) == list(range(count))
    if count > 20:
        assert order != sample_order(count, seed, epoch + 1) and order != sample_order(count, seed + 1, epoch)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 3))
def test_every_sample_comes_once_an_epoch_and_no_batch_crosses_epochs(count: int, batch: int, epochs: int) -> None:
    steps = batches(count, options(global_batch=batch, epochs=epochs))
    per_epoch = math.ceil(count / batch)
    assert len(steps) == per_epoch * epochs
    for epoch in range(epochs):
        mine = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(i for step in mine for i in step) == list(range(count))
        assert all(len(step) == batch for step in mine[:-1])


def test_rows_are_complete_and_the_logged_rates_follow_the_schedule(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny.model()
    rows = run(model, samples_of(model, tiny.processor()), OPTIONS, tmp_path)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert sum(row["samples"] for row in rows) == 12
    for number, row in enumerate(rows):
        for module in MODULES:
            assert row[f"lr_{module}"] == pytest.approx(STAGE2[module] * rate_factor(number, STEPS, 0.2))
        parts = [row[f"grad_{module}"] for module in MODULES]
        assert row["grad_total"] == pytest.approx(math.sqrt(sum(part**2 for part in parts)))
        assert row["clip_factor"] == pytest.approx(min(1.0, 1 / row["grad_total"]), rel=1e-4)
        assert all(math.isfinite(row[name]) for name in ("loss", *GAIN_COLUMNS, "norm_text"))
        assert all(row.keys() == rows[0].keys() for row in rows)
    assert {f"norm_{name}" for name in NORM_COLUMNS} <= rows[0].keys()


def test_frozen_modules_and_absent_gains_are_logged_as_none(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny.model({"aligner": "token_rms"})
    chosen = options(learning_rate=STAGE1, epochs=1)
    row = run(model, samples_of(model, tiny.processor()), chosen, tmp_path)[0]
    empty = {name for name, value in row.items() if value is None}
    kinds = ("lr", "grad", "clip_share", "update")
    frozen = {f"{kind}_{module}" for kind in kinds for module in ("vision", "language", "aligner")}
    assert empty == frozen | set(GAIN_COLUMNS)


@pytest.mark.parametrize("change", [{"micro_batch": 1}, {"micro_batch": 2}, {"micro_batch": 4, "pack": False}])
def test_fault_10_the_first_steps_loss_and_gradients_do_not_depend_on_micro_batches(
    tiny: Tiny, tmp_path: Path, change: dict[str, Any]
) -> None:
    found = []
    for number, more in enumerate(({"micro_batch": 4}, change)):
        model = tiny.model()
        chosen = options(global_batch=4, epochs=1, **more)
        found.append(run(model, samples_of(model, tiny.processor()), chosen, tmp_path / str(number))[0])
    for name in ("loss", "supervised_tokens", "grad_total", *(f"grad_{module}" for module in MODULES)):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4), name


def test_clipping_per_module_holds_each_to_the_limit_by_itself(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny.model()
    chosen = options(clip_norm=0.05, clip_per_module=True, epochs=1)
    seen: list[dict[str, float]] = []
    adamw_step = torch.optim.AdamW.step

    def step(optimizer: torch.optim.AdamW, *arguments: Any) -> Any:
        norms: dict[str, float] = {}
        for group in optimizer.param_groups:
            total = sum(float(p.grad.double().square().sum()) for p in group["params"] if p.grad is not None)
            norms[group["module"]] = norms.get(group["module"], 0.0) + total
        seen.append({module: total**0.5 for module, total in norms.items()})
        return adamw_step(optimizer, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        rows = run(model, samples_of(model, tiny.processor()), chosen, tmp_path)
    for row, norms in zip(rows, seen, strict=True):
        for module, norm in norms.items():
            assert norm == pytest.approx(min(0.05, row[f"grad_{module}"]), rel=1e-3)
        assert sum(row[f"clip_share_{module}"] for module in norms) == pytest.approx(1.0)


@pytest.mark.parametrize("rates", [STAGE1, STAGE2], ids=["stage1", "stage2"])
def test_gradient_checkpointing_changes_no_bit_and_compensates_once(
    tiny: Tiny, tmp_path: Path, rates: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the frozen model of stage 1 too: there transformers' own checkpointing would do nothing."""
    ends, calls = [], []
    for recompute in (False, True):
        model = tiny.model({"aligner": "layernorm", "gwc": True})
        layer = type(model.model.language_model.layers[0])
        forward, seen = layer.forward, [0]

        def counted(*inputs: Any, seen: list[int] = seen, forward: Any = forward, **keywords: Any) -> Any:
            seen[0] += 1
            return forward(*inputs, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(layer, "forward", counted)
            chosen = options(learning_rate=rates, gradient_checkpointing=recompute)
            rows = run(model, samples_of(model, tiny.processor()), chosen, tmp_path / str(recompute))
        ends.append((rows, weights(model)))
        calls.append(seen[0])
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[1][1][name], value) for name, value in ends[0][1].items())
    # A batch of text alone has nothing to train in stage 1 and needs no second pass.
    assert calls[0] < calls[1] <= 2 * calls[0]


def test_frozen_weights_that_are_not_saved_are_kept_in_half_precision_where_it_is_computed_in(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {}
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})  # a process has one precision
    for precision, saves_frozen in (("no", False), ("bf16", False), ("bf16", True)):
        AcceleratorState._shared_state.clear()
        model = tiny.model()
        rows = train(
            model,
            samples_of(model, tiny.processor()),
            options(learning_rate=STAGE1),
            accelerator=Accelerator(cpu=True, mixed_precision=precision),
            pad_id=0,
            work=tmp_path / f"{precision}{saves_frozen}",
            description="test",
            saves_frozen=saves_frozen,
        )
        losses[precision, saves_frozen] = [row["loss"] for row in rows]
        halved = {n for n, p in model.named_parameters() if p.dtype == torch.bfloat16}
        frozen = {n for n, p in model.named_parameters() if "multi_modal_projector" not in n}
        assert halved == (frozen if (precision, saves_frozen) == ("bf16", False) else set())
    assert losses["bf16", False] == pytest.approx(losses["no", False], rel=0.02)


def test_a_step_whose_samples_were_all_dropped_changes_nothing_and_the_run_goes_on(tiny: Tiny, tmp_path: Path) -> None:
    chosen = options(global_batch=1, epochs=1, warmup_ratio=0.0)
    model = tiny.model()
    samples = samples_of(model, tiny.processor())
    lost = batches(samples.count, chosen)[2][0]

    def encode(index: int) -> Any:
        if index == lost:
            raise SampleDroppedError("no_supervised_token", "none")
        return samples.encode(index)

    seen: list[int] = []
    rows = train(
        model,
        dataclasses.replace(samples, encode=encode),
        chosen,
        accelerator=Accelerator(cpu=True),
        pad_id=0,
        work=tmp_path,
        description="test",
        watch=lambda so_far: seen.append(len(so_far)),
    )
    assert [row["step"] for row in rows] == [1, 2, 4, 5, 6]
    assert seen == [1, 2, 2, 3, 4, 5]
    nothing = dataclasses.replace(samples, encode=lambda index: encode(lost))
    with pytest.raises(TrainingStoppedError, match="none of the 6 samples has a supervised token"):
        run(tiny.model(), nothing, chosen, tmp_path / "nothing")


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from normalign.training import checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
layer = torch.nn.Linear(300, 300)
optimizer = torch.optim.AdamW(layer.parameters())
folder = Path(sys.argv[1])
checkpoint.save(folder, 3, [], [layer], optimizer)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    checkpoint.save(folder, 4, [], [layer], optimizer)
except OSError as error:
    print(error)
print(checkpoint.restore(folder, [layer], optimizer)[0], [path.name for path in folder.iterdir()])
"""


@pytest.mark.parametrize("room", [0, 1000, 200_000])
def test_where_writing_fails_in_the_midst_of_a_checkpoint_the_previous_one_survives(tmp_path: Path, room: int) -> None:
    """The operating system itself refuses the write, so that torch's own way of failing is what is met."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), str(room)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "the previous one, if any, is whole. Free disk space" in done.stdout, done.stdout
    assert done.stdout.splitlines()[-1] == "3 ['checkpoint.pt']"


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter and buffer."""
    return {name: value.clone() for name, value in model.state_dict().items()}


class Stop(Exception):  # noqa: N818 (stands in for a kill)
    """Ends a run."""


def with_dropout(model: Any) -> Any:
    """``model`` leaving out a tenth of its attention in training mode."""
    for module in model.modules():
        for name in ("attention_dropout", "dropout"):  # Llama's and SigLIP's
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.1)
    return model


@pytest.mark.parametrize("tower", ["siglip_vision_model", "untied"])
@pytest.mark.parametrize("aligner", [{"aligner": "layernorm", "gwc": True}, {"aligner": "global_scale"}])
@pytest.mark.parametrize("stop", [1, 4])
@pytest.mark.parametrize("rates", [STAGE2, {"language": 1e-3}], ids=["all", "language"])
def test_fault_7_a_resumed_run_ends_bitwise_where_an_uninterrupted_one_does(
    tiny: Tiny, tmp_path: Path, tower: str, aligner: dict[str, Any], stop: int, rates: dict[str, float]
) -> None:
    chosen = options(checkpoint_minutes=0.0, learning_rate=rates)
    whole = with_dropout(tiny.model(aligner, tower=tower))
    rows = run(whole, samples_of(whole, tiny.processor(tower)), chosen, tmp_path / "whole")

    cut = with_dropout(tiny.model(aligner, tower=tower))
    samples = samples_of(cut, tiny.processor(tower))
    calls = 0

    def encode(index: int) -> Any:
        nonlocal calls
        calls += 1
        if calls > stop * 2:  # two samples a step
            raise Stop
        return samples.encode(index)

    with pytest.raises(Stop):
        run(cut, dataclasses.replace(samples, encode=encode), chosen, tmp_path / "cut")
    torch.manual_seed(99)
    resumed = with_dropout(tiny.model(aligner, tower=tower))
    again = run(resumed, samples_of(resumed, tiny.processor(tower)), chosen, tmp_path / "cut")
    assert again == rows
    for name, value in weights(whole).items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_a_checkpoint_is_written_whole_or_not_at_all(tiny: Tiny, tmp_path: Path, monkeypatch: Any) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    checkpoint.save(tmp_path, 3, [{"loss": 1.0}], [layer], optimizer)
    kept = (tmp_path / checkpoint.FILE).read_bytes()

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(tmp_path, 4, [], [layer], optimizer)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.FILE]
    assert (tmp_path / checkpoint.FILE).read_bytes() == kept
    assert checkpoint.restore(tmp_path, [layer], optimizer) == (3, [{"loss": 1.0}])
    assert checkpoint.restore(tmp_path / "none", [layer], optimizer) == (0, [])


def test_a_damaged_checkpoint_is_refused_by_name_and_never_trained_from(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    checkpoint.save(tmp_path, 3, [{"loss": 1.0}], [layer], optimizer)
    file = tmp_path / checkpoint.FILE
    whole = file.read_bytes()
    weight = whole.index(layer.weight.detach().numpy().tobytes())
    changed = whole[:weight] + bytes([whole[weight] ^ 1]) + whole[weight + 1 :]
    for content in (b"", b"no archive", bytes(len(whole)), whole[: len(whole) // 2], whole[:-1], changed):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"the checkpoint .*{checkpoint.FILE} is damaged .*; delete it"):
            checkpoint.restore(tmp_path, [layer], optimizer)
    file.write_bytes(whole)
    assert checkpoint.restore(tmp_path, [layer], optimizer) == (3, [{"loss": 1.0}])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_fault_11_a_loss_that_is_not_finite_stops_before_weights_change_and_names_step_and_samples(
    tiny: Tiny, tmp_path: Path, value: float
) -> None:
    model = tiny.model()
    samples = samples_of(model, tiny.processor())
    bad = next(i for i in batches(samples.count, OPTIONS)[2] if i not in (1, 5))  # one with an image
    seen: list[dict[str, torch.Tensor]] = []

    def visual(encoded: Any) -> Visual:
        if encoded[0].id == f"sample {bad}":
            seen.append(weights(model))
            return Visual(pixels=torch.full((1, 3, 28, 28), value))
        return samples.visual(encoded)

    with pytest.raises(
        TrainingStoppedError, match=f"step 3: the loss is nan.*'sample {bad}'.*vision tower; .*not touched"
    ):
        run(model, dataclasses.replace(samples, visual=visual), OPTIONS, tmp_path)
    for name, before in seen[-1].items():
        assert torch.equal(model.state_dict()[name], before), name


@pytest.mark.parametrize("conversations", [range(6), (1, 5)], ids=["images and text", "text alone"])
@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("vision_tower", "vision tower"),
        ("multi_modal_projector.linear_1", "projector"),
        ("multi_modal_projector.aligner", "aligner"),
        ("language_model.embed_tokens", "text embeddings"),
        ("language_model.layers.1", "language model"),
    ],
)
def test_fault_11_the_part_of_the_model_that_failed_first_is_named(
    tiny: Tiny, tmp_path: Path, path: str, named: str, conversations: Sequence[int]
) -> None:
    model = tiny.model()
    with torch.no_grad():
        next(model.model.get_submodule(path).parameters()).fill_(math.nan)
    whole = samples_of(model, tiny.processor())
    chosen = dataclasses.replace(
        whole, count=len(conversations), encode=lambda index: whole.encode(conversations[index])
    )
    with pytest.raises(TrainingStoppedError, match=f"step 1: the loss is nan .*first in the {named}; "):
        run(model, chosen, options(micro_batch=2), tmp_path)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("multi_modal_projector.linear_2", "projector"),
        ("multi_modal_projector.aligner", "aligner"),
        ("language_model.layers.1.mlp", "language"),
    ],
)
def test_fault_11_of_modules_whose_gradients_are_not_finite_the_first_in_the_backward_pass_is_named(
    tiny: Tiny, tmp_path: Path, path: str, named: str
) -> None:
    model = tiny.model()

    def spoil(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * math.inf)

    model.model.get_submodule(path).register_forward_hook(spoil)
    with pytest.raises(TrainingStoppedError, match=f"step 1: the gradient of {named} is (nan|inf) on samples"):
        run(model, samples_of(model, tiny.processor()), options(micro_batch=2), tmp_path)


def test_lost_samples_are_counted_over_steps_and_interruptions(tiny: Tiny, tmp_path: Path) -> None:
    """Samples 0 and 3 cannot be encoded: two of six, in each of two epochs."""
    chosen = options(checkpoint_minutes=0.0)

    def attempt(folder: str, most: float) -> list[int]:
        model = tiny.model()
        samples = samples_of(model, tiny.processor())
        seen: list[int] = []

        def encode(index: int) -> Any:
            if index in (0, 3):
                raise SampleDroppedError("no_supervised_token", "nothing")
            return samples.encode(index)

        def check(lost: int) -> None:
            seen.append(lost)
            if lost > most:
                raise Stop

        with contextlib.suppress(Stop):
            run(model, dataclasses.replace(samples, encode=encode, check_lost=check), chosen, tmp_path / folder)
        return seen

    whole = attempt("whole", math.inf)
    steps = batches(6, chosen)
    assert whole == [sum(i in (0, 3) for step in steps[:n] for i in step) for n in range(len(steps) + 1)]
    cut = attempt("cut", 1)
    assert cut == whole[: len(cut)] and cut[-1] == 2
    assert attempt("cut", math.inf) == whole[len(cut) - 2 :]  # the step that was refused left no checkpoint


def test_a_stage_that_was_killed_after_its_last_step_ends_as_it_would_have(tiny: Tiny, tmp_path: Path) -> None:
    chosen = options(checkpoint_minutes=0.0)
    first, second = tiny.model(), tiny.model()
    rows = run(first, samples_of(first, tiny.processor()), chosen, tmp_path)
    watched: list[Any] = []
    again = train(
        second,
        samples_of(second, tiny.processor()),
        chosen,
        accelerator=Accelerator(cpu=True),
        pad_id=0,
        work=tmp_path,
        description="test",
        watch=lambda found: watched.append(list(found)),
    )
    assert again == rows and watched == [rows]
    for name, value in weights(first).items():
        assert torch.equal(second.state_dict()[name], value), name


def test_data_made_ready_ahead_trains_to_the_same_bits(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; on a CPU, where it would compete with training for processors, data is prepared in its turn."""
    plain, ahead = tiny.model(), tiny.model()
    rows = run(plain, samples_of(plain, tiny.processor()), OPTIONS, tmp_path / "plain")
    threads: set[str] = set()
    in_turn = loop._Run._data

    def data(self: Any, first: int) -> Any:
        return prefetch(in_turn(self, first))

    monkeypatch.setattr(loop._Run, "_data", data)
    samples = samples_of(ahead, tiny.processor())

    def encode(index: int) -> Any:
        threads.add(threading.current_thread().name)
        return samples.encode(index)

    assert run(ahead, dataclasses.replace(samples, encode=encode), OPTIONS, tmp_path / "ahead") == rows
    assert threads == {"prefetch_0"}
    for name, value in weights(plain).items():
        assert torch.equal(ahead.state_dict()[name], value), name


def test_processes_that_would_go_on_from_different_steps_are_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model()
    # As if another process had found a checkpoint of step 4, and this one none.
    largest = iter([-0.0, 4.0])
    monkeypatch.setattr("normalign.training.parallel.Parallel.largest", lambda _self, _value: next(largest))
    with pytest.raises(ValueError, match=r"different steps \(0 to 4\); let all machines share this folder"):
        run(model, samples_of(model, tiny.processor()), OPTIONS, tmp_path)


def test_fault_11_a_gradient_that_is_not_finite_stops_before_weights_change_and_names_the_module(
    tiny: Tiny, tmp_path: Path
) -> None:
    model = tiny.model()
    model.model.multi_modal_projector.linear_2.weight.register_hook(lambda grad: grad * math.inf)
    before = weights(model)
    with pytest.raises(TrainingStoppedError, match=r"step 1: the gradient of projector is (nan|inf) on samples"):
        run(model, samples_of(model, tiny.processor()), OPTIONS, tmp_path)
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value), name


def test_fault_4_a_sample_with_a_wrong_number_of_placeholders_is_named_even_if_the_batch_adds_up(
    tiny: Tiny, tmp_path: Path
) -> None:
    model = tiny.model()
    samples = samples_of(model, tiny.processor())
    image, items = model.config.image_token_index, [samples.encode(i) for i in range(samples.count)]
    items[0].ids[items[0].ids.index(image)] = 9
    items[2].ids[-1] = image
    with pytest.raises(ValueError, match=r"sample [02]: [35] image placeholders in its text, 4 visual tokens"):
        run(model, samples, options(global_batch=6, micro_batch=6), tmp_path)


def test_only_the_aligner_and_what_trains_are_in_training_mode(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny.model()
    run(model, samples_of(model, tiny.processor()), options(learning_rate=STAGE1, epochs=1), tmp_path)
    assert model.model.multi_modal_projector.training and model.model.multi_modal_projector.aligner.training
    assert not model.model.vision_tower.training and not model.model.language_model.training
