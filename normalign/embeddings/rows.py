"""Norms of a stored tensor's rows, a block of rows in memory at a time."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from normalign.embeddings.ranges import BLOCK, read_blocks
from normalign.embeddings.safetensors_header import StoredTensor

# The bytes of some whole rows and how many rows they are, to their values (rows, width).
Decoder = Callable[[memoryview, int], npt.NDArray[np.floating]]


def _bfloat16(block: memoryview, rows: int) -> npt.NDArray[np.floating]:
    """bfloat16 is the upper half of a float32."""
    halves = np.frombuffer(block, "<u2").reshape(rows, -1)
    return (halves.astype("<u4") << 16).view("<f4")


def _plain(dtype: str) -> Decoder:
    return lambda block, rows: np.frombuffer(block, dtype).reshape(rows, -1)


DECODERS: dict[str, Decoder] = {
    "F64": _plain("<f8"),
    "F32": _plain("<f4"),
    "F16": _plain("<f2"),
    "BF16": _bfloat16,
}
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def row_norms(
    tensor: StoredTensor, decode: Decoder, progress: Callable[[int], object] | None = None
) -> npt.NDArray[np.float64]:
    """L2 norm (N,) of each row of ``tensor`` (N, D), in float64; ``progress`` is told the bytes of each block."""
    count = tensor.shape[0]
    row_bytes = tensor.size // count
    norms_N = np.empty(count)
    start = 0
    for block in read_blocks(tensor.source, tensor.start, tensor.size, max(BLOCK // row_bytes, 1) * row_bytes):
        rows = len(block) // row_bytes
        x_ND = decode(block, rows).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is counted by the statistics
            norms_N[start : start + rows] = np.sqrt(np.einsum("nd,nd->n", x_ND, x_ND))
        start += rows
        if progress is not None:
            progress(len(block))
    return norms_N
