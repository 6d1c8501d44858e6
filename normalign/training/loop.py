"""The training loop, one for both stages."""

import contextlib
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from normalign.training import checkpoint
from normalign.training.memory import halve_frozen, recompute_layers
from normalign.training.optim import TrainableTable, update_ratio
from normalign.training.options import MODULES, TrainingOptions
from normalign.training.parallel import Parallel, total_norm
from normalign.training.prefetch import prefetch
from normalign.vlm.chat import IGNORE, Encoded, SampleDroppedError
from normalign.vlm.forward import SupervisedLoss, Visual
from normalign.vlm.model import MODULE_PATHS, NormalignForConditionalGeneration
from normalign.vlm.packing import Packed, pack

GAIN_COLUMNS = ("gain_l2", "gain_mean_abs", "gain_drift")
UPDATE_EVERY = 10  # steps between two measurements of updates, which read all weights once more
NORM_COLUMNS = ("vision_output", "projector_output", "aligner_output", "text")


class TrainingStoppedError(ValueError):
    """A loss or gradient is not finite; the weights are as they were before the step."""


@dataclass(frozen=True)
class Samples:
    """The training data: how many there are, how to encode one, and how to get the images of some.

    ``check_lost`` is called in every process after every step, with the number of samples that all processes together
    have not been able to train on so far; it raises where these are too many.
    """

    count: int
    encode: Callable[[int], Encoded]
    visual: Callable[[Sequence[Encoded]], Visual]
    check_lost: Callable[[int], None] = lambda lost: None


@dataclass(frozen=True)
class Ready:
    """This process's share of a step: samples that can be trained on, and these as micro-batches with their images."""

    encoded: list[Encoded]
    micros: list[tuple[Packed, Visual]]


def sample_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch: a permutation that depends on seed and epoch alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator).tolist()


def batches(count: int, options: TrainingOptions) -> list[list[int]]:
    """Sample indices of every optimizer step of the stage; the last batch of an epoch may be smaller."""
    steps: list[list[int]] = []
    for epoch in range(options.epochs):
        order = sample_order(count, options.seed, epoch)
        steps += [order[i : i + options.global_batch] for i in range(0, count, options.global_batch)]
    return steps


def rate_factor(step: int, total: int, warmup_ratio: float) -> float:
    """Share of the full learning rate at ``step`` (from 0) of ``total``: linear warm-up, then half a cosine to 0.

    The first step already moves (1/warm-up, not 0): with few steps a wasted one counts.
    """
    warmup = math.ceil(warmup_ratio * total)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def first_to_fail(norms: dict[str, float]) -> str:
    """The part of the model whose output is the first not to be finite, given the norms at the interfaces."""
    parts = {"vision_output": "vision tower", "projector_output": "projector", "aligner_output": "aligner"}
    parts["text"] = "text embeddings"
    failed = (part for name, part in parts.items() if not math.isfinite(norms.get(name, 0.0)))
    return next(failed, "language model")


def share(norm: float | None, total: float) -> float | None:
    """A module's share of the squared gradient norm, which is what clipping by global norm spends on it."""
    return None if norm is None else (norm / total) ** 2 if total else 0.0


