"""What a registered version is recognised by: the hash of its model and of its metric files."""

import hashlib
import json
from pathlib import Path

import yaml

from normalign.settings import Profile

DVC_LOCK = Path("dvc.lock")
SQLITE = "sqlite:///"
FINGERPRINT_TAG = "fingerprint"
CHALLENGER = "challenger"


def model_name(profile: str) -> str:
    """The registered model of a profile.

    One per profile, with a version per registered variant: an alias is unique within a registered model, so
    `champion` names the one version that a profile serves, whichever variant it is.
    """
    return f"normalign-{profile}"


def model_md5(profile: Profile, variant: str) -> str:
    """DVC's md5 of the variant's stage-2 model: from dvc.lock, or computed the same way if it is not there.

    Raises:
        ValueError: neither dvc.lock nor the disk has the model.
    """
    folder = profile.model_folder(variant, "stage2")
    return _locked_md5(f"stage2@{profile.name}-{variant}", folder.as_posix()) or folder_md5(folder)


def _locked_md5(stage: str, out: str) -> str | None:
    if not DVC_LOCK.exists():
        return None
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where PyYAML was built with it
        lock = yaml.load(DVC_LOCK.read_text(encoding="utf-8"), loader) or {}
    except yaml.YAMLError:
        return None  # another stage's DVC is writing it at this moment
    outs = lock.get("stages", {}).get(stage, {}).get("outs", [])
    return next((entry["md5"] for entry in outs if entry.get("path") == out and "md5" in entry), None)


def folder_md5(folder: Path) -> str:
    """The md5 that DVC gives a folder: of the JSON list of its files' md5 and relative paths, with ``.dir``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        raise ValueError(f"{folder} is missing or empty; run `dvc repro` or `dvc pull`")
    entries = []
    for path in files:
        with path.open("rb") as handle:
            digest = hashlib.file_digest(handle, "md5").hexdigest()
        entries.append({"md5": digest, "relpath": path.relative_to(folder).as_posix()})
    entries.sort(key=lambda entry: entry["relpath"])
    return hashlib.md5(json.dumps(entries, sort_keys=True).encode()).hexdigest() + ".dir"


def fingerprint(profile: Profile, variant: str) -> str:
    """sha256 over the stage-2 model's md5 and the metric files: the same results, the same version.

    Raises:
        ValueError: a file or folder of the variant is missing.
    """
    results = profile.results(variant)
    files = sorted(path for path in results.glob("*") if path.is_file())
    if not files:
        raise ValueError(f"{results} holds no metric files; run `dvc repro`")
    digest = hashlib.sha256(f"{variant} {model_md5(profile, variant)}\n".encode())
    for path in files:
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
