"""The stages of dvc.yaml as DVC itself reads them: commands, edges, and what has changed."""

import json
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ALWAYS_CHANGED = "always changed"


@dataclass(frozen=True)
class Stage:
    """One process to run. ``name``: DVC's address (``stage1@smol-norm``); ``upstream``: names it depends on.

    ``covers``: how many of DVC's stages it runs.
    """

    name: str
    command: tuple[str, ...]
    upstream: frozenset[str]
    metrics: tuple[Path, ...] = ()
    covers: int = 1


@dataclass(frozen=True)
class Pullable:
    """Stages that run only because their outputs are not on this machine, and the remote that could have them."""

    stages: int
    size: int
    remote: str | None

    def __str__(self) -> str:
        names = f"{self.stages} stage{'s' * (self.stages != 1)}"
        spared = f"dvc.lock knows the outputs of {names} that are not here ({self.size / 1e6:.1f} MB)"
        if self.remote is None:
            return f"{spared}; no DVC remote is configured that `dvc pull` could fetch them from: running them"
        return f"{spared}; `dvc pull` from remote {self.remote!r} could spare running them"


@dataclass(frozen=True)
class Dag:
    """``stages``: all, in the order of dvc.yaml. ``to_run``: those that changed and everything downstream of them."""

    stages: dict[str, Stage]
    to_run: frozenset[str]
    pullable: Pullable | None

    def downstream(self, names: Iterable[str]) -> frozenset[str]:
        """``names`` and every stage that depends on one of them, directly or not."""
        found = set(names)
        while grown := {s.name for s in self.stages.values() if s.upstream & found} - found:
            found |= grown
        return frozenset(found)

    def count(self, names: Iterable[str]) -> int:
        """How many of DVC's stages ``names`` are."""
        return sum(self.stages[name].covers for name in names)

    def longest_path(self, name: str) -> int:
        """Number of stages on the longest way from ``name`` to an end of the pipeline, itself included."""
        return 1 + max((self.longest_path(s.name) for s in self.stages.values() if name in s.upstream), default=0)


def read_dag(root: Path) -> Dag:
    """Read dvc.yaml, dvc.lock and the state of the files under ``root``.

    To be called from the main thread: DVC's locks are per process, and its API is not safe in threads.

    Raises:
        ValueError: dvc.yaml or dvc.lock cannot be read; the message is DVC's.
    """
    _forget_dead_locks(root / ".dvc" / "tmp" / "rwlock")
    from dvc.exceptions import DvcException
    from dvc.repo import Repo, lock_repo

    try:
        # Under one lock DVC reads its files once; each call that locks by itself would read them anew.
        with Repo(str(root)) as repo, lock_repo(repo):
            graph = repo.index.graph
            stages = {
                node.addressing: Stage(
                    name=node.addressing,
                    command=(sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "-s", node.addressing),
                    upstream=frozenset(upstream.addressing for upstream in graph.successors(node)),
                    metrics=tuple(Path(out.fs_path) for out in node.outs if _is_metric_file(out)),
                )
                for node in repo.index.stages
            }
            status: dict[str, list[Any]] = repo.status()
            pullable = _pullable(repo, status)
            commands = {node.addressing: str(node.cmd) for node in repo.index.stages}
    except DvcException as error:
        raise ValueError(f"{root / 'dvc.yaml'}: {error}") from error
    changed = {name for name, reasons in status.items() if reasons != [ALWAYS_CHANGED]}
    everything = Dag(stages, frozenset(), pullable)
    to_run = everything.downstream(changed)
    return _with_batches(everything, to_run, {name: commands[name] for name in status.keys() - to_run})


def _forget_dead_locks(file: Path) -> None:
    """Remove DVC's list of files in use if every process in it is dead, or if it was cut short by a kill.

    DVC itself takes a killed process that nobody has reaped yet for a live one, and refuses a list that it cannot read.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        holders = [*entries.get("write", {}).values(), *(h for held in entries.get("read", {}).values() for h in held)]
        if any(_is_alive(holder["pid"]) for holder in holders if holder):
            return
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    file.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_metric_file(out: Any) -> bool:
    """Whether an output is figures that git tracks: a JSON file that is not in DVC's cache."""
    return not out.use_cache and str(out.fs_path).endswith(".json")


def _with_batches(dag: Dag, to_run: frozenset[str], commands: dict[str, str]) -> Dag:
    """Give stages that only ever count as changed (``always_changed``) one common process instead of one DVC each.

    Registering imports MLflow, 2.5 s, and finds nothing new: three variants through DVC would make up most of the
    time of a run in which nothing changed. Their commands differ in the last word, the variant; the stage's program
    takes several of them.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, command in commands.items():
        if dag.downstream([name]) == {name}:
            groups.setdefault(tuple(shlex.split(command)[:-1]), []).append(name)
        else:
            to_run |= dag.downstream([name])
    stages = dict(dag.stages)
    for words, names in groups.items():
        names.sort(key=list(dag.stages).index)
        batch = names[0].partition("@")[0]
        arguments = [shlex.split(commands[name])[-1] for name in names]
        upstream = frozenset().union(*(stages.pop(name).upstream for name in names))
        stages[batch] = Stage(batch, (*words, *arguments), upstream, covers=len(names))
        to_run |= {batch}
    return Dag(stages, to_run, dag.pullable)


def _pullable(repo: Any, status: dict[str, list[Any]]) -> Pullable | None:
    """What `dvc pull` could have spared: stages whose only change is that files which dvc.lock knows are missing."""
    stages, size = 0, 0
    for node in repo.index.stages:
        reasons = [reason for reason in status.get(node.addressing, []) if reason != ALWAYS_CHANGED]
        if not reasons or not all(_only_missing(reason) for reason in reasons):
            continue
        missing = [out for out in node.outs if out.use_cache and out.hash_info and not out.exists]
        stages += bool(missing)
        size += sum(out.meta.size or 0 for out in missing)
    remote = repo.config["core"].get("remote")
    return Pullable(stages, size, remote) if stages else None


def _only_missing(reason: Any) -> bool:
    if not isinstance(reason, dict):
        return False
    return all(state in ("deleted", "not in cache") for entries in reason.values() for state in entries.values())
