"""What a forward pass keeps for the backward pass, in bytes.

Read off the modules as transformers writes them: RMSNorm and rotary embeddings unfused, eager attention on a CPU and
the fused one elsewhere. ``frozen`` weights keep no inputs of linear layers, but still pass gradients through.
"""

from dataclasses import dataclass

from normalign.plan.architecture import LanguageModel, VisionTower

FLOAT = 4  # bytes of a float32


@dataclass(frozen=True)
class Precision:
    """``compute``: bytes of a value in a matrix product. ``sharded``: layers hold bf16 weights and a bf16 residual
    stream (FSDP2's mixed precision); otherwise autocast casts what is float32. ``cpu``: attention is eager and
    keeps its maps, and freed memory stays with the process.
    """

    compute: int
    sharded: bool
    cpu: bool

    @property
    def half(self) -> bool:
        return self.compute < FLOAT

    @property
    def residual(self) -> int:
        """Bytes of a value of the residual stream."""
        return self.compute if self.sharded else FLOAT


def decoder_layer(model: LanguageModel, length: int, trained: bool, precision: Precision) -> float:
    """Bytes that one decoder layer keeps per token of a row of ``length`` tokens."""
    width, attended, byte = model.width, model.heads * model.head_width, precision.compute
    kept = 2 * width * FLOAT  # what both norms square: float32 in every precision
    if trained:
        kept += 2 * width * precision.residual  # normalised, before the gain
        # Each linear layer casts a float32 input for itself: three behind the first norm, two behind the second.
        kept += (5 if precision.half and not precision.sharded else 2) * width * byte
        kept += model.hidden * byte  # input of the last linear layer
    kept += 3 * model.hidden * byte
    kept += 3 * attended * byte  # queries; keys and values, repeated for all heads
    if precision.cpu:
        kept += model.heads * length * (FLOAT + (byte if precision.half else 0))
        kept += attended * byte if trained else 0
    else:
        kept += attended * byte + model.heads * FLOAT  # the output and its log-sum-exp
    return kept


def vision_layer(tower: VisionTower, precision: Precision) -> float:
    """Bytes that one layer of a vision tower that trains keeps per token; its attention is always the fused one."""
    width, byte = tower.width, precision.compute
    inputs = 4 if precision.half else 2  # of queries, keys, values and the MLP: one tensor for three, or casts of it
    return (
        2 * width * FLOAT + (inputs + 4 + tower.scales) * width * byte + 2 * tower.hidden * byte + tower.heads * FLOAT
    )


def between(vision: VisionTower, language: LanguageModel, visual: int, length: int, precision: Precision) -> float:
    """Bytes kept per sample outside the layers: projector and aligner on visual tokens, final norm on all."""
    projector = vision.width + 3 * language.width
    return (visual * projector + 3 * length * language.width) * (FLOAT if not precision.half else 3)


def logits(language: LanguageModel, targets: int, precision: Precision) -> int:
    """Bytes at the peak around the loss: logits (in bf16 also as float32) and log-probabilities or their gradient."""
    return targets * language.vocabulary * (2 * FLOAT + (precision.compute if precision.half else 0))
