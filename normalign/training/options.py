"""What one training stage is told; no heavy import here, since settings are read by every command."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

MODULES = ("vision", "projector", "aligner", "language")


class Rule(NamedTuple):
    """What a setting must hold. NaN holds for no comparison, and a bound below infinity keeps infinity out."""

    holds: Callable[[Any], object]
    wanted: str


COUNT = Rule(lambda value: value >= 1, "at least 1")
POSITIVE = Rule(lambda value: 0 < value < math.inf, "a finite number above 0")
NOT_NEGATIVE = Rule(lambda value: 0 <= value < math.inf, "a finite number of at least 0")
SHARE = Rule(lambda value: 0 <= value <= 1, "a number from 0 to 1")
SEED = Rule(lambda value: 0 <= value < 2**32, "a seed from 0 to 4294967295")
MOMENTS = Rule(lambda betas: all(0 <= beta < 1 for beta in betas), "two numbers of at least 0 and below 1")


def require(settings: object, rule: Rule, *fields: str) -> None:
    """Check ``fields`` of ``settings``.

    Raises:
        ValueError: a field breaks ``rule``; the message names the field, what is wanted and the value.
    """
    for field in fields:
        value = getattr(settings, field)
        if not rule.holds(value):
            raise ValueError(f"{field}: expected {rule.wanted}, got {value!r}")


@dataclass(frozen=True)
class TrainingOptions:
    """One training stage. ``learning_rate`` is the trainable table: a module that is not named there is frozen.

    ``global_batch`` counts samples per optimizer step over all devices, ``micro_batch`` those of one forward pass on
    one device; accumulation follows from both and the devices at hand. ``per_turn`` trains each turn as if asked
    alone, ``pack`` lets short samples share a row. ``clip_per_module`` holds each module's gradient to ``clip_norm`` on
    its own, so that a module with a large one takes nothing from the others. ``gradient_checkpointing`` keeps only each
    layer's input for the backward pass and computes the rest again: less memory, a third more work.
    """

    learning_rate: dict[str, float]
    global_batch: int
    micro_batch: int
    epochs: int
    warmup_ratio: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_norm: float
    clip_per_module: bool
    gradient_checkpointing: bool
    seed: int
    per_turn: bool
    pack: bool
    checkpoint_minutes: float

    def __post_init__(self) -> None:
        for module, rate in self.learning_rate.items():
            if module not in MODULES:
                raise ValueError(f"learning_rate: unknown module {module!r}; valid: {', '.join(MODULES)}")
            if not POSITIVE.holds(rate):
                wanted = f"{POSITIVE.wanted}, got {rate}; leave the module out to freeze it"
                raise ValueError(f"learning_rate.{module}: expected {wanted}")
        if not self.learning_rate:
            raise ValueError("learning_rate: no module is named, so nothing would train")
        require(self, COUNT, "global_batch", "micro_batch", "epochs")
        require(self, POSITIVE, "clip_norm", "eps")
        require(self, NOT_NEGATIVE, "weight_decay", "checkpoint_minutes")
        require(self, SHARE, "warmup_ratio")
        require(self, SEED, "seed")
        require(self, MOMENTS, "betas")
        within = Rule(lambda size: size <= self.global_batch, f"at most global_batch ({self.global_batch})")
        require(self, within, "micro_batch")
