"""Starting processes so that none outlives the run, whichever process of it is killed."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_GRACE_SECONDS = 5.0


class StoppedError(RuntimeError):
    """The run is being stopped: nothing new is started."""


def end_with_parent(parent: int, signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel send ``signal_number`` to this process when ``parent``, its parent, dies (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal_number)
        if os.getppid() != parent:  # it died before the call above
            os.kill(os.getpid(), signal_number)


class Processes:
    """The process groups of one run: each command gets a group of its own, which ends as a whole."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._stopping = False

    def run(self, command: Sequence[str], log: Path, on_line: Callable[[str], None]) -> int:
        """Run ``command`` to its end, copy its output to ``log``, call ``on_line`` for each line; its exit status.

        The kernel ends the process when the calling thread does, so that a killed run leaves no DVC behind;
        when DVC itself is killed, what is left of its group is killed here.

        Raises:
            StoppedError: ``stop`` was called, before or while it ran.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        process = self._start(command)
        reader = threading.Thread(target=_copy_lines, args=(process, log, on_line), daemon=True)
        try:
            reader.start()
            # The group is ended before its leader is reaped: until then its number cannot be anybody else's.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            _signal_group(process, signal.SIGKILL)
            status = process.wait()
            reader.join()
            with self._lock:
                del self._running[process.pid]
        if self._stopping:
            raise StoppedError("the run was stopped")
        return status

    def _start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        driver = os.getpid()
        with self._lock:
            if self._stopping:
                raise StoppedError("the run is being stopped")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(driver),
            )
            self._running[process.pid] = process
            return process

    def stop(self) -> None:
        """End every process group and wait until all are gone; nothing can be started afterwards."""
        with self._lock:
            self._stopping = True
        deadline = time.monotonic() + _GRACE_SECONDS
        self._signal_all(signal.SIGTERM)
        while self._running:
            time.sleep(0.02)
            if time.monotonic() > deadline:
                self._signal_all(signal.SIGKILL)

    def _signal_all(self, signal_number: int) -> None:
        with self._lock:
            for process in self._running.values():
                _signal_group(process, signal_number)


def _signal_group(process: subprocess.Popen[str], signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal_number)


def _copy_lines(process: subprocess.Popen[str], log: Path, on_line: Callable[[str], None]) -> None:
    """Copy output to ``log`` as it comes; a line ends with a newline or, as progress does, a carriage return."""
    assert process.stdout is not None
    with process.stdout, log.open("w", encoding="utf-8", buffering=1) as copy:
        for line in process.stdout:
            copy.write(line)
            if text := line.strip():
                on_line(text)
