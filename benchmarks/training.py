"""Training speed and memory beside what a user would write instead: ``transformers.Trainer`` on stock LLaVA.

Both sides train the same weights (DINOv2-small and SmolLM2-135M from the committed profile) on the same samples in the
same order, with the same supervised tokens, optimizer, rates and precision; losses are compared step by step. Each
side runs in a process of its own, one after the other, so that peak memory is its own and neither slows the other.

The stock side gets what `Trainer` does unasked: the images are encoded in every step, a batch is padded to its longest
sample, logits are computed at every position, and each question of a record is a sample with its image.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

IMAGE_SIZE = 112
PROFILE = "smol"
SEED = 7
RATE = 1e-4
MICRO_BATCH_TOKENS = 4096
# How many questions a record holds: most few, some many, as in LLaVA's instruction data.
QUESTIONS = (1, 2, 2, 3, 3, 4, 6, 10)


@dataclass(frozen=True)
class Task:
    """What is trained: ``stage1`` (projector only) or ``stage2`` (everything), turn by turn or as one conversation."""

    stage: str
    per_turn: bool
    records: int
    batch: int
    threads: int
    stock_bf16: bool = False  # the stock side autocasts to bf16 even where this processor would emulate it


def precision() -> str:
    """bf16 where the processor multiplies it in hardware, else fp32 (where bf16 would be emulated)."""
    import torch

    if torch.cuda.is_available():
        return "bf16"
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    return "bf16" if "amx_bf16" in flags or "avx512_bf16" in flags else "fp32"


def records(count: int) -> list[tuple[Any, list[tuple[str, str]]]]:
    """(image, turns) of ``count`` generated scenes, with LLaVA-like numbers of turns."""
    from normalign.data.scenes import render
    from normalign.data.synthetic import CAPTION_QUESTION, training_questions, training_scenes

    made = []
    for index, scene in enumerate(training_scenes(SEED, "benchmark", count)):
        rng = random.Random(f"{SEED}/{index}")
        turns = [(q.text, q.answer) for q in training_questions(scene, rng.choice(QUESTIONS), rng)]
        made.append((render(scene, 224, rng), [(CAPTION_QUESTION, scene.caption()), *turns]))
    return made


class Setup:
    """Model, processor and encoded samples of a task, the same for both sides."""

    def __init__(self, task: Task, aligner: str = "none") -> None:
        import torch

        from normalign.settings import load_profile
        from normalign.vlm.build import IMAGE_TOKEN, build_model, build_processor
        from normalign.vlm.chat import ChatFormat

        torch.set_num_threads(task.threads)
        torch.manual_seed(SEED)
        self.task = task
        weights = load_profile(PROFILE).folder / "weights"
        if not weights.exists():
            sys.exit(f"error: {weights} is missing; `make repro` (or its first stage, weights) fetches it")
        self.processor = build_processor(weights, IMAGE_SIZE)
        self.model = build_model(
            weights,
            self.processor,
            image_size=IMAGE_SIZE,
            feature_layer=-1,
            feature_norm=False,  # stock LLaVA takes hidden states, which are before the final norm
            aligner={"aligner": aligner, "gwc": aligner == "layernorm"},
            text_norm=3.2,
            seed=SEED,
        )
        self.chat = ChatFormat(self.processor.tokenizer, self.model.config.image_seq_length, IMAGE_TOKEN, "")
        self.records = records(task.records)

    def turns(self, index: int) -> list[tuple[str, str]]:
        """Stage 1 trains captions alone."""
        turns = self.records[index][1]
        return turns[:1] if self.task.stage == "stage1" else turns

    def encode(self, index: int, turns: Sequence[tuple[str, str]], per_turn: bool) -> Any:
        return self.chat.encode(str(index), turns, str(index), per_turn=per_turn, max_tokens=4096)

    def pixels(self, indices: Sequence[int]) -> Any:
        from normalign.vlm.generate import pixels_of

        return pixels_of(self.processor, [self.records[i][0] for i in indices])

    def options(self) -> Any:
        from normalign.training.options import TrainingOptions

        modules = ("projector", "aligner") if self.task.stage == "stage1" else ("vision", "projector", "language")
        return TrainingOptions(
            learning_rate=dict.fromkeys(modules, RATE),
            global_batch=self.task.batch,
            micro_batch=self.task.batch,
            epochs=1,
            warmup_ratio=0.03,
            weight_decay=0.0,
            betas=(0.9, 0.999),
            eps=1e-8,
            clip_norm=1.0,
            clip_per_module=False,
            gradient_checkpointing=False,
            seed=SEED,
            per_turn=self.task.per_turn,
            pack=True,
            checkpoint_minutes=1e9,
        )


def run_ours(setup: Setup) -> dict[str, Any]:
    """Our loop; in stage 1 on cached features, whose making is timed apart."""
    import torch
    from accelerate import Accelerator

    from normalign.training.loop import Samples, train
    from normalign.vlm.forward import Visual
    from normalign.vlm.packing import pack

    model, count = setup.model, setup.task.records
    model.model.language_model.set_attn_implementation("sdpa" if torch.cuda.is_available() else "eager")
    padding = [0, 0]

    def encode(index: int) -> Any:
        return setup.encode(index, setup.turns(index), setup.task.per_turn)

    start = time.perf_counter()
    features: Any = None
    if setup.task.stage == "stage1":
        with torch.no_grad():
            chunks = [range(i, min(i + 8, count)) for i in range(0, count, 8)]
            features = torch.cat([model.model.encode(setup.pixels(chunk).to(model.device)) for chunk in chunks])
    cached = time.perf_counter()

    def visual(encoded: Sequence[Any]) -> Visual:
        indices = [int(sample.id) for sample in encoded]
        packed = pack(encoded, share_rows=True, pad_id=0)
        padding[0] += int((packed.node_BL == 0).sum())
        padding[1] += packed.node_BL.numel()
        return Visual(pixels=setup.pixels(indices)) if features is None else Visual(features=features[indices])

    with tempfile.TemporaryDirectory() as work:
        accelerator = Accelerator(
            cpu=not torch.cuda.is_available(), mixed_precision="bf16" if precision() == "bf16" else "no"
        )
        rows = train(
            model,
            Samples(count, encode, visual),
            setup.options(),
            accelerator=accelerator,
            pad_id=setup.processor.tokenizer.pad_token_id,
            work=Path(work),
            description="ours",
        )
    end = time.perf_counter()
    return {
        "cache_seconds": cached - start,
        "train_seconds": end - cached,
        "losses": [row["loss"] for row in rows],
        "supervised_tokens": sum(row["supervised_tokens"] for row in rows),
        "processed_tokens": padding[1],
        "padding_waste": padding[0] / padding[1],
    }


def aligner_overhead(task: Task, repeats: int) -> float:
    """Share of a stage-1 step that aligner and compensation add: their own forward and backward against the step's."""
    import torch
    from accelerate import Accelerator  # noqa: F401  # the same process state as in training

    from normalign.norms.aligner import build_aligner
    from normalign.vlm.forward import SupervisedLoss, Visual
    from normalign.vlm.packing import pack

    setup = Setup(task)
    indices = list(range(task.batch))
    packed = pack([setup.encode(i, setup.turns(i), task.per_turn) for i in indices], share_rows=True, pad_id=0)
    setup.model.model.language_model.set_attn_implementation("eager")
    setup.model.requires_grad_(False)
    setup.model.model.multi_modal_projector.requires_grad_(True)
    loss = SupervisedLoss(setup.model)
    with torch.no_grad():
        features = setup.model.model.encode(setup.pixels([int(s.id) for s in packed.order]))
    aligner = build_aligner({"aligner": "layernorm", "gwc": True}, setup.model.config.text_config.hidden_size, 3.2)
    tokens = torch.randn(len(indices), features.shape[1], setup.model.config.text_config.hidden_size)

    def step() -> None:
        loss(packed, Visual(features=features)).total.backward()

    def align() -> None:
        x = tokens.clone().requires_grad_()
        aligner(x).sum().backward()

    return fastest(align, 50) / fastest(step, repeats)


