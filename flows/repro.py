"""`make repro`: run what changed in dvc.yaml for the profile in params.yaml, and show what came out."""

import argparse
import contextlib
import fcntl
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from flows import preflight
from flows.dag import Dag, Stage, read_dag
from flows.display import Display
from flows.environment import STATE, prepare
from flows.processes import Processes, StoppedError, end_with_parent
from flows.runner import Results, log_of, run_dag, workers_for
from flows.summary import closing_table
from normalign.settings import Profile, load_profile, variants_to_run

INTERRUPTED = 130
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def only_run(path: Path = STATE / "repro.lock") -> Iterator[None]:
    """Hold the checkout for this run; the kernel lets go of it however the process ends.

    Raises:
        ValueError: another run holds it; the message says which process.
    """
    with path.open("a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            raise ValueError(f"process {handle.read().strip()} already runs this checkout: wait for it") from None
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and a closed terminal do what Ctrl-C does; on Linux so does the end of the `make` that started us."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in INTERRUPTS}
    if "MAKELEVEL" in os.environ:
        end_with_parent(os.getppid(), signal.SIGTERM)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_in_terminal(dag: Dag, workers: int, console: Console) -> Results:
    """Run the stages with their progress on ``console``; on an interrupt every process is ended first."""
    processes = Processes()
    with Display(console, dag.count(dag.to_run)) as display, ThreadPoolExecutor(workers) as pool:

        def execute(stage: Stage, finished: Callable[[bool], None]) -> None:
            succeeded = False
            display.started(stage.name)
            try:
                show = functools.partial(display.line, stage.name)
                succeeded = processes.run(stage.command, log_of(stage.name), show) == 0
                display.finished(stage.name, succeeded, stage.covers)
            except StoppedError:
                pass
            except Exception:
                console.print_exception()
            finally:
                finished(succeeded)

        def start(stage: Stage, finished: Callable[[bool], None]) -> None:
            pool.submit(execute, stage, finished)

        try:
            return run_dag(dag, workers, start)
        except BaseException:
            for number in INTERRUPTS:  # a second Ctrl-C must not cut the ending short
                signal.signal(number, signal.SIG_IGN)
            processes.stop()
            raise


def repro(console: Console, workers: int | None) -> int:
    """Check, run, sum up; the exit status."""
    profile = load_profile()
    preflight.check(profile)
    dag = read_dag(Path.cwd())
    if dag.pullable:
        console.print(str(dag.pullable), highlight=False, soft_wrap=True)
    workers = workers or workers_for(profile.compute)
    stages = f"{dag.count(dag.to_run)} of {dag.count(dag.stages)} stages"
    console.print(f"profile {profile.name}: {stages} to run, {workers} at a time", highlight=False)
    results = run_in_terminal(dag, workers, console)
    _close(console, profile, dag, results)
    return 1 if results.failed else 0


def _close(console: Console, profile: Profile, dag: Dag, results: Results) -> None:
    console.print(closing_table(profile, variants_to_run()))
    counts = {name: dag.count(stages) for name, stages in vars(results).items() if stages}
    summary = ", ".join(f"{count} {name}" for name, count in counts.items())
    for name, stages in (("failed", results.failed), ("skipped", results.skipped)):
        if stages:
            console.print(f"{name}: {', '.join(stages)}", highlight=False, soft_wrap=True)
    report = profile.folder / "report" / "index.html"
    where = f"report: {report}" if report.exists() else "no report yet"
    console.print(f"stages: {summary}; {where}", highlight=False, soft_wrap=True)


def main() -> int:
    """Command line; see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(), help="folder of dvc.yaml (default: this one)")
    parser.add_argument("--workers", type=int, help="stages to run at a time (default: cores / threads, at most 2)")
    arguments = parser.parse_args()
    prepare(arguments.root)
    console = Console()
    try:
        with signals_interrupt(), only_run():
            return repro(console, arguments.workers)
    except KeyboardInterrupt:
        console.print("interrupted: no stage is left running; the next `make repro` goes on from here")
        return INTERRUPTED
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
