"""Memory of one device in a training stage, in bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from normalign.plan.activations import FLOAT, Precision, between, decoder_layer, logits, vision_layer
from normalign.plan.architecture import LanguageModel, VisionTower
from normalign.plan.parts import Counts
from normalign.plan.workload import Workload
from normalign.settings import ComputeSettings, ModelSettings

ADAM = 2 * FLOAT  # two float32 moments
AHEAD = 2  # layers whose weights are gathered at a time: the one at work and the next


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    ``weights`` are the masters (its shard of them): float32, or bf16 for what is frozen, whole, and computed in bf16;
    ``copies`` what there is of them besides: bf16 casts, gathered shards, and on a CPU the pages of an embedding that
    was read and then grown. ``gradients`` are float32, and kept between the forward passes of a step.
    ``*_checkpointed``: with gradient checkpointing, only every layer's input is kept. ``loading`` is the whole float32
    model, which each process holds in main memory before it is sharded; ``saving`` is what gathering a checkpoint adds.
    """

    weights: int
    copies: int
    gradients: int
    optimizer: int
    activations: int
    activations_checkpointed: int
    logits: int
    peak: int
    peak_checkpointed: int
    loading: int
    saving: int


@dataclass(frozen=True)
class Model:
    """The model a stage runs, with its parameters by module."""

    vision: VisionTower
    language: LanguageModel
    settings: ModelSettings
    parts: Sequence[Counts]

    def trained(self, module: str | None = None) -> int:
        """Trained parameters, of one module or of all."""
        return sum(part.trained for part in self.parts if module in (None, part.module))

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def outside_layers(self) -> int:
        """Parameters of no transformer layer: FSDP gathers them as one group."""
        layers = self.vision.layers * self.vision.layer + self.language.layers * self.language.layer
        return self.parameters - layers


def precision_of(compute: ComputeSettings, devices: int) -> Precision:
    """Several devices shard the model, one holds it whole."""
    return Precision(2 if compute.precision == "bf16" else FLOAT, devices > 1, compute.device == "cpu")


def memory(model: Model, work: Workload, precision: Precision) -> Memory:
    """The estimate for one device."""
    trained, shards = model.trained(), work.devices if precision.sharded else 1
    gradients = FLOAT * trained // shards
    full, checkpointed = activations(model, work, precision)
    loss = logits(model.language, work.micro_batch * work.supervised, precision)
    weights = (FLOAT * model.parameters - (FLOAT - precision.compute) * halved(model, precision)) // shards
    resident = weights + ADAM * trained // shards + copies(model, precision)
    language = model.trained("language") > 0
    embedding = FLOAT * model.language.embedding if language else 0
    # At the end of a backward pass gradients are complete, and the embedding's still has its head's beside it.
    end = gradients + (embedding if model.language.tied else 0)
    if precision.sharded:
        end += FLOAT * (model.outside_layers if language else 0)

    def peak(kept: int) -> int:
        start = kept + loss + embedding + (gradients if work.accumulation > 1 else 0)
        # Of an accelerator activations are given back while gradients come; on a CPU the C library keeps small blocks.
        return resident + (kept + loss + end if precision.cpu else max(start, end))

    return Memory(
        weights=weights,
        copies=copies(model, precision),
        gradients=gradients,
        optimizer=ADAM * trained // shards,
        activations=full,
        activations_checkpointed=checkpointed,
        logits=loss,
        peak=peak(full),
        peak_checkpointed=peak(checkpointed),
        loading=FLOAT * model.parameters,
        saving=FLOAT * model.parameters + ADAM * trained if precision.sharded else 0,
    )


def halved(model: Model, precision: Precision) -> int:
    """Parameters kept in half precision: those of a frozen vision tower and language model, unless sharded."""
    if not precision.half or precision.sharded or model.trained("language"):
        return 0
    return sum(part.parameters for part in model.parts if part.module in ("vision", "language") and not part.trained)


def copies(model: Model, precision: Precision) -> int:
    """Bytes of weights beside their masters in a forward and backward pass."""
    layers = model.parameters - model.outside_layers
    if precision.cpu and model.language.added:
        return FLOAT * (model.language.vocabulary - model.language.added) * model.language.width
    if not precision.half and not precision.sharded:
        return 0
    if not precision.sharded and not model.trained("language"):
        return 0
    if not precision.sharded:  # autocast keeps a cast of every weight until the backward pass is through
        return precision.compute * layers + precision.compute * model.language.embedding
    largest = max(model.language.layer, model.vision.layer)
    cast = precision.compute * model.language.embedding if precision.half else 0  # the head's
    return FLOAT * model.outside_layers + AHEAD * precision.compute * largest + cast


def activations(model: Model, work: Workload, precision: Precision) -> tuple[int, int]:
    """Bytes that a micro-batch keeps for the backward pass: all of them, and with gradient checkpointing."""
    vision, language = model.vision, model.language
    tokens = work.micro_batch * work.length
    layer = tokens * decoder_layer(language, work.length, model.trained("language") > 0, precision)
    rest = work.micro_batch * between(vision, language, work.visual, work.length, precision)
    full = language.layers * layer + rest
    checkpointed = language.layers * tokens * language.width * precision.residual + layer + rest
    if model.trained("vision"):
        patches = work.micro_batch * (work.visual + vision.leading)
        used = vision.layers_used(model.settings.feature_layer)
        one = patches * vision_layer(vision, precision)
        full += used * one
        checkpointed += used * patches * vision.width * precision.residual + one
    return round(full), round(checkpointed)