def fastest(call: Any, repeats: int) -> float:
    """Least of ``repeats`` wall times, in seconds; the first call warms up and does not count."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def step_times(threads: int, lengths: Sequence[int], batch_sizes: Sequence[int]) -> Iterator[dict[str, float]]:
    """Seconds of a stage-2 forward and backward of the language model by sequence length and batch.

    A batch goes through in micro-batches of at most MICRO_BATCH_TOKENS, as in training: memory stays the same.
    """
    import torch

    from normalign.vlm.chat import Encoded
    from normalign.vlm.forward import SupervisedLoss, Visual
    from normalign.vlm.packing import pack

    setup = Setup(Task("stage2", False, 1, 1, threads))
    loss = SupervisedLoss(setup.model.train())

    def sample(length: int) -> Encoded:
        made = Encoded("")
        ids = torch.randint(5, 1000, (length,)).tolist()
        made.add(ids, [-100] * (length - 32) + ids[-32:])
        return made

    def seconds(length: int, batch: int) -> float:
        at_once = min(batch, max(1, MICRO_BATCH_TOKENS // length))
        start = time.perf_counter()
        for _ in range(batch // at_once):
            packed = pack([sample(length) for _ in range(at_once)], share_rows=True, pad_id=0)
            loss(packed, Visual()).total.backward()
        return time.perf_counter() - start

    seconds(min(lengths), 1)  # warms up
    for length in lengths:
        for batch in batch_sizes:
            taken = seconds(length, batch)
            yield {"length": length, "batch": batch, "seconds": taken, "tokens_per_second": length * batch / taken}


def measure(side: str, task: Task) -> dict[str, Any]:
    """Run one side in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.training", "--one", side, "--task", json.dumps(vars(task))]
    print(f"{side} {task.stage}{' per turn' if task.per_turn else ''} ...", file=sys.stderr, flush=True)
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": str(task.threads)}
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run_one(side: str, task: Task) -> dict[str, Any]:
    """What a side's own process does."""
    from benchmarks.stock import run_stock

    setup = Setup(task)
    result = run_ours(setup) if side == "ours" else run_stock(setup)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**result, "peak_rss_gb": kilobytes * 1024 / 1e9}


