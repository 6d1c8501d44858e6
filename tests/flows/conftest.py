"""A tiny DVC project with trivial stages, run by the same code as the real one."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]

# A stage writes its out atomically after `seconds`, if no file named `<name>.bad` tells it to fail.
STAGE = """
import contextlib, sys, time
from pathlib import Path
from components import die_with_parent
from normalign.files import write_text
die_with_parent()
name, seconds = sys.argv[1], float(sys.argv[2])
Path(f"started/{name}").write_text(str(time.monotonic()))
for step in range(1, 11):
    with contextlib.suppress(OSError):  # a reader that is gone is not what ends a stage
        print(f"step {step}/10 loss {1 / step:.2f}", end="\\r", flush=True)
    time.sleep(seconds / 10)
if Path(f"{name}.bad").exists():
    sys.exit(f"error: {name} is bad")
write_text(Path(f"out/{name}.txt"), f"{name}\\n")
Path(f"ended/{name}").write_text(str(time.monotonic()))
"""

SCRIPTS = {
    "measure.py": 'from pathlib import Path; Path("out/left_end.json").write_text(\'{"loss": {"last": 0.5}}\')',
    "register.py": 'import sys; print(*sys.argv[1:], file=open("registered", "a"))',
}

PIPELINE = """
stages:
  root:
    cmd: python stage.py root 0
    outs: [out/root.txt]
  left:
    cmd: python stage.py left 2
    deps: [out/root.txt]
    outs: [out/left.txt]
  right:
    cmd: python stage.py right 2
    deps: [out/root.txt]
    outs: [out/right.txt]
  right_end:
    cmd: python stage.py right_end 0
    deps: [out/right.txt]
    outs: [out/right_end.txt]
  left_end:
    cmd: python measure.py
    deps: [out/left.txt]
    metrics:
      - out/left_end.json: {cache: false}
  register:
    matrix: {profile: [ci], variant: [a, b]}
    cmd: python register.py ${item.profile} ${item.variant}
    always_changed: true
    deps: [out/left.txt]
"""

# Long enough to be killed in the middle.
PAIR = """
stages:
  left:
    cmd: python stage.py left 4
    outs: [out/left.txt]
  right:
    cmd: python stage.py right 4
    outs: [out/right.txt]
"""


class TinyProject:
    """The project's folder and ways to run it."""

    def __init__(self, root: Path, stages: str) -> None:
        self.root = root
        for folder in ("started", "ended", ".dvc"):
            (root / folder).mkdir(parents=True)
        for name in (".dvc/config", ".dvcignore", "params.yaml"):
            shutil.copy(ROOT / name, root / name)
        params = root / "params.yaml"
        params.write_text(params.read_text().replace("profile: smol", "profile: ci", 1))
        for name, text in {"dvc.yaml": stages, "stage.py": STAGE, **SCRIPTS}.items():
            (root / name).write_text(text)

    def start(self, *arguments: str, module: str = "flows.repro") -> "subprocess.Popen[str]":
        """The driver on this project, with its output readable."""
        return subprocess.Popen(
            [sys.executable, "-m", module, str(self.root), *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "SHELL": "/bin/sh"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, module: str = "flows.repro") -> tuple[int, str]:
        """Exit status and output of a whole run."""
        process = self.start(*arguments, module=module)
        output, _ = process.communicate(timeout=180)
        return process.returncode, output

    def outs(self) -> set[str]:
        """Names of the finished outs; every one of them is checked to be whole."""
        found = {path.stem: path.read_text() for path in self.root.glob("out/*.txt")}
        assert all(text == f"{name}\n" for name, text in found.items()), found
        return set(found)

    def times(self, event: str, stage: str) -> float:
        """When ``stage`` "started" or "ended"."""
        return float((self.root / event / stage).read_text())

    def processes(self) -> list[psutil.Process]:
        """Every live process that works in this project."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == self.root:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def matching(self, *words: str) -> list[psutil.Process]:
        """The live processes whose command lines have all ``words``."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it ended since it was listed
                if set(words) <= set(process.cmdline()):
                    found.append(process)
        return found

    def await_process(self, *words: str) -> psutil.Process:
        """The first of ``matching``, once there is one."""
        return wait_for(lambda: self.matching(*words))[0]

    def gone_within(self, seconds: float, *words: str) -> bool:
        """Whether no process matches any more after at most so long."""
        deadline = time.monotonic() + seconds
        while self.matching(*words) and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.matching(*words)


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """The first true value of ``condition``, asked again and again for so long."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return value


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[TinyProject]:
    """Two branches that meet in nothing, and a stage that always counts as changed."""
    yield from _project(tmp_path / "tiny", PIPELINE)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[TinyProject]:
    """Two independent stages that take seconds."""
    yield from _project(tmp_path / "tiny", PAIR)


def _project(root: Path, stages: str) -> Iterator[TinyProject]:
    project = TinyProject(root, stages)
    yield project
    for process in project.processes():  # what a broken test leaves
        process.kill()
