"""Where the parts of any Hugging Face vision-language model are: found from its structure, not from a list of names.

Shape suffixes: B batch, L sequence length, D width of the language model.
"""

from normalign.anatomy.blocks import attention_of, mlp_of
from normalign.anatomy.find import Anatomy, find_anatomy, visual_mask
from normalign.anatomy.load import inputs_of, load_vlm
from normalign.anatomy.modules import UnknownStructureError

__all__ = [
    "Anatomy",
    "UnknownStructureError",
    "attention_of",
    "find_anatomy",
    "inputs_of",
    "load_vlm",
    "mlp_of",
    "visual_mask",
]
