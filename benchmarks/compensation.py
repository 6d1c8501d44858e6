"""How much gradient compensation makes gradient norms swing, over seeds: none, GWC as published, GWC with a bound.

Every module trains on the profile's stage-2 records from its initial weights, without clipping, so that the norms seen
are the model's own. The figure is the standard deviation of ln(gradient norm) around its running mean: a steady decline
of the norm is no swing. Beside it: the share of the clip budget that goes to what lies before the aligner, vision tower
and projector, whose gradients are the compensated ones.

Needs the profile's data and weights (`make repro` or its first stages).
"""

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "no compensation": {"gwc": False},
    "GWC": {"gwc": True},
    "GWC, at most 3": {"gwc": True, "gwc_limit": 3.0},
}
WINDOW = 5


def swing(norms: list[float]) -> float:
    """Standard deviation of ln(norm) minus its mean over WINDOW steps centred on it."""
    logs = [math.log(norm) for norm in norms]
    half = WINDOW // 2
    centred = [logs[i] - statistics.fmean(logs[i - half : i + half + 1]) for i in range(half, len(logs) - half)]
    return statistics.stdev(centred)


def gradients(profile_name: str, changes: dict[str, Any], seed: int, steps: int) -> list[dict[str, Any]]:
    """Log rows of a training run of ``steps`` steps, or as many as whole epochs take."""
    from accelerate import Accelerator

    from components.common import initial_model, use_threads
    from components.training import DroppedSamples, samples_of
    from normalign.settings import VariantSettings, load_profile
    from normalign.training.loop import Samples, train

    profile = load_profile(profile_name)
    options = dataclasses.replace(profile.stage2, seed=seed, clip_norm=1e9, epochs=1)
    profile = dataclasses.replace(
        profile,
        stage1=dataclasses.replace(profile.stage1, seed=seed),  # of the projector's initial weights
        stage2=options,
        variants={"tried": VariantSettings(aligner="layernorm", **changes)},
    )
    use_threads(profile)
    model, processor = initial_model(profile, "tried")
    with tempfile.TemporaryDirectory() as work:
        dropped = DroppedSamples(Path(work), 0)
        samples = samples_of(profile, "stage2", processor, model.config.image_seq_length, None, dropped)
        wanted = steps * options.global_batch
        count = min(samples.count, wanted)
        options = dataclasses.replace(options, epochs=-(-wanted // count))
        return train(
            model,
            Samples(count, samples.encode, samples.visual),
            options,
            accelerator=Accelerator(cpu=profile.compute.device == "cpu"),
            pad_id=processor.tokenizer.pad_token_id,
            work=Path(work),
            description=f"seed {seed}",
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="smol")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for name, changes in VARIANTS.items():
        entry = found.setdefault(name, {"swing": [], "compensated_share": []})
        for seed in range(arguments.seeds):
            with contextlib.redirect_stdout(sys.stderr):  # the loop prints what it trains
                rows = gradients(arguments.profile, changes, seed, arguments.steps)
            entry["swing"].append(swing([row["grad_total"] for row in rows]))
            shares = [row["clip_share_projector"] + row["clip_share_vision"] for row in rows]
            entry["compensated_share"].append(statistics.fmean(shares))
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{'':<18} {'swing of ln(gradient norm)':<30} share of clip budget, vision tower and projector")
    for name, entry in found.items():
        cells = [f"{statistics.fmean(v):.3f} ± {statistics.stdev(v):.3f}" for v in entry.values()]
        print(f"{name:<18} {cells[0]:<30} {cells[1]}")


if __name__ == "__main__":
    main()
