"""One module per DVC stage; `python -m components.<stage> PROFILE [VARIANT...]` runs it."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

# Set before any component imports a library that reads them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel end this process when its parent dies, so that a killed DVC leaves no stage behind (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # the parent died before the call above
            sys.exit("the process that started this stage is gone")


def stage_main(run: Callable[..., str]) -> None:
    """Run a stage from the command line: arguments are the profile and, if the stage has them, variants.

    Prints the summary line that ``run`` returns. An error that a person can mend is printed without a traceback.
    """
    from normalign.settings import load_profile

    die_with_parent()
    arguments: list[Any] = sys.argv[1:]
    if not arguments:
        sys.exit(f"usage: python -m {run.__module__} PROFILE [VARIANT]")
    try:
        print(run(load_profile(arguments[0]), *arguments[1:]), flush=True)
    except (ValueError, OSError) as error:
        if os.environ.get("NORMALIGN_TRACEBACK"):
            raise
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
