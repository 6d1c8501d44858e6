"""Pure mathematics of norms: aligners, gradient compensation, token statistics. Torch only, no I/O.

Shape suffixes: B batch, L length, D width, N tokens.
"""

from normalign.norms.aligner import (
    Aligner,
    GlobalScaleAligner,
    LayerNormAligner,
    NoAligner,
    TokenRMSAligner,
    build_aligner,
)

__all__ = [
    "Aligner",
    "GlobalScaleAligner",
    "LayerNormAligner",
    "NoAligner",
    "TokenRMSAligner",
    "build_aligner",
]
