"""`normalign plan`: time and memory of a profile before it is run."""

import json
from collections.abc import Callable

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from normalign.plan.estimate import Estimate, Question, StageEstimate, estimate
from normalign.settings import load_profile, variants_to_run


def plan(profile: str | None, question: Question, *, as_json: bool = False) -> None:
    """Print the estimate for ``profile`` (default: the one in params.yaml) as tables, or as one JSON object.

    Raises:
        SettingsError: there is no such profile.
        ValueError, OSError: something that the estimate needs is not known; the message says how to give it.
    """
    made = estimate(load_profile(profile), question)
    if as_json:
        typer.echo(json.dumps(made.as_json(), indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(_parameters(made))
    console.print(_stages(made))
    for line in notes(made, len(variants_to_run())):
        console.print(f"- {line}", highlight=False, markup=False, soft_wrap=True)


def _parameters(made: Estimate) -> Table:
    table = Table(title=f"{made.profile}: parameters", box=box.SIMPLE_HEAD)
    table.add_column("module")
    for column in ("all", *(f"trained in {stage.stage}" for stage in made.stages)):
        table.add_column(column, justify="right")
    for index, part in enumerate(made.stages[0].parts):
        table.add_row(part.module, f"{part.parameters:,}", *(f"{s.parts[index].trained:,}" for s in made.stages))
    total = sum(part.parameters for part in made.stages[0].parts)
    table.add_row("total", f"{total:,}", *(f"{sum(p.trained for p in s.parts):,}" for s in made.stages))
    return table


def _stages(made: Estimate) -> Table:
    place = f"{made.devices} x {made.device}, {made.precision}{', sharded (FSDP2)' if made.devices > 1 else ''}"
    table = Table(title=f"{made.profile}: stages on {place}; memory per device", box=box.SIMPLE_HEAD)
    table.add_column("")
    for stage in made.stages:
        table.add_column(stage.stage, justify="right")

    def row(label: str, show: Callable[[StageEstimate], str]) -> None:
        table.add_row(label, *(show(stage) for stage in made.stages))

    row("samples x epochs", lambda s: f"{s.work.samples:,} x {s.work.epochs}")
    row("optimizer steps", lambda s: f"{s.work.steps:,}")
    row(
        "batch: global = devices x micro x accumulation",
        lambda s: f"{s.work.global_batch} = {made.devices} x {s.work.micro_batch} x {s.work.accumulation}",
    )
    row(
        "tokens a sample: visual + text (supervised)",
        lambda s: f"{s.work.visual} + {s.work.text} ({s.work.supervised})",
    )
    table.add_section()
    row("weights, float32", lambda s: size(s.memory.weights))
    row("weights, further copies", lambda s: size(s.memory.copies))
    row("gradients", lambda s: size(s.memory.gradients))
    row("AdamW's moments", lambda s: size(s.memory.optimizer))
    row("activations", lambda s: size(s.memory.activations))
    row("activations, gradient checkpointing", lambda s: size(s.memory.activations_checkpointed))
    row("logits and loss", lambda s: size(s.memory.logits))
    row("peak", lambda s: size(made.peak(s)))
    row("peak, gradient checkpointing", lambda s: size(made.peak(s, checkpointed=True)))
    table.add_section()
    row("tokens", lambda s: f"{s.work.seen * s.work.length:.3g}")
    for name in ("vision", "projector", "language", "head", "attention", "total"):
        row(f"FLOPs, {name}", lambda s, name=name: f"{getattr(s.flops, name):.3g}")  # type: ignore[misc]
    row("hours", lambda s: f"{s.hours:.3g}")
    return table


def notes(made: Estimate, variants: int) -> list[str]:
    """What the figures rest on, in words."""
    stage1, stage2 = made.stages
    hours = stage1.hours + stage2.hours
    shared = made.cache.hours if made.cache.kept else 0.0
    lines = [
        *made.sources,
        f"hours at {made.mfu:.0%} of {made.peak_tflops:g} TFLOP/s a device; one variant {hours:.3g} h, the "
        f"{variants} of `run:` {variants * hours + shared:.3g} h; evaluation and reading images are not in it",
        f"feature cache: {size(made.cache.bytes)} of a budget of {size(made.cache.budget)}, "
        + (
            f"made once in {made.cache.hours:.3g} h on one device"
            if made.cache.kept
            else "so none is kept and the vision tower runs in stage 1"
        ),
        "tokens of text are assumed, not counted; give yours with --text-tokens and --supervised-tokens. Every sample "
        "is taken to have an image, and the aligner to be a LayerNorm",
    ]
    if made.baseline is not None:
        lines.append(
            f"the peak includes {size(made.baseline)} of interpreter and libraries, measured just now; "
            "freed activations stay with the process while gradients come"
        )
    else:
        lines.append(
            "the device's context, communication buffers and fragmentation are not in it: leave 10 % free; at the "
            "peak activations go while gradients come, so it is less than the sum"
        )
    if made.devices > 1:
        lines.append(
            f"each process holds the whole float32 model in main memory before it is sharded: "
            f"{size(stage2.memory.loading)}; a checkpoint of stage 2, which is gathered on every device, adds up to "
            f"{size(stage2.memory.saving)} there"
        )
    return lines


def size(count: int) -> str:
    """Bytes in decimal units, three digits."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"
