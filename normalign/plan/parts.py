"""Which parameters a stage holds, trains and leaves out, module by module."""

from dataclasses import dataclass

from normalign.plan.architecture import LanguageModel, VisionTower, projector_parameters
from normalign.settings import ModelSettings
from normalign.training.options import MODULES, TrainingOptions


@dataclass(frozen=True)
class Counts:
    """Parameters of a module; ``trained`` of them get gradients and optimizer state."""

    module: str
    parameters: int
    trained: int


def counts(
    vision: VisionTower,
    language: LanguageModel,
    model: ModelSettings,
    options: TrainingOptions,
    *,
    gain: bool = True,
) -> list[Counts]:
    """Every module's parameters under ``options``, in the table's order.

    Args:
        gain: the aligner has gain and bias (LayerNorm); the other aligners have no parameters.
    """
    totals = {
        "vision": vision.parameters,
        "projector": sum(projector_parameters(vision.width, language.width)),
        "aligner": 2 * language.width if gain else 0,
        "language": language.parameters,
    }
    unused = {"vision": vision.unused(model.feature_layer, model.feature_norm)}
    return [Counts(m, totals[m], totals[m] - unused.get(m, 0) if m in options.learning_rate else 0) for m in MODULES]
