"""What one training stage is told; no heavy import here, since settings are read by every command."""

from dataclasses import dataclass

MODULES = ("vision", "projector", "aligner", "language")


@dataclass(frozen=True)
class TrainingOptions:
    """One training stage. ``learning_rate`` is the trainable table: a module that is not named there is frozen.

    ``global_batch`` counts samples per optimizer step over all devices, ``micro_batch`` those of one forward pass on
    one device; accumulation follows from both and the devices at hand. ``per_turn`` trains each turn as if asked
    alone, ``pack`` lets short samples share a row. ``clip_per_module`` holds each module's gradient to ``clip_norm`` on
    its own, so that a module with a large one takes nothing from the others.
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
    seed: int
    per_turn: bool
    pack: bool
    checkpoint_minutes: float

    def __post_init__(self) -> None:
        for module, rate in self.learning_rate.items():
            if module not in MODULES:
                raise ValueError(f"learning_rate: unknown module {module!r}; valid: {', '.join(MODULES)}")
            if rate <= 0:
                raise ValueError(f"learning_rate.{module}: {rate} is not above 0; leave the module out to freeze it")
        if not self.learning_rate:
            raise ValueError("learning_rate: no module is named, so nothing would train")
        for name in ("global_batch", "micro_batch", "epochs", "clip_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")
