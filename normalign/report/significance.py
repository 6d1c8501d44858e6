"""Is a difference in accuracy more than chance? Paired over items, clustered by image. No I/O."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from scipy.stats import t as student_t


@dataclass(frozen=True)
class Difference:
    """A difference of two mean scores with its interval, in the unit of the scores (shares 0..1).

    ``p_value``: two-sided, against no difference. ``items`` and ``clusters``: None if unpaired.
    """

    difference: float
    stderr: float
    low: float
    high: float
    p_value: float
    items: int | None = None
    clusters: int | None = None


def cluster_stderr(values: Sequence[float], clusters: Sequence[Hashable]) -> float:
    """Standard error of the mean of ``values`` when values of one cluster may be correlated.

    The square root of G/(G−1) · Σ_g (Σ_{i in g} (v_i − v̄))² / n² over the G clusters: items about one image
    count as one draw. With one item per cluster this is the ordinary standard error.

    Raises:
        ValueError: lengths differ, or fewer than two clusters.
    """
    if len(values) != len(clusters):
        raise ValueError(f"{len(values)} values but {len(clusters)} cluster names; give one name per value")
    mean = math.fsum(values) / len(values) if values else 0.0
    residuals: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        residuals.setdefault(cluster, []).append(value - mean)
    count = len(residuals)
    if count < 2:
        raise ValueError(f"{count} cluster(s); a standard error needs items about at least two images")
    squares = math.fsum(math.fsum(members) ** 2 for members in residuals.values())
    return math.sqrt(count / (count - 1) * squares) / len(values)


def paired_difference(
    ours: Sequence[float],
    reference: Sequence[float],
    clusters: Sequence[Hashable],
    confidence: float = 0.95,
) -> Difference:
    """Mean of ``ours`` − ``reference`` over the same items, with a cluster-robust interval.

    Args:
        ours: one score per item.
        reference: the other model's scores of the same items, in the same order.
        clusters: the image that each item is about.
        confidence: coverage of the interval, by Student's t with (clusters − 1) degrees of freedom.
    """
    if len(ours) != len(reference):
        raise ValueError(f"{len(ours)} scores against {len(reference)}; pair them item by item first")
    differences = [a - b for a, b in zip(ours, reference, strict=True)]
    stderr = cluster_stderr(differences, clusters)
    mean = math.fsum(differences) / len(differences)
    count = len(set(clusters))
    half = float(student_t.ppf((1 + confidence) / 2, count - 1)) * stderr
    tail = float(student_t.sf(_statistic(mean, stderr), count - 1))
    return Difference(mean, stderr, mean - half, mean + half, 2 * tail, len(differences), count)


def unpaired_difference(
    ours: float, ours_stderr: float, reference: float, reference_stderr: float, confidence: float = 0.95
) -> Difference:
    """Difference of two accuracies known only as aggregates, their errors taken as independent (normal)."""
    difference = ours - reference
    stderr = math.hypot(ours_stderr, reference_stderr)
    half = NormalDist().inv_cdf((1 + confidence) / 2) * stderr
    statistic = _statistic(difference, stderr)
    tail = 0.0 if math.isinf(statistic) else 1 - NormalDist().cdf(statistic)
    return Difference(difference, stderr, difference - half, difference + half, 2 * tail)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: they bound the chance of any false claim."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def _statistic(difference: float, stderr: float) -> float:
    """|difference| in standard errors; identical scores give 0, a constant difference infinity."""
    if stderr == 0:
        return 0.0 if difference == 0 else math.inf
    return abs(difference) / stderr
