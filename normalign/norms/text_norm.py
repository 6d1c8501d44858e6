"""T, the target norm: statistics of the rows of a language model's input embedding (UB §5.1)."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

EMBEDDING_SUFFIX = "embed_tokens.weight"
ROWS_AT_ONCE = 16384
PERCENTILES = (1, 5, 25, 75, 95, 99)


def find_embedding(folder: Path) -> tuple[Path, str]:
    """File and tensor name of the input embedding in a folder of safetensors, sharded or not.

    Raises:
        ValueError: no such tensor, or more than one; the message names what was found.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    else:
        file = folder / "model.safetensors"
        if not file.exists():
            raise ValueError(f"{folder} holds no model.safetensors; run the weights stage first")
        with safe_open(file, framework="np") as tensors:
            names = dict.fromkeys(tensors.keys(), file.name)
    found = [name for name in names if name == EMBEDDING_SUFFIX or name.endswith("." + EMBEDDING_SUFFIX)]
    if len(found) != 1:
        raise ValueError(f"{folder}: expected one tensor named *{EMBEDDING_SUFFIX}, found {found or 'none'}")
    return folder / names[found[0]], found[0]


def read_row_norms(file: Path, name: str) -> tuple[npt.NDArray[np.float64], int]:
    """L2 norm (N,) of each row of tensor ``name`` and the row width D; nothing else of ``file`` is read."""
    import torch  # bfloat16, which NumPy lacks

    with safe_open(file, framework="pt") as tensors:
        rows = tensors.get_slice(name)
        count, width = rows.get_shape()
        norms = [
            rows[start : start + ROWS_AT_ONCE].to(torch.float64).norm(dim=-1).numpy()
            for start in range(0, count, ROWS_AT_ONCE)
        ]
    return np.concatenate(norms), width


def text_norm_statistics(norms_N: npt.NDArray[np.float64], width: int) -> dict[str, Any]:
    """T (mean over the non-zero rows), spread, count of zero rows, and the gain T/√D that gives norm T.

    Zero rows (padded vocabularies) are counted and left out of every statistic.
    """
    if not np.isfinite(norms_N).all():
        raise ValueError(f"{int((~np.isfinite(norms_N)).sum())} embedding rows are not finite; fetch the weights again")
    live = norms_N[norms_N > 0]
    if live.size == 0:
        raise ValueError("every row of the text embedding is zero; these are not trained weights")
    mean = float(live.mean())
    return {
        "T": mean,
        "std": float(live.std()),
        "median": float(np.median(live)),
        "percentiles": {str(p): float(np.percentile(live, p)) for p in PERCENTILES},
        "rows": int(norms_N.size),
        "zero_rows": int(norms_N.size - live.size),
        "hidden_size": width,
        "g_init": mean / math.sqrt(width),
    }
