"""How much a training stage has to do: samples and tokens per sample."""

import math
from dataclasses import dataclass
from pathlib import Path

from normalign.files import read_json
from normalign.plan.sources import published
from normalign.settings import Profile
from normalign.training.options import TrainingOptions

STAGES = ("stage1", "stage2")
# Text tokens of a sample (all that are not visual, chat template included), and how many of them are supervised.
# LLaVA's are round figures for captions and for conversations of several turns, not counts of the data; the synthetic
# set's are the means of what smol prepares.
ASSUMED_TEXT = {
    "llava": {"stage1": (60, 20), "stage2": (400, 220)},
    "synthetic": {"stage1": (28, 8), "stage2": (68, 13)},
}


@dataclass(frozen=True)
class Workload:
    """One training stage. ``visual`` and ``text`` tokens of a mean sample; ``supervised`` of the text are targets."""

    samples: int
    visual: int
    text: int
    supervised: int
    epochs: int
    global_batch: int
    micro_batch: int
    devices: int

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.visual + self.text

    @property
    def accumulation(self) -> int:
        """Forward passes per optimizer step on one device."""
        return math.ceil(self.global_batch / (self.micro_batch * self.devices))

    @property
    def steps(self) -> int:
        """Optimizer steps of the stage."""
        return math.ceil(self.samples / self.global_batch) * self.epochs

    @property
    def seen(self) -> int:
        """Samples over all epochs."""
        return self.samples * self.epochs


def workload(
    profile: Profile,
    stage: str,
    visual: int,
    *,
    devices: int,
    samples: int | None = None,
    text: int | None = None,
    supervised: int | None = None,
) -> Workload:
    """The stage's samples and tokens; what is not given is taken from the data set or assumed.

    Raises:
        ValueError: the number of samples is not known, more tokens are supervised than there are or a sample longer
            than the context, or devices would have nothing to do.
    """
    options: TrainingOptions = getattr(profile, stage)
    assumed = ASSUMED_TEXT["llava" if profile.dataset.synthetic is None else "synthetic"][stage]
    text = assumed[0] if text is None else text
    if supervised is None:
        supervised = math.ceil(text * assumed[1] / assumed[0])
    if not 0 < supervised <= text:
        raise ValueError(f"{stage}: {supervised} supervised tokens of {text} text tokens; give at least 1, at most all")
    if visual + text > profile.model.max_tokens:
        raise ValueError(
            f"{stage}: {visual} visual and {text} text tokens are more than model.max_tokens "
            f"({profile.model.max_tokens}), to which training cuts a sample; give fewer, or raise it"
        )
    if devices > options.global_batch:
        raise ValueError(
            f"{stage}: {devices} devices share a global_batch of {options.global_batch} samples, so that some would "
            "have none; give fewer, or raise it"
        )
    return Workload(
        samples=count_samples(profile, stage) if samples is None else samples,
        visual=visual,
        text=text,
        supervised=supervised,
        epochs=options.epochs,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        devices=devices,
    )


def count_samples(profile: Profile, stage: str) -> int:
    """Samples of a stage: as its settings say, as prepared, or as published for the data set's file.

    Raises:
        ValueError: none of these is known.
    """
    if profile.dataset.synthetic is not None:
        from normalign.data.synthetic import TEXT_RECORD_SHARE

        images = int(getattr(profile.dataset.synthetic, f"{stage}_images"))
        return images + (round(images * TEXT_RECORD_SHARE) if stage == "stage2" else 0)
    prepared = profile.folder / "dataset.json"
    if prepared.is_file():
        return int(read_json(prepared)[stage]["kept"])
    name = Path(getattr(profile.dataset.llava, f"{stage}_json")).name
    records = published()["records"]
    if name not in records:
        raise ValueError(
            f"dataset.llava.{stage}_json: how many records {name} has is not known; run the stage 'dataset' first, or "
            "give --samples STAGE1 STAGE2"
        )
    return int(records[name])
