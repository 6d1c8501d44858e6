"""The estimate of a whole profile: both training stages and the feature cache between them."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normalign.plan import baseline
from normalign.plan.activations import FLOAT
from normalign.plan.compute import Flops, training_flops, vision_flops
from normalign.plan.memory import Memory, Model, memory, precision_of
from normalign.plan.parts import Counts, counts
from normalign.plan.sources import models
from normalign.plan.workload import STAGES, Workload, workload
from normalign.settings import Profile

# Dense bf16 of an H100 or H200 (vendor's figure); float32 of one AVX2 core.
PEAK_TFLOPS = {"cuda": 989.0, "cpu": 0.1}


@dataclass(frozen=True)
class Question:
    """What is asked about a profile; None: the profile's own, or the default that the estimate then states.

    ``samples``, ``text_tokens`` and ``supervised_tokens`` are pairs, for stage 1 and stage 2.
    """

    mfu: float = 0.4
    peak_tflops: float | None = None
    devices: int | None = None
    samples: tuple[int, int] | None = None
    text_tokens: tuple[int, int] | None = None
    supervised_tokens: tuple[int, int] | None = None
    vision_config: Path | None = None
    language_config: Path | None = None

    def __post_init__(self) -> None:
        for field in ("mfu", "peak_tflops", "devices"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ValueError(f"--{field.replace('_', '-')}: {value} is not above 0")
        if self.mfu > 1:
            raise ValueError(f"--mfu: {self.mfu} is above 1; it is the share of the peak that is reached")


@dataclass(frozen=True)
class StageEstimate:
    """One training stage."""

    stage: str
    parts: list[Counts]
    work: Workload
    cached: bool
    memory: Memory
    flops: Flops
    hours: float


@dataclass(frozen=True)
class FeatureCache:
    """What the stage ``features`` stores, and what making it costs (which every variant then shares)."""

    bytes: int
    budget: int
    flops: float
    hours: float

    @property
    def kept(self) -> bool:
        """Whether it is within its budget; if not, the vision tower runs in stage 1 instead."""
        return self.bytes <= self.budget


@dataclass(frozen=True)
class Estimate:
    """A profile's estimate. ``baseline``: measured bytes of the process without a model; None on an accelerator."""

    profile: str
    device: str
    devices: int
    precision: str
    peak_tflops: float
    mfu: float
    sources: list[str]
    baseline: int | None
    cache: FeatureCache
    stages: list[StageEstimate]

    def peak(self, stage: StageEstimate, *, checkpointed: bool = False) -> int:
        """Peak bytes on a device (on a CPU: of the process, libraries included)."""
        own = stage.memory.peak_checkpointed if checkpointed else stage.memory.peak
        return own + (self.baseline or 0)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values, with the derived figures."""
        value = dataclasses.asdict(self)
        value["cache"]["kept"] = self.cache.kept
        for made, stage in zip(value["stages"], self.stages, strict=True):
            made["flops"]["total"] = stage.flops.total
            made["work"] |= {name: getattr(stage.work, name) for name in ("length", "steps", "accumulation")}
            made["peak_bytes"] = self.peak(stage)
            made["peak_bytes_checkpointed"] = self.peak(stage, checkpointed=True)
        return value


def estimate(profile: Profile, question: Question, *, measured_baseline: bool = True) -> Estimate:
    """Time and memory of ``profile``.

    Args:
        measured_baseline: on a CPU, start a process to measure what the libraries take.

    Raises:
        ValueError, OSError: something that the estimate needs is not known; the message says how to give it.
    """
    vision, language, lines = models(profile, question.vision_config, question.language_config)
    compute = profile.compute
    devices = question.devices or compute.min_devices
    peak = question.peak_tflops or PEAK_TFLOPS.get(compute.device, 0.0) * (
        compute.threads if compute.device == "cpu" else 1
    )
    if not peak:
        raise ValueError(f"compute.device: no peak is known for {compute.device!r}; give --peak-tflops")
    visual = vision.patches(profile.model.image_size)
    stages: list[StageEstimate] = []
    cache: FeatureCache | None = None
    for index, stage in enumerate(STAGES):
        options = getattr(profile, stage)
        model = Model(vision, language, profile.model, counts(vision, language, profile.model, options))
        work = workload(
            profile,
            stage,
            visual,
            devices=devices,
            samples=_nth(question.samples, index),
            text=_nth(question.text_tokens, index),
            supervised=_nth(question.supervised_tokens, index),
        )
        cache = cache or _cache(model, work, profile, peak * question.mfu)
        cached = stage == "stage1" and cache.kept
        flops = training_flops(model, work, cached=cached)
        used = memory(model, work, precision_of(compute, devices))
        hours = flops.hours(devices, peak, question.mfu)
        stages.append(StageEstimate(stage, list(model.parts), work, cached, used, flops, hours))
    assert cache is not None
    return Estimate(
        profile=profile.name,
        device=compute.device,
        devices=devices,
        precision=compute.precision,
        peak_tflops=peak,
        mfu=question.mfu,
        sources=lines,
        baseline=baseline.measure(compute.threads) if measured_baseline and compute.device == "cpu" else None,
        cache=cache,
        stages=stages,
    )


def _nth(pair: tuple[int, int] | None, index: int) -> int | None:
    return None if pair is None else pair[index]


def _cache(model: Model, work: Workload, profile: Profile, tflops: float) -> FeatureCache:
    """The stage ``features`` for stage 1's images, every sample taken to have one; it runs on one device."""
    once = dataclasses.replace(work, epochs=1)
    needed = once.samples * once.visual * model.vision.width * FLOAT
    flops = sum(vision_flops(model, once, trained=False))
    return FeatureCache(needed, int(profile.features.budget_gb * 1e9), flops, flops / (tflops * 1e12) / 3600)
