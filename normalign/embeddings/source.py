"""A model, wherever it is: a folder, a safetensors or GGUF file, a hub repository; to its text embedding."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from normalign.embeddings.config import TextConfig, text_config
from normalign.embeddings.gguf import read_gguf
from normalign.embeddings.naming import choose, with_extension
from normalign.embeddings.ranges import ByteSource, LocalFile
from normalign.embeddings.rows import DECODERS, ITEM_BYTES, Decoder, row_norms
from normalign.embeddings.safetensors_header import StoredTensor, read_header

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
CONFIG = "config.json"
_HUB_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*?)(@(?P<revision>[\w./-]+))?", re.ASCII)


@dataclass(frozen=True)
class TextEmbedding:
    """The input embedding of a language model, as it is stored: nothing of it is in memory."""

    tensors: dict[str, StoredTensor]  # more than one where added tokens have rows of their own
    decode: Decoder
    config: TextConfig

    @property
    def width(self) -> int:
        """D."""
        return next(iter(self.tensors.values())).shape[1]

    @property
    def dtype(self) -> str:
        """Name of the stored type."""
        return next(iter(self.tensors.values())).dtype

    @property
    def size(self) -> int:
        """Bytes that are read for the norms."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def is_local(self) -> bool:
        """Whether they lie on this machine."""
        return all(isinstance(tensor.source, LocalFile) for tensor in self.tensors.values())

    @property
    def scale(self) -> float:
        """What the model's forward multiplies these embeddings by."""
        return self.config.scale(self.width)

    def row_norms(self, progress: Callable[[int], object] | None = None) -> npt.NDArray[np.float64]:
        """L2 norm (N,) of each row; ``progress`` is told the bytes of each block that was read."""
        return np.concatenate([row_norms(tensor, self.decode, progress) for tensor in self.tensors.values()])


class Place(Protocol):
    """Where the files of a checkpoint lie."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def document(self, file: str) -> bytes | None:
        """All of a small file; None where there is none."""

    def file(self, file: str) -> ByteSource:
        """A large file."""


@dataclass(frozen=True)
class LocalFolder:
    """A folder laid out like a hub repository."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def document(self, file: str) -> bytes | None:
        path = self.path / file
        return path.read_bytes() if path.is_file() else None

    def file(self, file: str) -> ByteSource:
        if not (self.path / file).is_file():
            raise FileNotFoundError(f"{self.path / file} is missing, though {INDEX} names it; fetch it")
        return LocalFile(self.path / file)


def find_embedding(model: str) -> TextEmbedding:
    """The text embedding of ``model``: a path on this machine, else a hub repository ``org/name[@revision]``.

    Raises:
        OSError: there is no such thing, or it cannot be read.
        ValueError: it holds no text embedding, several, a quantised one, or is damaged.
    """
    path = Path(model).expanduser()
    if path.exists():
        return local_embedding(path)
    named = _HUB_ID.fullmatch(model)
    if named is None or path.suffix in (".safetensors", ".gguf"):
        raise FileNotFoundError(f"{model}: no such file or folder (a hub model is named org/name or org/name@revision)")
    from normalign.embeddings.hub import Hub  # what it imports takes longer than a small model's norms

    return _of_checkpoint(Hub.of_environment(named["repository"], named["revision"] or "main", os.environ))


def local_embedding(path: Path) -> TextEmbedding:
    """The text embedding of the folder, safetensors file or GGUF file at ``path``; raises as `find_embedding`."""
    if path.is_dir():
        if path.joinpath(INDEX).is_file() or path.joinpath(WEIGHTS).is_file():
            return _of_checkpoint(LocalFolder(path))
        path = _only_file(path)
    if path.suffix == ".gguf":
        found = read_gguf(LocalFile(path))
        return TextEmbedding({"token_embd.weight": found.tensor}, found.decode, found.config)
    if path.suffix == ".safetensors":
        return _of_checkpoint(LocalFolder(path.parent), path.name)
    raise ValueError(f"{path} is neither a folder nor a .safetensors or .gguf file; other formats are not read")


def _only_file(folder: Path) -> Path:
    """The one weights file of a folder that is not laid out like a hub repository."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for suffix, others in ((".safetensors", "adapter_"), (".gguf", "mmproj")):
        found = [path for path in files if path.suffix == suffix and not path.name.startswith(others)]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"{folder} holds {len(found)} {suffix} files and no {INDEX}; name the one to read")
    pickled = [path.name for path in files if path.suffix in (".bin", ".pt", ".pth")]
    if pickled:
        raise ValueError(
            f"{folder} holds weights as {pickled[0]} only, and pickled files are never read since they can run code; "
            "save the model as safetensors"
        )
    raise FileNotFoundError(f"{folder} holds no weights ({WEIGHTS}, {INDEX} and its shards, or a .gguf file)")


def _of_checkpoint(place: Place, file: str | None = None) -> TextEmbedding:
    """The embedding among the shards of the index, or in ``file`` alone (default: ``model.safetensors``)."""
    config = text_config(_json(place, CONFIG) or {})
    index = None if file else _json(place, INDEX)
    headers: dict[str, dict[str, StoredTensor]] = {}

    def header(shard: str) -> dict[str, StoredTensor]:
        if shard not in headers:
            headers[shard] = read_header(place.file(shard))
        return headers[shard]

    shards = _shards(place, index) if index is not None else dict.fromkeys(header(file or WEIGHTS), file or WEIGHTS)

    def tensor(name: str) -> StoredTensor:
        if name not in header(shards[name]):
            raise ValueError(f"{INDEX} says that {name} is in {shards[name]}, where it is not; fetch both again")
        return header(shards[name])[name]

    try:
        name = choose(shards, lambda name: tensor(name).shape, config)
        tensors = {part: tensor(part) for part in with_extension(name, shards)}
        _check(tensors)
    except ValueError as error:
        raise ValueError(f"{place.name}: {error}") from error
    return TextEmbedding(tensors, DECODERS[tensors[name].dtype], config)


def _check(tensors: dict[str, StoredTensor]) -> None:
    """All parts are matrices of one stored type, a type with values of their own, and one width."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DECODERS:
            raise ValueError(f"{name} is stored quantised (type {tensor.dtype}); give the unquantised model")
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, not [rows, width]; is it one shard of several?")
        if tensor.size != tensor.numel * ITEM_BYTES[tensor.dtype]:
            raise ValueError(f"{name} has {tensor.size} bytes for shape {list(tensor.shape)}; fetch it again")
    if len({(tensor.dtype, tensor.shape[1]) for tensor in tensors.values()}) > 1:
        raise ValueError(f"{' and '.join(tensors)} differ in type or width; fetch them again")


def _shards(place: Place, index: dict[str, Any]) -> dict[str, str]:
    """File of each tensor by its name."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{place.name}: {INDEX} has no weight_map; fetch it again")
    for shard in set(map(str, weight_map.values())):
        if Path(shard).name != shard:
            raise ValueError(f"{place.name}: shard {shard!r} in {INDEX} is not a plain file name; refused")
    return {name: str(shard) for name, shard in weight_map.items()}


def _json(place: Place, file: str) -> dict[str, Any] | None:
    content = place.document(file)
    if content is None:
        return None
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place.name}: {file} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{place.name}: {file} is not a JSON object; fetch it again")
    return value