def compare(task: Task) -> dict[str, Any]:
    """Both sides of a task and their ratios."""
    stock, ours = measure("stock", task), measure("ours", task)
    if stock["supervised_tokens"] != ours["supervised_tokens"]:
        raise RuntimeError(f"supervised tokens differ: {stock['supervised_tokens']} and {ours['supervised_tokens']}")
    cache = ours["cache_seconds"]
    return {
        "stock": stock,
        "ours": ours,
        "speedup": stock["train_seconds"] / (cache + ours["train_seconds"]),
        "speedup_three_variants": 3 * stock["train_seconds"] / (cache + 3 * ours["train_seconds"]),
        "memory_ratio": ours["peak_rss_gb"] / stock["peak_rss_gb"],
        "loss_difference": max(abs(a - b) for a, b in zip(stock["losses"], ours["losses"], strict=True)),
    }


def table(threads: int, *, as_json: bool) -> None:
    """Print the step time by sequence length and batch."""
    rows = step_times(threads, (256, 512, 1024, 2048), (1, 2, 4, 8))
    if as_json:
        print(json.dumps(list(rows)))
        return
    print(f"{'length':>6} {'batch':>5} {'seconds':>8} {'tokens/s':>9}")
    for row in rows:
        print(
            f"{row['length']:>6} {row['batch']:>5} {row['seconds']:>8.2f} {row['tokens_per_second']:>9.0f}", flush=True
        )


