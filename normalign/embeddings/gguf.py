"""The text embedding in a GGUF file: the header's few fields that matter, and rows of llama.cpp's types."""

import struct
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

import numpy as np
import numpy.typing as npt

from normalign.embeddings.config import TextConfig
from normalign.embeddings.ranges import LocalFile
from normalign.embeddings.rows import DECODERS, ITEM_BYTES, Decoder
from normalign.embeddings.safetensors_header import StoredTensor

EMBEDDING = "token_embd.weight"
_PLAIN = {0: "F32", 1: "F16", 28: "F64", 30: "BF16"}  # by their numbers in the file
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_STRING = 1 << 24  # bytes; the longest single value is a chat template
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufEmbedding:
    """Where the embedding lies, how its rows are decoded, and what the file says of the model."""

    tensor: StoredTensor
    decode: Decoder
    config: TextConfig


def read_gguf(file: LocalFile) -> GgufEmbedding:
    """Find the text embedding in ``file``; of its header the arrays (vocabulary, merges) are skipped.

    Raises:
        ValueError: not a GGUF file, one that was cut short, or one without text embedding.
    """
    with file.path.open("rb") as handle:
        try:
            fields, tensors = _Header(handle, file.size).read()
            data = handle.tell()
        except (struct.error, KeyError, RecursionError) as error:
            raise ValueError(f"{file.name} is cut short or damaged ({error}); fetch it again") from error
        except ValueError as error:
            raise ValueError(f"{file.name}: {error}") from error
    if EMBEDDING not in tensors:
        raise ValueError(f"{file.name} holds no {EMBEDDING} (a vision projector, or one part of several?)")
    shape, kind, offset = tensors[EMBEDDING]
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{file.name}: {EMBEDDING} has shape {shape}, not (rows, width)")
    alignment = int(fields.get("general.alignment", 32)) or 32
    dtype, row_bytes, decode = _type(file.name, kind, shape[1])
    start = -(-data // alignment) * alignment + offset
    tensor = StoredTensor(file, dtype, shape, start, shape[0] * row_bytes)
    if start + tensor.size > file.size:
        raise ValueError(f"{file.name} is cut short: {EMBEDDING} ends beyond the file; fetch it again")
    return GgufEmbedding(tensor, decode, _config(fields))


def _config(fields: dict[str, Any]) -> TextConfig:
    architecture = str(fields.get("general.architecture", ""))
    return TextConfig(
        width=fields.get(f"{architecture}.embedding_length"),
        vocabulary=fields.get(f"{architecture}.vocab_size"),
        multiplier=float(fields.get(f"{architecture}.embedding_scale") or 1.0),
        scaled_by_root="gemma" in architecture,
    )


def _type(name: str, kind: int, width: int) -> tuple[str, int, Decoder]:
    """Name of the numbered type, bytes of a row of ``width`` values, and what decodes rows."""
    if kind in _PLAIN:
        dtype = _PLAIN[kind]
        return dtype, width * ITEM_BYTES[dtype], DECODERS[dtype]
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise ValueError(f"{name}: {EMBEDDING} is quantised; `pip install gguf` to have it decoded") from None
    try:
        quantisation = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[quantisation]
    except (ValueError, KeyError):
        raise ValueError(f"{name}: {EMBEDDING} is of type {kind}, which the gguf package does not know") from None
    if width % block:
        raise ValueError(f"{name}: {EMBEDDING} is {width} wide, no multiple of {quantisation.name}'s blocks of {block}")

    def decode(rows: memoryview, count: int) -> npt.NDArray[np.floating]:
        try:
            return dequantize(np.frombuffer(rows, np.uint8).reshape(count, -1), quantisation)
        except NotImplementedError:
            raise ValueError(f"{name}: the gguf package cannot decode {quantisation.name}") from None

    return quantisation.name, width // block * block_bytes, decode


class _Header:
    """Reads a header from its beginning: single values are kept, arrays skipped."""

    def __init__(self, handle: BufferedReader, size: int) -> None:
        self.handle, self.size = handle, size

    def read(self) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
        """Fields by key, and of each tensor the shape (rows first), the number of its type and its offset."""
        if self.handle.read(4) != b"GGUF":
            raise ValueError("not a GGUF file; fetch it again")
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not read (2 and 3 are, little-endian); convert it again")
        tensor_count, field_count = self._number("Q"), self._number("Q")
        fields = {}
        for _ in range(field_count):
            key = self._string()
            fields[key] = self._value(self._number("I"))
        return fields, dict(self._tensor() for _ in range(tensor_count))

    def _tensor(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name, dimensions = self._string(), self._number("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions; fetch it again")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        return name, (shape, self._number("I"), self._number("Q"))

    def _number(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack("<" + code, self.handle.read(size))[0]

    def _string(self) -> str:
        length = self._number("Q")
        if length > _MAX_STRING:
            raise ValueError(f"a string of {length} bytes in the header; fetch it again")
        return self.handle.read(length).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_SCALARS[kind])
        kind, count = self._number("I"), self._number("Q")
        if kind in _SCALARS:
            self._skip(count * struct.calcsize("<" + _SCALARS[kind]))
        else:
            for _ in range(count):
                if kind == _STRING:
                    self._skip(self._number("Q"))
                else:
                    self._value(kind)
        return None

    def _skip(self, size: int) -> None:
        if self.handle.tell() + size > self.size:
            raise ValueError("the header ends beyond the file; fetch it again")
        self.handle.seek(size, 1)
