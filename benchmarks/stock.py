"""The other side of the training benchmark: `Trainer` on `LlavaForConditionalGeneration`, as they come.

Only what makes the two sides comparable is changed: samples arrive in the order of our loop, a step holds the same
records, and the learning rate follows the same schedule.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import (
    DataCollatorForSeq2Seq,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from benchmarks.training import RATE, SEED, Setup, precision
from normalign.training.loop import batches, rate_factor
from normalign.training.options import TrainingOptions


class _Rows(Dataset[dict[str, Any]]):
    """Encoded samples as rows of token lists, the pixels of their images among them."""

    def __init__(self, setup: Setup, samples: Sequence[Any]) -> None:
        self.setup, self.samples = setup, samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        return {
            "input_ids": sample.ids,
            "attention_mask": [1] * len(sample.ids),
            "labels": sample.labels,
            "pixel_values": self.setup.pixels([int(sample.id)])[0],
        }


class _Steps(Sampler[list[int]]):
    """Indices of the samples of each step: those of its records, however many they make."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.ends = [0]
        for size in sizes:
            self.ends.append(self.ends[-1] + size)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(a, b)) for a, b in zip(self.ends, self.ends[1:], strict=False))


class _Collator:
    """The collator of transformers, with the images stacked; counts the tokens that are processed."""

    def __init__(self, tokenizer: Any) -> None:
        self.pad = DataCollatorForSeq2Seq(tokenizer, padding=True)
        self.tokens = 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        pixels = torch.stack([row.pop("pixel_values") for row in rows])
        batch = self.pad(rows)
        self.tokens += batch["input_ids"].numel()
        return {**batch, "pixel_values": pixels}


class _SameSteps(Trainer):
    """Takes the given batches as they are and warms up as our loop does; keeps every step's loss."""

    def __init__(self, *, loader: DataLoader[Any], options: TrainingOptions, **rest: Any) -> None:
        self.loader, self.options = loader, options
        self.losses: list[float] = []
        super().__init__(**rest)

    def get_train_dataloader(self) -> Any:
        return self.loader

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = LambdaLR(
            optimizer or self.optimizer,  # type: ignore[arg-type]  # made by then
            lambda step: rate_factor(step, num_training_steps, self.options.warmup_ratio),
        )
        return self.lr_scheduler

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
        return loss


def stock_model(setup: Setup) -> LlavaForConditionalGeneration:
    """The stock class with the weights of our model, which is dropped: its memory must not count."""
    ours = setup.model
    fields = ours.config.to_dict()
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=fields["vision_config"],
            text_config=fields["text_config"],
            image_token_index=ours.config.image_token_index,
            vision_feature_layer=-1,
            vision_feature_select_strategy="default",
            image_seq_length=ours.config.image_seq_length,
            tie_word_embeddings=ours.config.tie_word_embeddings,
        )
    )
    missing, unexpected = model.load_state_dict(ours.state_dict(), strict=False)
    if missing or unexpected:
        raise RuntimeError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    del setup.model
    model.tie_weights()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(setup.task.stage == "stage2" or "multi_modal_projector" in name)
    return model


def samples_of(setup: Setup, index: int) -> list[Any]:
    """A record as samples: each of its questions with the image, or all of them in one conversation."""
    turns = setup.turns(index)
    parts = [[turn] for turn in turns] if setup.task.per_turn else [turns]
    return [setup.encode(index, part, False) for part in parts]


def run_stock(setup: Setup) -> dict[str, Any]:
    """Train the task; figures as :func:`benchmarks.training.run_ours` gives them."""
    options = setup.options()
    steps = [
        [sample for index in step for sample in samples_of(setup, index)]
        for step in batches(setup.task.records, options)
    ]
    samples = [sample for step in steps for sample in step]
    collate = _Collator(setup.processor.tokenizer)
    rows = _Rows(setup, samples)
    model = stock_model(setup)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=len(steps),
            learning_rate=RATE,
            adam_beta2=options.betas[1],
            max_grad_norm=options.clip_norm,
            bf16=setup.task.stock_bf16 or precision() == "bf16",
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            logging_strategy="no",
            seed=SEED,
        )
        loader = DataLoader(rows, batch_sampler=_Steps([len(step) for step in steps]), collate_fn=collate)
        trainer = _SameSteps(loader=loader, options=options, model=model, args=arguments, train_dataset=rows)
        start = time.perf_counter()
        trainer.train()
        end = time.perf_counter()
    return {
        "train_seconds": end - start,
        "losses": trainer.losses,
        "supervised_tokens": sum(sample.supervised for sample in samples),
        "processed_tokens": collate.tokens,
        "samples": len(samples),
    }
