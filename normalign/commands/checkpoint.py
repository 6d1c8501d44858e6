"""Where the checkpoint is that a command names: a folder, or a model of the Hugging Face hub."""

import re
from pathlib import Path

from normalign.weights.hub import PATTERNS, SUBFOLDERS

CODE = ["*.py"]  # only with the user's trust


def checkpoint_folder(model: str, *, trust_remote_code: bool = False) -> Path:
    """The folder ``model``, or that of a hub model ``org/name`` or ``org/name@revision`` in the hub's cache.

    Raises:
        ValueError: neither a folder nor a hub name, or the hub does not give it; the message says what to do.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    found = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", model)
    if found is None or folder.exists():
        raise ValueError(f"{model} is neither a folder nor the name of a hub model (org/name or org/name@revision)")
    import httpx2
    from huggingface_hub import errors, snapshot_download

    try:
        patterns = [*PATTERNS, *(CODE if trust_remote_code else [])]
        return Path(snapshot_download(found[1], revision=found[2], allow_patterns=patterns, ignore_patterns=SUBFOLDERS))
    except (
        errors.HfHubHTTPError,
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        httpx2.HTTPError,
    ) as error:
        raise ValueError(
            f"{model} is no folder here, and the hub does not give a model of that name ({type(error).__name__}); "
            "correct the path, or connect, and log in with `hf auth login` if the model is gated"
        ) from error
