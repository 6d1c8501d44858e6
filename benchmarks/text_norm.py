"""`normalign text-norm` against loading the model: `python -m benchmarks.text_norm [FOLDER] [--json]`.

Each is a whole process, from the start of the interpreter to its end, and they take turns, so that other load on the
machine meets both. FOLDER is a language model's; without it the pipeline's weights are taken where they are, else a
model of SmolLM2-135M's dimensions with random weights. Exit status 1 if a limit is missed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MIN_SPEEDUP, MAX_MB = 20.0, 256.0
REPEATS = 5
ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = ROOT / "data" / "smol" / "weights" / "language"
LOAD = "import sys; from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained(sys.argv[1])"
WRITE = """
import sys
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                     num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[1])
"""


def run(*arguments: str) -> tuple[float, float]:
    """Run a Python process to its end: wall-clock seconds and peak resident memory in MB."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )
    assert process.stderr is not None
    told = process.stderr.read()
    # Of this child alone; what this small process held when it started it is less than any Python with NumPy.
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(told.decode(errors="replace"))
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def measure(folder: Path) -> dict[str, Any]:
    """Medians over REPEATS runs of both, after one of each that fills the system's caches."""
    ours, theirs = ("-m", "normalign", "text-norm", str(folder), "--json"), ("-c", LOAD, str(folder))
    runs: dict[tuple[str, ...], list[tuple[float, float]]] = {ours: [], theirs: []}
    for number in range(REPEATS + 1):
        print(f"run {number} of {REPEATS} ...", file=sys.stderr, flush=True)
        for command, results in runs.items():
            results.append(run(*command))
    seconds = {command: statistics.median(s for s, _ in results[1:]) for command, results in runs.items()}
    return {
        "speedup": seconds[theirs] / seconds[ours],
        "peak_mb": max(megabytes for _, megabytes in runs[ours]),
        "seconds": seconds[ours],
        "from_pretrained_seconds": seconds[theirs],
        "from_pretrained_peak_mb": max(megabytes for _, megabytes in runs[theirs]),
        "repeats": REPEATS,
    }


def main() -> None:
    """Print the speed-up and the peak memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    arguments = parser.parse_args()
    folder = arguments.folder or (WEIGHTS if (WEIGHTS / "config.json").is_file() else None)
    with tempfile.TemporaryDirectory() as made:
        if folder is None:
            print("writing a model with random weights ...", file=sys.stderr, flush=True)
            run("-c", WRITE, made)
        result = measure(folder or Path(made))
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            f"text-norm: {result['seconds']:.2f} s, peak memory {result['peak_mb']:.0f} MB (limit {MAX_MB:.0f}); "
            f"from_pretrained: {result['from_pretrained_seconds']:.2f} s, {result['from_pretrained_peak_mb']:.0f} MB"
        )
        print(f"speed-up: {result['speedup']:.1f} x (at least {MIN_SPEEDUP:.0f})")
    if result["speedup"] < MIN_SPEEDUP or result["peak_mb"] > MAX_MB:
        sys.exit(1)


if __name__ == "__main__":
    main()
