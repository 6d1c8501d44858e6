"""A snapshot of a Hugging Face repository at a pinned commit, from the cache when it is there."""

import re
from pathlib import Path

from normalign.weights.safetensors_file import checkpoint_files

# Weights as safetensors only: the pickled formats can run code when they are read.
PATTERNS = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "merges.txt",
    "vocab.txt",
    "LICENSE*",
    "NOTICE*",
]
SUBFOLDERS = ["*/*"]


def fetch_snapshot(repository: str, revision: str | None) -> Path:
    """Folder of the snapshot of ``repository`` at commit ``revision`` in the hub's cache (``HF_HUB_CACHE``).

    A complete cached snapshot is used without asking the network.

    Raises:
        ValueError: ``revision`` is not a commit, or the hub does not have it.
        PermissionError: the repository is gated, private or does not exist.
        ConnectionError: the hub cannot be reached and the snapshot is not cached.
    """
    import httpx2
    from huggingface_hub import constants, errors, snapshot_download

    where = f"hub:{repository}"
    if not re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        raise ValueError(f"weights source {where}: revision {revision!r} is not a commit; pin all 40 digits")

    def download(offline: bool) -> Path:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=PATTERNS,
                ignore_patterns=SUBFOLDERS,
                local_files_only=offline,
            )
        )

    try:
        cached = download(offline=True)
        if _complete(cached):
            return cached
    except errors.LocalEntryNotFoundError:
        pass
    try:
        fetched = download(offline=False)
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{where} is gated: accept its licence at https://huggingface.co/{repository}, log in with "
            "`hf auth login` (or set HF_TOKEN), and run again"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise PermissionError(
            f"{where} does not exist, or is private and this login may not read it; see `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{where} has no commit {revision}; correct the revision in params.yaml") from error
    except (errors.LocalEntryNotFoundError, httpx2.HTTPError, errors.OfflineModeIsEnabled) as error:
        raise ConnectionError(
            f"{where} at {revision} is not in the cache {constants.HF_HUB_CACHE}, and the hub cannot be "
            "reached; connect once, or copy the snapshot here and set the source to folder:PATH"
        ) from error
    if not _complete(fetched):
        raise FileNotFoundError(
            f"{where} at {revision} lacks config.json or some safetensors files, or its download "
            "was cut short and the hub cannot be reached; connect and run again, or choose another repository"
        )
    return fetched


def _complete(folder: Path) -> bool:
    try:
        return bool(checkpoint_files(folder)) and (folder / "config.json").is_file()
    except FileNotFoundError:
        return False
