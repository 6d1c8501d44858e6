"""Memory and speed of the data path on a file as long as the published ones.

A generated LLaVA JSON array is read, checked and written as a prepared data set (the work of the stage `dataset`),
then a training process starts on it: imports, processor, index, the order of an epoch, the first sample encoded. Each
runs in a process of its own, so that peak memory is its own; their times together, imports included, are what passes
between the published file and the start of a training. The records are conversations without images: decoding a
million images costs what decoders cost and says nothing about the reader.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# How many turns a conversation has and how long its answers are (words): LLaVA's instruction data has such spreads.
TURNS = (1, 1, 2, 3, 5, 8, 12)
WORDS = (2, 6, 12, 25, 60)
VOCABULARY = ("the", "picture", "shows", "a", "red", "round", "table", "behind", "two", "small", "people", "and")
MAX_RSS_GB, MAX_SECONDS = 1.5, 60.0
SHUFFLED = 2000  # samples encoded after the first
ARRAY = "array.json"
ROOT = Path(__file__).resolve().parents[1]


def write_array(path: Path, count: int) -> None:
    """A JSON array of ``count`` records without images."""
    rng = random.Random(0)
    answers = [" ".join(rng.choices(VOCABULARY, k=rng.choice(WORDS))) for _ in range(1000)]
    with path.open("w", encoding="utf-8") as handle:
        for number in range(count):
            talk: list[dict[str, str]] = []
            for _ in range(rng.choice(TURNS)):
                talk += [
                    {"from": "human", "value": rng.choice(answers) + "?"},
                    {"from": "gpt", "value": rng.choice(answers) + "."},
                ]
            row = json.dumps({"id": f"{number:09d}", "conversations": talk})
            handle.write(f"{',' if number else '['}\n{row}")
        handle.write("\n]\n")


def peak_rss_gb() -> float:
    """Peak memory of this process alone; `ru_maxrss` would count what the parent held when it started it."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text(encoding="utf-8").split("VmHWM:")[1].split()[0]) * 1024 / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9  # bytes on macOS


def profile() -> Any:
    from normalign.settings import load_profile

    return load_profile("ci")


def prepare(launched: float) -> dict[str, Any]:
    """Read and check the array, write ``stage1.jsonl``; ``launched``: when this process began."""
    from normalign.data.llava import read_llava
    from normalign.data.manifest import Tally
    from normalign.files import write_lines

    tally = Tally(Path())
    lines = tally.lines(read_llava(Path(ARRAY), Path(), max_pixels=1))
    write_lines(profile().folder / "dataset" / "stage1.jsonl", lines)
    seconds = time.time() - launched
    kept = tally.manifest().kept
    return {"records": kept, "seconds": seconds, "records_per_second": kept / seconds, "cpu_seconds": _cpu()}


def first_sample(launched: float) -> dict[str, Any]:
    """All that a training stage does with its data before the first step; ``launched``: when its process began."""
    from components.training import DroppedSamples, samples_of
    from normalign.training.loop import batches
    from normalign.vlm.build import build_processor

    ci = profile()
    processor = build_processor(ci.folder / "weights", ci.model.image_size)
    start = time.perf_counter()
    samples = samples_of(ci, "stage1", processor, 16, None, DroppedSamples(Path("work"), 0))
    order = [index for step in batches(samples.count, ci.stage1) for index in step]
    samples.encode(order[0])
    result = {
        "seconds_to_first_sample": time.time() - launched,
        "seconds_of_it_data": time.perf_counter() - start,
        "cpu_seconds": _cpu(),
    }
    start = time.perf_counter()
    for index in order[1 : SHUFFLED + 1]:
        samples.encode(index)
    encoded = min(SHUFFLED, len(order) - 1)
    return {**result, "shuffled_samples_per_second": encoded / (time.perf_counter() - start)}


def _cpu() -> float:
    """Processor time of this process, which other load on the machine changes less than it does the wall clock."""
    return time.process_time()


def in_own_process(part: str, folder: Path) -> dict[str, Any]:
    """Run one part with ``folder`` as its working directory."""
    print(f"{part} ...", file=sys.stderr, flush=True)
    code = f"from benchmarks.data import run_part; run_part({part!r}, {time.time()})"
    return dict(json.loads(_python(folder, "-c", code).splitlines()[-1]))


def run_part(part: str, launched: float) -> None:
    result = prepare(launched) if part == "prepare" else first_sample(launched)
    print(json.dumps({**result, "peak_rss_gb": peak_rss_gb()}))


def _python(folder: Path, *arguments: str) -> str:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command, environment = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout


def measure(count: int, folder: Path) -> dict[str, Any]:
    """Generate the array in ``folder`` and run both parts on it."""
    (folder / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    _python(folder, "-m", "components.weights", "ci")
    print(f"writing {count} records ...", file=sys.stderr, flush=True)
    write_array(folder / ARRAY, count)
    prepared = in_own_process("prepare", folder)
    first = in_own_process("first_sample", folder)
    seconds = prepared["seconds"] + first["seconds_to_first_sample"]
    return {
        "records": count,
        "array_gb": (folder / ARRAY).stat().st_size / 1e9,
        "prepare": prepared,
        "first_sample": first,
        "seconds_to_training": seconds,
        "within_limits": max(prepared["peak_rss_gb"], first["peak_rss_gb"]) <= MAX_RSS_GB and seconds <= MAX_SECONDS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments.records, Path(folder))
    if arguments.json:
        print(json.dumps(result))
        return
    prepared, first = result["prepare"], result["first_sample"]
    print(f"JSON array of {result['records']:,} records, {result['array_gb']:.2f} GB, no images")
    print(
        f"read, checked, written: {prepared['seconds']:.1f} s (processor {prepared['cpu_seconds']:.1f} s), "
        f"{prepared['records_per_second']:,.0f} records/s, "
        f"peak memory {prepared['peak_rss_gb']:.2f} GB (limit {MAX_RSS_GB})"
    )
    print(
        f"start of training process to first sample: {first['seconds_to_first_sample']:.1f} s "
        f"(processor {first['cpu_seconds']:.1f} s), "
        f"{first['seconds_of_it_data']:.1f} s of it for the data; peak memory {first['peak_rss_gb']:.2f} GB"
    )
    print(f"from the array to the first sample: {result['seconds_to_training']:.1f} s (limit {MAX_SECONDS:.0f})")
    print(f"samples in shuffled order, encoded: {first['shuffled_samples_per_second']:,.0f}/s")


if __name__ == "__main__":
    main()
