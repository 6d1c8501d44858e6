"""What a configuration says about the text embedding: its shape, whether it is tied, by what forward scales it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Where a vision-language model's configuration keeps its language model's, outermost first.
TEXT_PARTS = ("thinker_config", "vlm_config", "text_config", "llm_config", "language_config", "decoder")
WIDTHS = ("hidden_size", "n_embd", "d_model")
VOCABULARIES = ("vocab_size", "padded_vocab_size")
SCALED_BY_ROOT = ("scale_embedding", "mup_enabled")
MULTIPLIERS = ("embedding_multiplier", "embedding_scale", "scale_emb", "embedding_multiplier_scale")


@dataclass(frozen=True)
class TextConfig:
    """The language model's part of a configuration; None: it does not say."""

    width: int | None = None
    vocabulary: int | None = None
    tied: bool | None = None
    multiplier: float = 1.0
    scaled_by_root: bool = False

    def scale(self, width: int) -> float:
        """What forward multiplies text embeddings (N, ``width``) by: √D in the Gemma family, 1 in most others."""
        return math.sqrt(width) if self.scaled_by_root else self.multiplier


def text_config(config: Mapping[str, Any]) -> TextConfig:
    """The language model's part of ``config``, a model's config.json."""
    levels = [config]  # the innermost last
    while part := next((levels[-1][name] for name in TEXT_PARTS if isinstance(levels[-1].get(name), dict)), None):
        levels.append(part)
    ties = [tied for level in levels if isinstance(tied := level.get("tie_word_embeddings"), bool)]
    multiplier = _innermost(levels, MULTIPLIERS, (int, float))
    return TextConfig(
        width=_innermost(levels, WIDTHS, int),
        vocabulary=_innermost(levels, VOCABULARIES, int),
        tied=any(ties) if ties else None,
        multiplier=float(multiplier) if multiplier is not None and math.isfinite(multiplier) else 1.0,
        scaled_by_root="gemma" in str(_innermost(levels, ("model_type",), str))
        or any(_innermost(levels, (name,), bool) for name in SCALED_BY_ROOT),
    )


def _innermost(levels: list[Mapping[str, Any]], names: tuple[str, ...], kind: type | tuple[type, ...]) -> Any:
    """The last level's value under the first of ``names`` that holds a ``kind``; None where there is none."""
    for level in reversed(levels):
        for name in names:
            value = level.get(name)
            if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
                return value
    return None
