"""Cost of measuring a model while it runs, against running it, and against keeping all states and measuring then.

A random Llama of SmolLM2's width and 16 of its layers, on sequences of several lengths, four fifths of them visual:

- forward: the model alone
- probe: with norms, cosines, update sizes (whole, attention, MLP) and update directions taken in the layers' hooks
- hidden_states: `output_hidden_states=True`, then the same of the states kept, except for attention and MLP apart,
  which no state tells
- probe_attention, attentions: the same two with attention to the image, which needs plain attention;
  `output_attentions=True` keeps every layer's weights

Times are processor times of one thread, the ways taking turns within one process; a ratio is the median of those within
a turn, so that a machine that slows down meanwhile slows both sides. The figures that the probe's `summary` makes once,
of all passes, are timed apart. Peak memory is that of one pass, each in a process of its own, beyond what the model
took before.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

LENGTHS = (256, 1024, 4096)
WAYS = ("forward", "probe", "hidden_states", "probe_attention", "attentions")
MAX_ATTENTION_LENGTH = 1024  # attention weights of all layers at 4096 tokens: 9.7 GB
MAX_TIME_VS_FORWARD, MAX_STATES = 1.25, 2.0
WIDTH, LAYERS, HEADS = 576, 16, 9
ROOT = Path(__file__).resolve().parents[1]


def build() -> Any:
    """The model, without embeddings to speak of: it is given states."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=WIDTH,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=3,
        max_position_embeddings=max(LENGTHS),
    )
    return LlamaModel(config).eval()


def ways(length: int) -> dict[str, Callable[[], Any]]:
    """What is compared, ready to run on a sequence of ``length``."""
    import torch

    from normalign.diagnosis.capture import layer_parts
    from normalign.diagnosis.layers import Masks

    model = build()
    parts = layer_parts(model.layers)
    x_BLD = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(1))
    visual_BL = torch.arange(length)[None] < length * 4 // 5
    masks = Masks(visual_BL, ~visual_BL)

    def forward(**options: Any) -> Any:
        return model(inputs_embeds=x_BLD, use_cache=False, **options)

    return {
        "forward": partial(_plain, model, forward),
        "probe": partial(_probe, model, parts, forward, masks, attention=False),
        "hidden_states": partial(_afterwards, model, forward, visual_BL, attention=False),
        "probe_attention": partial(_probe, model, parts, forward, masks, attention=True),
        "attentions": partial(_afterwards, model, forward, visual_BL, attention=True),
    }


def _plain(model: Any, forward: Callable[..., Any]) -> None:
    model.set_attn_implementation("sdpa")
    forward()


def _probe(model: Any, parts: Any, forward: Callable[..., Any], masks: Any, *, attention: bool) -> Any:
    from contextlib import ExitStack

    from normalign.diagnosis.attention import AttentionStatistics
    from normalign.diagnosis.capture import watch_attention, watch_layers
    from normalign.diagnosis.layers import LayerStatistics

    model.set_attn_implementation("eager" if attention else "sdpa")
    measured, looked = LayerStatistics(LAYERS, WIDTH, ranks=False), AttentionStatistics(LAYERS)
    with ExitStack() as stack:
        stack.enter_context(watch_layers(parts, partial(measured.add, masks=masks)))
        if attention:
            stack.enter_context(watch_attention(model.layers, partial(looked.add, masks=masks)))
        forward()
    return measured, looked


def _afterwards(model: Any, forward: Callable[..., Any], visual_BL: Any, *, attention: bool) -> list[Any]:
    """The usual way, in plain torch: per layer and modality norm, cosine, relative update and mean update direction."""
    from torch.nn.functional import cosine_similarity, normalize

    model.set_attn_implementation("eager" if attention else "sdpa")
    output = forward(output_hidden_states=True, output_attentions=attention)
    found: list[Any] = []
    for before, after in zip(output.hidden_states[:-1], output.hidden_states[1:], strict=True):
        norm, cosine, update = before.norm(dim=-1), cosine_similarity(before, after, dim=-1), after - before
        size, unit = update.norm(dim=-1) / norm, before / norm[..., None]
        across = normalize(update - (update * unit).sum(-1, keepdim=True) * unit, dim=-1)
        for mask in (visual_BL, ~visual_BL):
            found.append([norm[mask].mean(), norm[mask].median(), cosine[mask].mean(), size[mask].median()])
            found.append(across[mask].sum(0))
    for weights in output.attentions or ():
        share = weights[0][:, ~visual_BL[0]][:, :, visual_BL[0]]
        found.append([share.sum(-1).mean(), -(share * share.clamp_min(1e-30).log()).sum(-1).mean()])
    return found


