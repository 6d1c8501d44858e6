"""Copies of the project in which whole chains run: stage by stage through DVC, or all stages in one process."""

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]

# Runs the commands of dvc.yaml, upstream first, that begin with one of the arguments; imports are paid for once.
# A stage may read no other files of the data folder than its own and those of stages that it depends on: else DVC
# might run it before they are there, and would not run it again when they change (one that always runs would be).
ONE_PROCESS = """
import importlib, os, shlex, sys
from pathlib import Path
import networkx
from dvc.repo import Repo
from normalign.settings import load_profile
with Repo() as repo:
    graph = repo.index.graph
nodes = list(networkx.dfs_postorder_nodes(graph))
readable = []
def watch(event, arguments):
    if event == "open" and readable and isinstance(arguments[0], str):
        file = Path(arguments[0]).absolute()
        inside = file.relative_to(data).parts if file.is_relative_to(data) else ()
        unfinished = any(part.startswith(".") for part in inside)  # its own
        if inside and not unfinished and file.is_file():
            assert any(file.is_relative_to(out) for out in readable), f"{file} is read, but no dependency in dvc.yaml"
sys.addaudithook(watch)
for node in nodes:
    if node.addressing.startswith(tuple(sys.argv[1:])):
        _, _, module, profile, *variant = shlex.split(node.cmd)
        data = Path.cwd() / "data" / profile
        above = networkx.descendants(graph, node) if node.always_changed else graph.successors(node)
        readable = [Path(out.fs_path) for stage in (node, *above) for out in stage.outs]
        print(importlib.import_module(module).run(load_profile(profile), *variant), flush=True)
        readable = []
"""


class Tree:
    """A project folder that runs may change."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def settings(self) -> dict[str, Any]:
        """params.yaml as a document."""
        return dict(yaml.safe_load((self.root / "params.yaml").read_text()))

    def edit(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change params.yaml as a document."""
        document = self.settings()
        change(document)
        (self.root / "params.yaml").write_text(yaml.safe_dump(document, sort_keys=False))

    def execute(self, *command: str, **environment: str) -> tuple[int, str]:
        """Exit status and output of a command in this folder."""
        # MLflow leaves the address that a test gave it in the environment of the test's process.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        done = subprocess.run(
            command,
            cwd=self.root,
            env={**inherited, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        return done.returncode, done.stdout

    def python(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """Exit status and output of this interpreter, without the project's own folder on its path."""
        return self.execute(sys.executable, *arguments, **environment)

    def repro(self, **environment: str) -> tuple[int, str]:
        """`make repro`; its output and its time are shown when a test fails or with ``-s``."""
        start = time.monotonic()
        status, output = self.python("-m", "flows.repro", **environment)
        print(output, f"took {time.monotonic() - start:.1f} s")
        return status, output

    def run_in_one_process(self, *stages: str, **environment: str) -> str:
        """Run the DAG's commands whose names begin so, without DVC; what they print."""
        status, output = self.python("-c", ONE_PROCESS, *stages, **environment)
        assert status == 0, output
        return output

    def git(self, *arguments: str) -> str:
        """Output of git, which needs no configuration of its own here."""
        who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        status, output = self.execute("git", *who, *arguments)
        assert status == 0, output
        return output

    def commit(self) -> None:
        """Commit everything that git does not ignore."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "test")

    def registered(self) -> list[str]:
        """Variants of the registered model versions, oldest first."""
        database = self.root / "state" / "mlflow.db"
        if not database.exists():
            return []
        with sqlite3.connect(database) as connection:
            query = (
                "select v.value from model_versions m join model_version_tags v "
                "on v.name = m.name and v.version = m.version and v.key = 'variant' order by m.version"
            )
            return [value for (value,) in connection.execute(query)]


def copy_project(root: Path, profile: str) -> Tree:
    """The project's sources as they are now, committed, with no results and no lock; ``profile`` is chosen."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("data/", "tests/")) and name != "dvc.lock":
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, root / name)
    tree = Tree(root)
    tree.edit(lambda document: document.update(profile=profile))
    tree.git("init", "--quiet")
    tree.commit()
    return tree


@pytest.fixture(scope="session")
def new_tree(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tree]:
    """Makes a copy of the project for a profile."""
    return lambda profile: copy_project(tmp_path_factory.mktemp("chain") / "project", profile)


@pytest.fixture(scope="session")
def chain(new_tree: Callable[[str], Tree]) -> Iterator[Tree]:
    """The project after a first `make repro` of the profile ci."""
    tree = new_tree("ci")
    status, output = tree.repro()
    assert status == 0, output
    yield tree
