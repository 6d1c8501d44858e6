"""`normalign plan` against the memory of real training steps: `python -m benchmarks.plan [--json]`.

For each stage of `smol` one process trains a few steps as the pipeline does and reports its peak resident memory; the
estimate is made for the longest of these very batches. It needs the profile's weights, data set and features (the
first stages of `make repro`). Exit status 1 if an estimate is off by more than 15 %.
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROFILE = "smol"
VARIANT = "norm_gwc"
STEPS = 6
TOLERANCE = 0.15


def train_steps(stage: str) -> dict[str, Any]:
    """Train STEPS steps in this process; its peak memory and its largest batch."""
    with tempfile.TemporaryDirectory() as work:
        return _train_steps(stage, Path(work))


def _train_steps(stage: str, work: Path) -> dict[str, Any]:
    from accelerate import Accelerator

    from components.common import initial_model, use_threads
    from components.training import DroppedSamples, FeatureCache, samples_of
    from normalign.settings import load_profile
    from normalign.training.loop import batches, train
    from normalign.vlm.packing import pack

    profile = load_profile(PROFILE)
    use_threads(profile)
    model, processor = initial_model(profile, VARIANT)
    cache = FeatureCache(profile.folder / "features") if stage == "stage1" else None
    dropped = DroppedSamples(work, process=0)
    samples = samples_of(profile, stage, processor, model.config.image_seq_length, cache, dropped)
    options = dataclasses.replace(getattr(profile, stage), checkpoint_minutes=1e6)
    samples = dataclasses.replace(samples, count=min(samples.count, STEPS * options.global_batch))
    pad = processor.tokenizer.pad_token_id
    largest, targets = 0, 0
    for indices in batches(samples.count, options):
        for start in range(0, len(indices), options.micro_batch):
            encoded = [samples.encode(index) for index in indices[start : start + options.micro_batch]]
            packed = pack(encoded, share_rows=options.pack, pad_id=pad)
            if packed.input_ids_BL.numel() > largest:
                largest, targets = packed.input_ids_BL.numel(), len(packed.label_N)
    loaded = peak_bytes()
    rows = train(model, samples, options, accelerator=Accelerator(cpu=True), pad_id=pad, work=work, description=stage)
    return {
        "steps": len(rows),
        "peak": peak_bytes(),
        "loaded": loaded,
        "tokens": largest,
        "targets": targets,
        "micro_batch": options.micro_batch,
        "visual": model.config.image_seq_length,
    }


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def compare() -> dict[str, Any]:
    """Measure both stages, each in a process of its own, and estimate the same batches."""
    from normalign.plan.estimate import Question, estimate
    from normalign.settings import load_profile

    measured = {}
    for stage in ("stage1", "stage2"):
        command = [sys.executable, "-m", "benchmarks.plan", "--child", stage]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        measured[stage] = json.loads(done.stdout.splitlines()[-1])
    per_sample = [m["tokens"] // m["micro_batch"] - m["visual"] for m in measured.values()]
    targets = [-(-m["targets"] // m["micro_batch"]) for m in measured.values()]
    question = Question(text_tokens=(per_sample[0], per_sample[1]), supervised_tokens=(targets[0], targets[1]))
    made = estimate(load_profile(PROFILE), question)
    result: dict[str, Any] = {"baseline": made.baseline}
    for estimated in made.stages:
        name = estimated.stage
        peak, guess = measured[name]["peak"], made.peak(estimated)
        result[name] = {
            "measured": peak,
            "estimated": guess,
            "ratio": round(guess / peak, 3),
            "measured_after_loading": measured[name]["loaded"],
            "tokens": measured[name]["tokens"],
            "parts": dataclasses.asdict(estimated.memory),
        }
    return result


def main() -> None:
    """Print estimate, measurement and ratio of both stages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--child", choices=("stage1", "stage2"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(train_steps(arguments.child)))
        return
    result = compare()
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{'':<8}{'estimate':>12}{'measured':>12}{'ratio':>8}   (MB; {PROFILE}, peak resident memory)")
        for stage in ("stage1", "stage2"):
            row = result[stage]
            print(f"{stage:<8}{row['estimated'] / 1e6:>12.0f}{row['measured'] / 1e6:>12.0f}{row['ratio']:>8.2f}")
        print(f"of which interpreter and libraries, measured: {result['baseline'] / 1e6:.0f} MB")
    if any(abs(result[stage]["ratio"] - 1) > TOLERANCE for stage in ("stage1", "stage2")):
        sys.exit(1)


if __name__ == "__main__":
    main()
