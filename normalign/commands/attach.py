"""`normalign attach` and `normalign detach`."""

import json
from pathlib import Path
from typing import Any

import typer

from normalign.attach.checkpoint import attach_checkpoint
from normalign.attach.detach import detach_checkpoint

TRAIN_NOW = (
    "The outputs are no longer those of the original: the model has not learned to read visual tokens of this norm. "
    "Train it before it is used."
)


def attach(model: Path, out: Path, *, as_json: bool = False, **settings: Any) -> None:
    """Write ``out``, which is ``model`` with an aligner, and say what it is; see :func:`attach_checkpoint`."""
    done = attach_checkpoint(model, out, **settings)
    if as_json:
        typer.echo(json.dumps(done | {"out": str(out)}, indent=2))
        return
    settings_of = done["settings"]
    name = settings_of["aligner"] + (" with GWC" if settings_of.get("gwc") else "")
    typer.echo(f"{name} behind {done['projector']} ({done['family']})")
    typer.echo(
        f"T = {done['text_norm']:.4g} (text embeddings as used), target {done['multiple']:g} x T; "
        f"visual tokens enter the first decoder layer at norm {done['norm_at_merge']:.4g}"
    )
    if done["scale"] is not None:
        found = done["calibration"]
        skipped = "".join(f", {count} skipped ({reason})" for reason, count in found["skipped"].items())
        typer.echo(
            f"factor {done['scale']:.4g} folded into {', '.join(done['scaled'])}: their mean norm was "
            f"{found['mean_norm']:.4g} over {found['images']} images{skipped}"
        )
    check = done["logits"]
    typer.echo(f"loaded again, logits differ by {check['difference']:.1e} at most (allowed: {check['tolerance']:.1e})")
    for note in done["notes"]:
        typer.echo(f"note: {note}")
    typer.echo(TRAIN_NOW)
    typer.echo(f"{out} loads with {done['loads_with']}; `normalign detach {out} FOLDER` takes the aligner out again")


def detach(attached: Path, out: Path, *, restore_projector: bool = False, as_json: bool = False) -> None:
    """Write ``out``, which is ``attached`` without its aligner, and say what it is; see :func:`detach_checkpoint`."""
    done = detach_checkpoint(attached, out, restore_projector=restore_projector)
    if as_json:
        typer.echo(json.dumps(done | {"out": str(out)}, indent=2))
        return
    typer.echo(f"{done['aligner']} taken out; the projector is {done['projector']}")
    if done["trained"]:
        typer.echo(
            "The model was trained with the aligner: without it, visual tokens have a norm that the language model has "
            "not seen. Measure it with `normalign probe`, and train it on."
        )
    typer.echo(f"{out} is a plain checkpoint of its family")