def side_by_side(common: dict[str, Any], *, stock_bf16: bool, as_json: bool) -> None:
    """Measure every task on both sides and print figures."""
    tasks = {
        "stage1": Task("stage1", True, **common),
        "stage2": Task("stage2", True, **common),
        "stage2_joint": Task("stage2", False, **common),
    }
    results = {name: compare(task) for name, task in tasks.items()}
    figures = {
        "precision": precision(),
        "threads": common["threads"],
        "stage1_speedup": results["stage1"]["speedup"],
        "stage1_speedup_three_variants": results["stage1"]["speedup_three_variants"],
        "stage2_speedup": results["stage2"]["speedup"],
        "stage2_joint_speedup": results["stage2_joint"]["speedup"],
        "stage2_memory_ratio": results["stage2"]["memory_ratio"],
        "padding_waste": max(r["ours"]["padding_waste"] for r in results.values()),
        "aligner_overhead": aligner_overhead(tasks["stage1"], 5),
        "loss_difference": max(r["loss_difference"] for r in results.values()),
    }
    if stock_bf16:
        slow = measure("stock", replace(tasks["stage1"], stock_bf16=True))["train_seconds"]
        fast = results["stage1"]["stock"]["train_seconds"]
        figures["stage1_speedup_over_bf16"] = results["stage1"]["speedup"] * slow / fast
    if as_json:
        print(json.dumps(figures | {"runs": results}))
        return
    print(f"{'':<14} {'side':<6} {'s':>7} {'records/s':>10} {'sup. tok/s':>11} {'tokens':>8} {'peak GB':>8}")
    for name, result in results.items():
        for side in ("stock", "ours"):
            r = result[side]
            seconds = r["train_seconds"] + r.get("cache_seconds", 0.0)
            print(
                f"{name:<14} {side:<6} {seconds:>7.1f} {common['records'] / seconds:>10.2f} "
                f"{r['supervised_tokens'] / seconds:>11.1f} {r['processed_tokens']:>8} {r['peak_rss_gb']:>8.2f}"
            )
    for name, value in figures.items():
        print(f"{name:<30} {value:.4g}" if isinstance(value, float) else f"{name:<30} {value}")


def mfu(arguments: argparse.Namespace) -> None:
    """Print the utilisation at a profile's dimensions."""
    from benchmarks.mfu import utilisation

    with contextlib.redirect_stdout(sys.stderr):  # the loop prints what it trains
        found = utilisation(
            arguments.mfu,
            micro_batch=arguments.batch,
            text_tokens=arguments.text_tokens,
            steps=arguments.steps,
            threads=arguments.threads,
            recompute=arguments.recompute,
        )
    lines = (f"{name:<18} {value}" for name, value in found.items())
    print(json.dumps(found) if arguments.json else "\n".join(lines))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--records", type=int, default=32, help="records to train on (default: 32)")
    parser.add_argument("--batch", type=int, default=4, help="records per step (default: 4)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="threads of each side (default: all cores)"
    )
    parser.add_argument(
        "--stock-bf16",
        action="store_true",
        help="also time stock stage 1 with emulated bf16 autocast (minutes)",
    )
    parser.add_argument("--table", action="store_true", help="only the step time by sequence length and batch")
    parser.add_argument("--mfu", metavar="PROFILE", help="only MFU at a profile's dimensions, such as llama32_3b")
    parser.add_argument("--text-tokens", type=int, default=512, help="with --mfu: text tokens a sample (default: 512)")
    parser.add_argument("--steps", type=int, default=13, help="with --mfu: steps, of which 3 warm up (default: 13)")
    parser.add_argument("--recompute", action="store_true", help="with --mfu: gradient checkpointing")
    parser.add_argument("--one", choices=("ours", "stock"), help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run_one(arguments.one, Task(**json.loads(arguments.task)))))
    elif arguments.table:
        table(arguments.threads, as_json=arguments.json)
    elif arguments.mfu:
        mfu(arguments)
    else:
        common = {name: getattr(arguments, name) for name in ("records", "batch", "threads")}
        side_by_side(common, stock_bf16=arguments.stock_bf16, as_json=arguments.json)


if __name__ == "__main__":
    main()
