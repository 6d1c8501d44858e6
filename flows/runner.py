"""Running the stages of a Dag: independent ones side by side, a failed one stops only what depends on it."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from flows.dag import Dag, Stage
from flows.environment import LOGS
from normalign.settings import ComputeSettings


@dataclass
class Results:
    """Names of stages by what became of them; ``skipped`` ones depend on a failed one."""

    unchanged: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def log_of(stage: str) -> Path:
    """Where a stage's whole output is kept."""
    return LOGS / f"{stage}.log"


def workers_for(compute: ComputeSettings) -> int:
    """Stages to run at a time: two if the cores allow it. A stage on an accelerator has the machine to itself."""
    if compute.device != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(2, cores // compute.threads))


def run_dag(dag: Dag, workers: int, start: Callable[[Stage, Callable[[bool], None]], None]) -> Results:
    """Run ``dag.to_run``, at most ``workers`` at a time, those with the longest way still to go first.

    Args:
        start: begins a stage and returns at once; the stage calls the second argument when it ends, with whether
            it succeeded, from any thread.
    """
    results = Results(unchanged=[name for name in dag.stages if name not in dag.to_run])
    waiting = sorted(dag.to_run, key=lambda name: (-dag.longest_path(name), list(dag.stages).index(name)))
    finished: SimpleQueue[tuple[str, bool]] = SimpleQueue()
    running = 0
    while True:
        while running < workers and (name := _first_ready(dag, waiting, results)):
            waiting.remove(name)
            start(dag.stages[name], lambda succeeded, name=name: finished.put((name, succeeded)))  # type: ignore[misc]
            running += 1
        if not running:
            return results
        name, succeeded = finished.get()
        running -= 1
        if succeeded:
            results.done.append(name)
            continue
        results.failed.append(name)
        stopped = dag.downstream([name]).intersection(waiting)
        results.skipped += [name for name in waiting if name in stopped]
        waiting = [name for name in waiting if name not in stopped]


def _first_ready(dag: Dag, waiting: list[str], results: Results) -> str | None:
    over = {*results.unchanged, *results.done}
    return next((name for name in waiting if dag.stages[name].upstream <= over), None)
