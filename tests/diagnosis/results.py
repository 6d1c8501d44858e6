"""Made-up results of probed models whose figures follow from a few planted ones."""

import base64
import io
import math
from typing import Any

from PIL import Image

from normalign.norms.statistics import sync_gap
from normalign.norms.theory import Updates, norms_over_layers, predict_angles, turning_angles


def summary(mean: float, tokens: int = 384) -> dict[str, Any]:
    """A norm summary as ``summarise_norms`` makes it."""
    sinks = {"count": 0, "share": 0.0, "mean_norm": None}
    spread = {"std": 0.2 * mean, "median": 0.97 * mean, "p5": 0.7 * mean, "p95": 1.4 * mean}
    return {"mean": mean, **spread, "tokens": tokens, "mean_without_sinks": mean, "sinks": sinks}


def modality(norm: float, updates: Updates, rank: float) -> dict[str, list[Any]]:
    """Layer figures of tokens that enter with ``norm`` and get ``updates``."""
    norms, angles = norms_over_layers(norm, updates), turning_angles(norm, updates)
    relative = [size / before for size, before in zip(updates.size, norms, strict=False)]
    return {
        "norm_mean": norms,
        "norm_median": norms,
        "norm_without_sinks": norms,
        "sinks": [0] * len(norms),
        "cosine": [math.cos(math.radians(angle)) for angle in angles],
        "angle": angles,
        "relative_update": relative,
        "relative_update_attention": [0.4 * value for value in relative],
        "relative_update_mlp": [0.8 * value for value in relative],
        "effective_rank": [rank + layer for layer in range(len(norms))],
    }


def result(
    k: float,
    text: Updates,
    visual: Updates | None = None,
    *,
    model: str = "model",
    T: float = 2.0,
    rho: float | None = 0.1,
    **changes: Any,
) -> dict[str, Any]:
    """A probe's result: text enters with norm ``T``, visual tokens with ``k * T``; both get their updates."""
    layers = {"visual": modality(k * T, visual or text, 10), "text": modality(T, text, 30)}
    cosines = layers["visual"]["cosine"], layers["text"]["cosine"]
    depth = len(text.size)
    interface = {"vision_output": summary(40), "projector_input": summary(40), "projector_output": summary(k * T)}
    return {
        "model": model,
        "family": "llava",
        "width": 64,
        "T": T,
        "T_as_used": T,
        "embedding_scale": 1.0,
        "base_T": None,
        "counts": {"samples": 24, "visual_tokens": 384, "text_tokens": 550, "skipped": {}},
        "interface": {**interface, "visual_at_merge": summary(k * T), "text_at_merge": summary(T)},
        "ratio": k,
        "k_in_context": k,
        "layers": layers,
        "sync_gap": {"all": sync_gap(*cosines), "first8": sync_gap(*cosines, 8)},
        "attention": {"mass": [0.3] * depth, "entropy": [2.0] * depth},
        "routing": None,
        "injected_layers": [],
        "visual_vocabulary": False,
        "theory": {
            "rho": [rho] * depth,
            "angle_predicted": predict_angles(text.size, text.angle, layers["visual"]["norm_median"][:-1]),
            "angle_measured": layers["visual"]["angle"],
        },
        "maps": [],
        **changes,
    }


def attention_map(name: str, question: str, size: int = 60) -> dict[str, Any]:
    """One map of 2 x 3 visual tokens over a small picture."""
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), "#3070a0").save(buffer, "PNG")
    picture = base64.b64encode(buffer.getvalue()).decode()
    weights = [[0.1, 0.2, 0.1], [0.1, 0.4, 0.1]]
    return {
        "id": name,
        "question": question,
        "grid": [2, 3],
        "layer": 1,
        "map": weights,
        "image_png_base64": picture,
    }
