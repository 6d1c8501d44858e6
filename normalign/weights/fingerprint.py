"""What was fetched, in a few words that identify it: the same weights give the same fingerprint anywhere."""

import hashlib
from pathlib import Path
from typing import Any

from normalign.files import read_json
from normalign.settings import SourceSettings
from normalign.weights.safetensors_file import DTYPES, checkpoint_files, read_headers


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def fingerprint(settings: SourceSettings, folder: Path) -> dict[str, Any]:
    """Source, revision, digest, parameter count, class and dtype of the checkpoint in ``folder``.

    ``sha256`` is that of ``model.safetensors``; of a sharded checkpoint, that of the lines "digest  name" of
    its shards by name (what ``sha256sum *.safetensors | sha256sum`` prints). No machine path is in it.
    """
    digests = [(sha256_of(file), file.name) for file in checkpoint_files(folder)]
    lines = "".join(f"{digest}  {name}\n" for digest, name in digests)
    tensors = read_headers(folder).values()
    config = read_json(folder / "config.json")
    kind, _, place = settings.source.partition(":")
    return {
        "source": f"folder:{Path(place).name}" if kind == "folder" else settings.source,
        "revision": settings.revision,
        "sha256": digests[0][0] if len(digests) == 1 else hashlib.sha256(lines.encode()).hexdigest(),
        "parameters": sum(tensor.numel for tensor in tensors),
        "class": (config.get("architectures") or [config["model_type"]])[0],
        "dtype": "+".join(sorted({DTYPES.get(tensor.dtype, tensor.dtype) for tensor in tensors})),
    }
