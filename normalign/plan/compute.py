"""Tokens and floating-point operations of a training stage.

A parameter costs a token 2 operations in the forward pass, 2 more where its own gradient is wanted and 2 more where
that of its input is: 6 where it trains, 4 where it is frozen but passes gradients on, 2 where neither. Attention adds
4 L per layer, head width and head to each token of a row of L, and twice that for the backward pass; the whole square
is counted, as is usual, though causal kernels skip half. Recomputation is not counted (MFU is about useful work).
"""

from dataclasses import asdict, dataclass

from normalign.plan.architecture import projector_parameters
from normalign.plan.memory import Model
from normalign.plan.workload import Workload


@dataclass(frozen=True)
class Flops:
    """Operations of a stage by module; ``attention`` is that of both towers."""

    vision: float
    projector: float
    language: float
    head: float
    attention: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    def hours(self, devices: int, peak_tflops: float, mfu: float) -> float:
        """Hours on ``devices`` of ``peak_tflops`` each, of which a share ``mfu`` is reached."""
        return self.total / (devices * peak_tflops * 1e12 * mfu) / 3600


def per_token(trained: bool, upstream: bool) -> int:
    """Operations per parameter and token; ``upstream``: something before it trains."""
    return 2 * (1 + trained + upstream)


def training_flops(model: Model, work: Workload, *, cached: bool) -> Flops:
    """Operations of a stage; with ``cached`` features the vision tower does not run in it."""
    vision, language = model.vision, model.language
    trains = {part.module: part.trained > 0 for part in model.parts}
    first, second = projector_parameters(vision.width, language.width)
    before = trains["vision"] or trains["projector"] or trains["aligner"]
    visual, tokens = work.seen * work.visual, work.seen * work.length
    tower, tower_attention = (0.0, 0.0) if cached else vision_flops(model, work, trains["vision"])
    backward = 2 if before or trains["language"] else 0
    attended = 4 * language.heads * language.head_width * work.length * language.layers
    return Flops(
        vision=tower,
        projector=visual
        * (
            first * per_token(trains["projector"], trains["vision"])
            + second * per_token(trains["projector"], trains["vision"] or trains["projector"])
        ),
        language=tokens
        * language.layers
        * language.layer
        * per_token(trains["language"], before or trains["language"]),
        head=work.seen
        * work.supervised
        * language.embedding
        * per_token(trains["language"], before or trains["language"]),
        attention=tower_attention + tokens * attended * (1 + backward),
    )


def vision_flops(model: Model, work: Workload, trained: bool) -> tuple[float, float]:
    """Operations of the vision tower: in matrix products with weights, and in attention."""
    vision = model.vision
    tokens = work.seen * (work.visual + vision.leading)
    used = vision.layers_used(model.settings.feature_layer)
    behind = vision.layers - used
    weights = used * vision.layer * per_token(trained, trained) + behind * vision.layer * per_token(False, False)
    attended = 4 * vision.width * (work.visual + vision.leading)
    return tokens * weights, tokens * attended * (used * (3 if trained else 1) + behind)
