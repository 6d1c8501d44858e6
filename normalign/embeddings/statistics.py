"""T, the target norm: statistics of the rows of a language model's input embedding (UB §5.1)."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

PERCENTILES = (1, 5, 25, 75, 95, 99)


def text_norm_statistics(norms_N: npt.NDArray[np.float64], width: int) -> dict[str, Any]:
    """T (mean over the non-zero rows), spread, count of zero rows, and the gain T/√D that gives norm T.

    Zero rows (padded vocabularies) are counted and left out of every statistic.

    Raises:
        ValueError: some rows are not finite, or all are zero.
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
