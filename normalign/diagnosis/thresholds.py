"""From which figures on a probed model is called unbalanced, inert or overwritten: conventions, with their reasons."""

import math
from collections.abc import Sequence

# k, or 1/k: a long state turns by about C sin θ/‖h‖, so at 2 half as far as a balanced one, at 10 a tenth as far.
RATIO = (2.0, 10.0)
# First-8 gap: at 1/8 the modalities differ as much as if, in one layer of eight, one were replaced and the other left
# untouched; half of that is mild. Aligned models measured here lie at 0.02 to 0.07, unaligned ones (k > 100) at 0.16.
GAP = (0.0625, 0.125)
INERT_COSINE = 0.9  # mean visual cosine of the first layers: less than 26° a layer...
INERT_SHARE = 0.5  # ...and less than half as far as text in the same layers
# The first layer overwrites: under a quarter of the old direction is left, because what is added is over 3 × as long.
OVERWRITTEN_COSINE = 0.25
OVERWRITING_UPDATE = 3.0
INFLATED = 1.1  # T over the base language model's T; the paper gives no figure
# The assumptions hold roughly: angles predicted from them are off by less than this share of the measured ones.
ASSUMPTIONS_ERROR = 0.25

SEVERITIES = ("none", "mild", "strong")


def severity(k: float, gap: float, failure: str | None) -> str:
    """How bad a norm imbalance is: the imbalance has to be there (``k``) and to show in the first layers (``gap``).

    Strong if both are strong; mild if both are at least mild, if the ratio is strong and does not show, or if visual
    tokens are overwritten. A gap between balanced norms is no norm imbalance.
    """
    ratio, effect = level(imbalance(k), RATIO), level(gap, GAP)
    grade = min(ratio, effect)
    if ratio == len(RATIO) or failure == "overwriting":
        grade = max(grade, 1)
    return SEVERITIES[grade]


def imbalance(k: float) -> float:
    """The ratio of the larger norm to the smaller."""
    return max(k, 1 / k) if k > 0 else math.inf


def level(value: float, bounds: Sequence[float]) -> int:
    """How many of the rising ``bounds`` a value reaches."""
    return sum(value >= bound for bound in bounds)
