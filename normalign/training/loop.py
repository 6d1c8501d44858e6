"""The training loop, one for both stages."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from normalign.training import checkpoint
from normalign.training.optim import TrainableTable
from normalign.training.options import MODULES, TrainingOptions
from normalign.vlm.chat import Encoded, SampleDroppedError
from normalign.vlm.forward import SupervisedLoss, Visual
from normalign.vlm.model import MODULE_PATHS, NormalignForConditionalGeneration
from normalign.vlm.packing import pack

GAIN_COLUMNS = ("gain_l2", "gain_mean_abs", "gain_drift")
NORM_COLUMNS = ("vision_output", "projector_output", "aligner_output", "text")


class TrainingStoppedError(ValueError):
    """A loss or gradient is not finite; the weights are as they were before the step."""


@dataclass(frozen=True)
class Samples:
    """The training data: how many there are, how to encode one, and how to get the images of some."""

    count: int
    encode: Callable[[int], Encoded]
    visual: Callable[[Sequence[Encoded]], Visual]


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


def train(
    model: NormalignForConditionalGeneration,
    samples: Samples,
    options: TrainingOptions,
    *,
    accelerator: Accelerator,
    pad_id: int,
    work: Path,
    description: str,
) -> list[dict[str, Any]]:
    """Train ``model`` in place and return one log row per optimizer step.

    Resumes from a checkpoint in ``work`` if there is one.

    Raises:
        TrainingStoppedError: a loss or gradient is not finite; names the step, the samples and the module.
    """
    table = TrainableTable(model, options)
    optimizer = table.optimizer(options)
    table.check(optimizer)
    if accelerator.is_main_process:
        print(table.describe(), flush=True)
    return _Run(model, samples, options, table, optimizer, accelerator, pad_id, work).go(description)


class _Run:
    def __init__(
        self,
        model: NormalignForConditionalGeneration,
        samples: Samples,
        options: TrainingOptions,
        table: TrainableTable,
        optimizer: torch.optim.AdamW,
        accelerator: Accelerator,
        pad_id: int,
        work: Path,
    ) -> None:
        self.model, self.samples, self.options, self.table = model, samples, options, table
        self.accelerator, self.pad_id, self.work = accelerator, pad_id, work
        self.steps = batches(samples.count, options)
        self.loss, self.optimizer = accelerator.prepare(SupervisedLoss(model), optimizer)
        trained = [row.module for row in table.trainable()]
        self.trained = [model.get_submodule(MODULE_PATHS[module]) for module in trained]
        if "language" in trained:
            self.trained.append(model.lm_head)  # outside the language model, and its own weight unless tied
        model.eval()
        for module in self.trained:
            module.train()
        model.model.multi_modal_projector.aligner.train()

    def go(self, description: str) -> list[dict[str, Any]]:
        done, rows = checkpoint.restore(self.work, self.trained, self.optimizer)
        last_saved = time.monotonic()
        bar = tqdm(total=len(self.steps), initial=done, desc=description, mininterval=1.0, unit="step")
        for number in range(done, len(self.steps)):
            self._set_rates(number)
            rows.append(self._step(number))
            bar.set_postfix(loss=f"{rows[-1]['loss']:.3f}", refresh=False)
            bar.update()
            if time.monotonic() - last_saved > 60 * self.options.checkpoint_minutes:
                if self.accelerator.is_main_process:
                    checkpoint.save(self.work, number + 1, rows, self.trained, self.optimizer)
                last_saved = time.monotonic()
        bar.close()
        return rows

    def _step(self, number: int) -> dict[str, Any]:
        indices = self.steps[number]
        encoded = self._encode(self._mine(indices))
        trained = int(self._sum(len(encoded)))
        targets = self._sum(sum(sample.supervised for sample in encoded))
        if targets == 0:
            raise TrainingStoppedError(
                f"step {number + 1}: none of its {len(indices)} samples has a supervised token that fits; raise "
                "max_tokens or look at the data"
            )
        total = 0.0
        norms: dict[str, list[float]] = {}
        size = self.options.micro_batch
        for start in range(0, len(encoded), size):
            micro = encoded[start : start + size]
            last = start + size >= len(encoded)
            loss, seen = self._micro(micro, targets, last, number)
            total += loss
            for name, value in seen.items():
                norms.setdefault(name, []).append(value)
        gradient_norms = self._gradient_norms(number, encoded)
        total_norm = math.sqrt(sum(value**2 for value in gradient_norms.values()))
        factor = min(1.0, self.options.clip_norm / (total_norm + 1e-6))
        if factor < 1.0:
            torch._foreach_mul_([p.grad for p in self.table.parameters() if p.grad is not None], factor)
        rates = self._rates()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        gain = self.model.model.multi_modal_projector.aligner.gain_statistics()
        return {
            "step": number + 1,
            "samples": trained,
            "dropped": len(indices) - trained,
            "supervised_tokens": int(targets),
            "loss": self._sum(total) / targets,
            **{f"lr_{m}": rates.get(m) for m in MODULES},
            **{f"grad_{m}": gradient_norms.get(m) for m in MODULES},
            "grad_total": total_norm,
            "clip_factor": factor,
            **{name: gain.get(name) for name in GAIN_COLUMNS},
            **{f"norm_{n}": sum(norms[n]) / len(norms[n]) if n in norms else None for n in NORM_COLUMNS},
        }

    def _encode(self, indices: list[int]) -> list[Encoded]:
        """The samples of ``indices`` that can be trained on; the others are counted in the log row."""
        encoded = []
        for index in indices:
            with contextlib.suppress(SampleDroppedError):
                encoded.append(self.samples.encode(index))
        return encoded

    def _mine(self, indices: list[int]) -> list[int]:
        """This process's share of a step's samples."""
        return indices[self.accelerator.process_index :: self.accelerator.num_processes]

    def _sum(self, value: float) -> float:
        """Sum over processes."""
        if self.accelerator.num_processes == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.accelerator.device)
        return self.accelerator.reduce(tensor, "sum").item()

    def _micro(self, micro: list[Encoded], targets: float, last: bool, number: int) -> tuple[float, dict[str, float]]:
        """Forward and backward of one micro-batch; gradients add up to those of the mean over all targets."""
        self._check_placeholders(micro)
        packed = pack(micro, share_rows=self.options.pack, pad_id=self.pad_id).to(self.accelerator.device)
        visual = self.samples.visual(packed.order).to(self.accelerator.device)
        local = contextlib.nullcontext() if last else self.accelerator.no_sync(self.loss)
        with local:
            with self.accelerator.autocast():
                loss = self.loss(packed, visual)
            if not torch.isfinite(loss.total):
                raise TrainingStoppedError(
                    f"step {number + 1}: the loss is {loss.total.item()} on samples {[s.id for s in packed.order]}; "
                    "the weights were not touched. Lower the learning rate or look at these samples"
                )
            # Data-parallel training averages gradients over processes; the sum is wanted.
            self.accelerator.backward(loss.total * (self.accelerator.num_processes / targets))
        return loss.total.item(), loss.norms

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
            norms[row.module] = torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0
            if not math.isfinite(norms[row.module]):
                raise TrainingStoppedError(
                    f"step {number + 1}: the gradient of {row.module} is {norms[row.module]} on samples "
                    f"{[s.id for s in encoded]}; the weights were not touched"
                )
        return norms

    def _set_rates(self, number: int) -> None:
        factor = rate_factor(number, len(self.steps), self.options.warmup_ratio)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate[group["module"]] * factor

    def _rates(self) -> dict[str, float]:
        return {group["module"]: group["lr"] for group in self.optimizer.param_groups}
