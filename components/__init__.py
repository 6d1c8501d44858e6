"""One module per DVC stage; `python -m components.<stage> PROFILE [VARIANT...]` runs it."""

import ctypes
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Set before any component imports a library that reads them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 0.5


def die_with_parent() -> None:
    """Have this process end when its parent dies, so that a killed DVC leaves no stage behind (Linux).

    DVC starts a stage through a shell, and some shells stay between the two: then the shell's parent counts as well.
    The kernel tells about the parent; the shell's is asked for.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.getppid()
    starter = _parent_of(parent) if _runs_one_command(parent) else None
    if 1 in (parent, starter):  # it died before this
        sys.exit("the process that started this stage is gone")
    if starter is not None:
        threading.Thread(target=_end_with, args=(parent, starter), daemon=True).start()


def _runs_one_command(process: int) -> bool:
    """Whether it is a shell that was started with ``-c``."""
    try:
        name, *arguments = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return name.endswith(b"sh") and b"-c" in arguments


def _parent_of(process: int) -> int | None:
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1])


def _end_with(shell: int, starter: int) -> None:
    while _parent_of(shell) == starter:
        time.sleep(_WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def stage_main(run: Callable[..., str]) -> None:
    """Run a stage from the command line: arguments are the profile and, if the stage has them, variants.

    Prints the summary line that ``run`` returns, once if several processes run the stage together. An error that a
    person can mend is printed without a traceback.
    """
    from safetensors import SafetensorError

    from normalign.settings import load_profile

    arguments: list[Any] = sys.argv[1:]
    try:
        inspect.signature(run).bind(*arguments)
    except TypeError:
        names = " ".join(str(p).partition(":")[0].upper() for p in inspect.signature(run).parameters.values())
        sys.exit(f"usage: python -m components.{Path(sys.argv[0]).stem} {names.replace('*VARIANTS', 'VARIANT...')}")
    try:
        summary = run(load_profile(arguments[0]), *arguments[1:])
        if os.environ.get("RANK", "0") == "0":  # torchrun and accelerate number their processes so
            print(summary, flush=True)
    except (ValueError, OSError, SafetensorError) as error:
        if os.environ.get("NORMALIGN_TRACEBACK"):
            raise
        full = isinstance(error, SafetensorError)  # of a write that normalign.files does not guard, or of a read
        advice = "; free disk space if it is full, else run the stage again that wrote the file" if full else ""
        sys.exit(f"error: {error}{advice}")
    except KeyboardInterrupt:
        sys.exit(130)


if sys.argv[0] == "-m":  # a stage is being started, and has yet to import what takes seconds
    die_with_parent()
