"""T of a model as stored and as its forward uses it."""

from collections.abc import Callable
from typing import Any

from normalign.embeddings.source import TextEmbedding
from normalign.embeddings.statistics import text_norm_statistics


def measure_text_norm(embedding: TextEmbedding, progress: Callable[[int], object] | None = None) -> dict[str, Any]:
    """The statistics of ``embedding``'s rows, where they are stored, and T after the scaling in forward.

    ``progress`` is told the bytes of each block that was read.

    Raises:
        ValueError: some rows are not finite, or all are zero.
        OSError: the bytes cannot be read.
    """
    statistics = text_norm_statistics(embedding.row_norms(progress), embedding.width)
    return {
        "tensor": " + ".join(embedding.tensors),
        "dtype": embedding.dtype,
        "vocab_size": embedding.config.vocabulary,
        **statistics,
        "embedding_scale": embedding.scale,
        "T_as_used": statistics["T"] * embedding.scale,
        "g_init_as_used": statistics["g_init"] * embedding.scale,
    }