def train(
    model: NormalignForConditionalGeneration,
    samples: Samples,
    options: TrainingOptions,
    *,
    accelerator: Accelerator,
    pad_id: int,
    work: Path,
    description: str,
    saves_frozen: bool = True,
    watch: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Train ``model`` in place and return one log row per optimizer step that had samples to train on.

    Resumes from a checkpoint in ``work`` if there is one.

    Args:
        saves_frozen: frozen weights are wanted afterwards as they are; if not, they may be kept in half precision.
        watch: called in the main process after every step, with all rows so far.

    Raises:
        TrainingStoppedError: a loss or gradient is not finite; names the step, the samples and the module.
    """
    run = _Run(model, samples, options, Parallel(accelerator), pad_id, work, saves_frozen)
    if run.parallel.main:
        print(run.table.describe(), flush=True)
    return run.go(description, watch)


class _Run:
    def __init__(
        self,
        model: NormalignForConditionalGeneration,
        samples: Samples,
        options: TrainingOptions,
        parallel: Parallel,
        pad_id: int,
        work: Path,
        saves_frozen: bool,
    ) -> None:
        self.model, self.samples, self.options = model, samples, options
        self.parallel, self.pad_id, self.work = parallel, pad_id, work
        self.steps = batches(samples.count, options)
        self.table = TrainableTable(model, options)
        if options.gradient_checkpointing:
            recompute_layers(model)
        if not saves_frozen and parallel.half and not parallel.sharded:
            halve_frozen(self.table)
        self.loss = parallel.wrap(SupervisedLoss(model))
        self.table.rebind(model)
        self.optimizer = self.table.optimizer(options)
        self.table.check(self.optimizer)
        trained = [row.module for row in self.table.trainable()]
        self.active = [model.get_submodule(MODULE_PATHS[module]) for module in trained]
        if "language" in trained:
            self.active.append(model.lm_head)  # outside the language model, and its own weight unless tied
        # An aligner may keep a running mean even where nothing in it trains.
        self.active.append(model.model.multi_modal_projector.aligner)
        model.eval()
        for module in self.active:
            module.train()
        if parallel.count > 1 and not parallel.sharded:
            self._settle()

    def _settle(self) -> None:
        """One backward pass of a blank, after which DDP arranges the gradients that it exchanges anew, for good.

        Left to the first step of a process's life, a resumed run would add up in another order than a whole one.
        """
        packed, visual = self._pack([self._blank()]).to(self.parallel.device), Visual()
        with self.parallel.accelerator.autocast():
            loss = self.loss(packed, visual)
        (loss.total * 0.0).backward()
        self.optimizer.zero_grad(set_to_none=True)

    def go(self, description: str, watch: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
        done, rows = checkpoint.restore(self.work, self.active, self.optimizer)
        self._require_same(done)
        main = self.parallel.main
        lost = sum(map(len, self.steps[:done])) - sum(row["samples"] for row in rows)
        self.samples.check_lost(lost)
        if main and rows:
            watch(rows)
        last_saved = time.monotonic()
        bar = tqdm(
            total=len(self.steps), initial=done, desc=description, mininterval=1.0, unit="step", disable=not main
        )
        with bar, contextlib.closing(self._data(done)) as steps:
            for number, ready in enumerate(steps, done):
                self._set_rates(number)
                row = self._step(number, ready)
                lost += len(self.steps[number])
                if row is not None:
                    lost -= row["samples"]
                    rows.append(row)
                    bar.set_postfix(loss=f"{row['loss']:.3f}", refresh=False)
                self.samples.check_lost(lost)
                bar.update()
                if main:
                    watch(rows)
                due = time.monotonic() - last_saved > 60 * self.options.checkpoint_minutes
                if self.parallel.largest(due):
                    checkpoint.save(self.work, number + 1, rows, self.active, self.optimizer, main=main)
                    last_saved = time.monotonic()
        if not rows:
            raise TrainingStoppedError(
                f"none of the {self.samples.count} samples has a supervised token that fits; raise max_tokens or look "
                "at the data"
            )
        return rows

    def _require_same(self, done: int) -> None:
        """Every process has to go on from the same step.

        Raises:
            ValueError: they found different checkpoints.
        """
        least, most = -self.parallel.largest(-done), self.parallel.largest(done)
        if least != most:
            raise ValueError(
                f"{self.work}: processes would go on from different steps ({least:.0f} to {most:.0f}); "
                "let all machines share this folder"
            )

    def _data(self, first: int) -> Generator[Ready, None, None]:
        """The steps' data from ``first`` on; made ready ahead, unless that takes processors away from training."""
        steps = (self._prepare(number) for number in range(first, len(self.steps)))
        return steps if self.parallel.device.type == "cpu" else prefetch(steps)

    def _prepare(self, number: int) -> Ready:
        """The data of a step; nothing here may depend on weights or on random numbers, since it runs ahead of both."""
        encoded = self._encode(self._mine(self.steps[number]))
        micros = []
        for start in range(0, len(encoded), self.options.micro_batch):
            micro = encoded[start : start + self.options.micro_batch]
            self._check_placeholders(micro)
            packed = self._pack(micro)
            micros.append((packed, self.samples.visual(packed.order)))
        return Ready(encoded, micros)

    def _step(self, number: int, ready: Ready) -> dict[str, Any] | None:
        """One optimizer step and its log row; None where all its samples were dropped, which changes nothing."""
        # Dropout, where a model has any, must not depend on where the run was interrupted.
        torch.manual_seed((self.options.seed * 1_000_003 + number) * self.parallel.count + self.parallel.rank)
        supervised = sum(sample.supervised for sample in ready.encoded)
        trained, targets = self.parallel.sum(len(ready.encoded), supervised)
        if targets == 0:
            return None
        total = 0.0
        norms: dict[str, list[float]] = {}
        # Every process has to take part in every exchange: one with fewer samples than others fills up with blanks.
        count = int(self.parallel.largest(len(ready.micros)))
        for place, micro in enumerate([*ready.micros, *[None] * (count - len(ready.micros))]):
            loss, seen = self._micro(micro, targets, place == count - 1, number)
            total += loss
            for name, value in seen.items():
                norms.setdefault(name, []).append(value)
        loss, mean_norms = self._means(total / targets, norms)
        gradient_norms = self._gradient_norms(number, ready.encoded)
        total_norm = math.sqrt(sum(value**2 for value in gradient_norms.values()))
        factor = self._clip(gradient_norms, total_norm)
        rates = self._rates()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        updates = self._updates() if number % UPDATE_EVERY == 0 else {}
        gain = self.model.model.multi_modal_projector.aligner.gain_statistics()
        return {
            "step": number + 1,
            "samples": int(trained),
            "dropped": len(self.steps[number]) - int(trained),
            "supervised_tokens": int(targets),
            "loss": loss,
            **{f"lr_{m}": rates.get(m) for m in MODULES},
            **{f"grad_{m}": gradient_norms.get(m) for m in MODULES},
            "grad_total": total_norm,
            **{f"clip_share_{m}": share(gradient_norms.get(m), total_norm) for m in MODULES},
            "clip_factor": factor,
            **{f"update_{m}": updates.get(m) for m in MODULES},
            **{name: gain.get(name) for name in GAIN_COLUMNS},
            **mean_norms,
        }

    def _clip(self, gradient_norms: dict[str, float], total_norm: float) -> float:
        """Scale gradients down to ``clip_norm``, together or module by module; the (smallest) factor."""
        limits = gradient_norms if self.options.clip_per_module else dict.fromkeys(gradient_norms, total_norm)
        factors = {module: min(1.0, self.options.clip_norm / (norm + 1e-6)) for module, norm in limits.items()}
        for row in self.table.trainable():
            gradients = [p.grad for p in row.parameters.values() if p.grad is not None]
            if factors[row.module] < 1.0 and gradients:
                torch._foreach_mul_(gradients, factors[row.module])
        return min(factors.values())

    def _updates(self) -> dict[str, float]:
        """Size of the step just taken per module, as a share of its weights' L2 norm."""
        return {row.module: update_ratio(self.optimizer, row.module) for row in self.table.trainable()}

    def _means(self, loss: float, seen: dict[str, list[float]]) -> tuple[float, dict[str, float | None]]:
        """The loss of all processes, and mean norms over their micro-batches (None where none had such tokens)."""
        sums, counts = ([of(seen.get(n, ())) for n in NORM_COLUMNS] for of in (sum, len))
        loss, *both = self.parallel.sum(loss, *sums, *counts)  # in one exchange
        sums, counts = both[: len(NORM_COLUMNS)], both[len(NORM_COLUMNS) :]
        return loss, {f"norm_{n}": s / c if c else None for n, s, c in zip(NORM_COLUMNS, sums, counts, strict=True)}

    def _encode(self, indices: list[int]) -> list[Encoded]:
        """The samples of ``indices`` that can be trained on; the others are counted in the log row."""
        encoded = []
        for index in indices:
            with contextlib.suppress(SampleDroppedError):
                encoded.append(self.samples.encode(index))
        return encoded

    def _mine(self, indices: list[int]) -> list[int]:
        """This process's share of a step's samples."""
        return indices[self.parallel.rank :: self.parallel.count]

    def _pack(self, micro: list[Encoded]) -> Packed:
        return pack(micro, share_rows=self.options.pack, pad_id=self.pad_id)

    def _micro(
        self, micro: tuple[Packed, Visual] | None, targets: float, last: bool, number: int
    ) -> tuple[float, dict[str, float]]:
        """Forward and backward of one micro-batch; gradients add up to those of the mean over all targets."""
        packed, visual = micro or (self._pack([self._blank()]), Visual())
        packed, visual = packed.to(self.parallel.device), visual.to(self.parallel.device)
        with self.parallel.accumulate(self.loss, last):
            with self.parallel.accelerator.autocast():
                loss = self.loss(packed, visual)
            if not torch.isfinite(loss.total):
                raise TrainingStoppedError(
                    f"step {number + 1}: the loss is {loss.total.item()} on samples {[s.id for s in packed.order]}, "
                    f"first in the {first_to_fail(loss.norms)}; the weights were not touched. Lower the learning rate "
                    "or look at these samples"
                )
            # Data-parallel training averages gradients over processes; the sum is wanted.
            (loss.total * (self.parallel.count / targets if micro else 0.0)).backward()
        return (loss.total.item(), loss.norms) if micro else (0.0, {})

    def _blank(self) -> Encoded:
        """A sample that stands in where a process has none; its loss does not count."""
        blank = Encoded("blank")
        blank.add([self.pad_id, self.pad_id], [IGNORE, self.pad_id])
        return blank

    def _check_placeholders(self, micro: list[Encoded]) -> None:
        """Per sample: over a batch, one too many here and one too few there would cancel out."""
        config = self.model.config
        for sample in micro:
            count = sample.ids.count(config.image_token_index)
            expected = config.image_seq_length if sample.image is not None else 0
            if count != expected:
                raise ValueError(
                    f"sample {sample.id}: {count} image placeholders in its text, {expected} visual tokens for its "
                    f"image ({sample.image}); remove placeholders from its questions and answers"
                )

    def _gradient_norms(self, number: int, encoded: list[Encoded]) -> dict[str, float]:
        """L2 norm of the gradient per trainable module."""
        norms: dict[str, float] = {}
        for row in self.table.trainable():
            gradients: list[Tensor] = [p.grad for p in row.parameters.values() if p.grad is not None]
            norms[row.module] = total_norm(gradients)
        for module, norm in reversed(norms.items()):  # the way gradients go
            if not math.isfinite(norm):
                raise TrainingStoppedError(
                    f"step {number + 1}: the gradient of {module} is {norm} on samples {[s.id for s in encoded]}; "
                    "the weights were not touched"
                )
        return norms

    def _set_rates(self, number: int) -> None:
        factor = rate_factor(number, len(self.steps), self.options.warmup_ratio)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate[group["module"]] * factor

    def _rates(self) -> dict[str, float]:
        return {group["module"]: group["lr"] for group in self.optimizer.param_groups}