def time_part(length: int, turns: int) -> dict[str, list[float]]:
    """Processor seconds of every way, ``turns`` times, one after the other in every turn; a quarter with attention."""
    import torch

    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}
    with torch.no_grad():
        compared = ways(length)
        _take_turns(compared, WAYS[:3], turns, seconds)
        if length <= MAX_ATTENTION_LENGTH:
            _take_turns(compared, WAYS[3:], -(-turns // 4), seconds)
        measured, _ = compared["probe"]()
        start = time.process_time()
        measured.summary()
        seconds["summary"] = [time.process_time() - start]
    return seconds


def _take_turns(
    compared: dict[str, Callable[[], Any]], names: Sequence[str], turns: int, seconds: dict[str, list[float]]
) -> None:
    for turn in range(turns + 1):
        for name in names:
            start = time.process_time()
            compared[name]()
            if turn:  # the first warms up
                seconds.setdefault(name, []).append(time.process_time() - start)


def memory_part(length: int, way: str) -> int:
    """Bytes by which one pass raised the memory of this process at most."""
    import torch

    torch.set_num_threads(1)
    run = ways(length)[way]
    with torch.no_grad():
        run()  # libraries take what they take once
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # else what was freed hides a part of the next peak
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
        before = _status("VmRSS")
        run()
        return _status("VmHWM") - before


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def measure(length: int, turns: int) -> dict[str, Any]:
    """All figures at one length; ratios of the probe to the other ways (below 1: less)."""
    seconds = in_own_process("time_part", length, turns * max(1, 4096 // length))  # short ones are over soon
    peaks = {way: in_own_process("memory_part", length, way) for way in WAYS if way in seconds}

    def ratio(way: str, other: str) -> float | None:
        if other not in seconds:
            return None
        return statistics.median(a / b for a, b in zip(seconds[way], seconds[other], strict=True))

    state = length * WIDTH * 4
    result = {
        "tokens": length,
        "seconds": {way: statistics.median(values) for way, values in seconds.items()},
        "peak_mb": {way: peak / 1e6 for way, peak in peaks.items()},
        "time_vs_forward": ratio("probe", "forward"),
        "time_vs_hidden_states": ratio("probe", "hidden_states"),
        "memory_vs_hidden_states": peaks["probe"] / peaks["hidden_states"],
        "states_above_forward": (peaks["probe"] - peaks["forward"]) / state,
        "time_vs_attentions": ratio("probe_attention", "attentions"),
        "memory_vs_attentions": peaks["probe_attention"] / peaks["attentions"] if "attentions" in peaks else None,
    }
    return {**result, "within_limits": _within(result)}


def _within(result: dict[str, Any]) -> bool:
    smaller = ("time_vs_hidden_states", "memory_vs_hidden_states", "time_vs_attentions", "memory_vs_attentions")
    return (
        result["time_vs_forward"] <= MAX_TIME_VS_FORWARD
        and result["states_above_forward"] <= MAX_STATES
        and all(result[name] is None or result[name] < 1 for name in smaller)
    )


def in_own_process(part: str, *arguments: Any) -> Any:
    """Run a part in a process of its own, on one thread, large blocks of memory going back when freed."""
    code = f"import json; from benchmarks.probe import {part}; print(json.dumps({part}(*{arguments!r})))"
    print(f"{part} {arguments} ...", file=sys.stderr, flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--turns", type=int, default=5, help="of each way; more for short sequences")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    results = {str(length): measure(length, arguments.turns) for length in arguments.lengths}
    if arguments.json:
        names = ("time_vs_forward", "time_vs_hidden_states", "memory_vs_hidden_states")
        by_name = {name: {length: result[name] for length, result in results.items()} for name in names}
        print(json.dumps({**by_name, "lengths": results}))
        return
    print(f"{'tokens':>6}  {'forward':>9}  {'time / forward':>14}  {'time / kept':>11}  {'memory / kept':>13}  states")
    for result in results.values():
        print(
            f"{result['tokens']:>6}  {result['seconds']['forward']:>7.2f} s  {result['time_vs_forward']:>14.3f}  "
            f"{result['time_vs_hidden_states']:>11.3f}  {result['memory_vs_hidden_states']:>13.3f}  "
            f"{result['states_above_forward']:>6.2f}"
        )
    print("states: peak memory above that of the forward, in states of one layer (limit 2)")
    for result in results.values():
        if result["time_vs_attentions"] is not None:
            print(
                f"with attention, {result['tokens']} tokens: {result['time_vs_attentions']:.3f} of the time and "
                f"{result['memory_vs_attentions']:.3f} of the memory of keeping it"
            )


if __name__ == "__main__":
    main()
