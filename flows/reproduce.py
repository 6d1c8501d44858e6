"""`make flow`: the stages of dvc.yaml as the tasks of a Prefect flow, with live logs and artifacts.

DVC stays the cache and the judge of what has changed; Prefect shows and records. No server is needed.
"""

import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows import preflight
from flows.dag import Dag, Stage, read_dag
from flows.environment import prepare
from flows.processes import Processes
from flows.repro import INTERRUPTED, only_run, signals_interrupt
from flows.runner import Results, log_of, run_dag, workers_for
from normalign.files import read_json
from normalign.settings import Profile, load_profile

# Prefect reads its settings from the environment when it is imported, so that comes after `prepare`.
_PROGRESS = re.compile(r"step \d+/\d+ ")
_PROGRESS_SECONDS = 10.0


def metric_rows(metrics: Any, prefix: str = "") -> list[dict[str, Any]]:
    """Nested metrics as one row per number, text or truth value, named by its dotted path."""
    if isinstance(metrics, dict):
        return [row for key, value in metrics.items() for row in metric_rows(value, f"{prefix}.{key}".lstrip("."))]
    return [] if isinstance(metrics, list) else [{"metric": prefix, "value": metrics}]


def artifact_key(name: str) -> str:
    """``name`` in the letters that Prefect allows in an artifact's key."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def throttled(log: Callable[[str], None]) -> Callable[[str], None]:
    """``log`` for every line, but for a progress line (``step 12/60 ...``) only once in ten seconds."""
    last = 0.0

    def write(text: str) -> None:
        nonlocal last
        if _PROGRESS.match(text):
            if time.monotonic() - last < _PROGRESS_SECONDS:
                return
            last = time.monotonic()
        log(text)

    return write


def publish_metrics(stage: Stage) -> None:
    """One table artifact with the numbers of the stage's metric files."""
    from prefect.artifacts import create_table_artifact

    rows = [row for path in stage.metrics if path.suffix == ".json" for row in metric_rows(_load(path))]
    if rows:
        create_table_artifact(key=artifact_key(stage.name), table=rows, description=f"Metrics of {stage.name}")


def _load(path: Path) -> Any:
    return read_json(path) if path.exists() else {}


def publish_report(profile: Profile) -> None:
    """The report's Markdown as an artifact, with the page's address in it."""
    from prefect.artifacts import create_markdown_artifact

    page = (profile.folder / "report" / "index.html").resolve()
    text = page.with_name("report.md")
    if text.exists():
        link = f"[The report]({page.as_uri()})\n\n{text.read_text(encoding='utf-8')}"
        create_markdown_artifact(key=artifact_key(f"report-{profile.name}"), markdown=link)


def run_in_prefect(dag: Dag, workers: int) -> Results:
    """Run the stages as tasks of the flow that calls this; an interrupt or a cancel ends every process first."""
    from prefect import task
    from prefect.cache_policies import NO_CACHE
    from prefect.logging import get_run_logger
    from prefect.states import Completed

    processes = Processes()

    @task(cache_policy=NO_CACHE)
    def run_stage(stage: Stage) -> Any:
        if stage.name not in dag.to_run:
            publish_metrics(stage)
            return Completed(name="Unchanged", message="nothing that it depends on has changed")
        logger = get_run_logger()
        try:
            status = processes.run(stage.command, log_of(stage.name), throttled(logger.info))
        except BaseException:
            processes.stop()
            raise
        if status:
            raise RuntimeError(f"{stage.name} failed with status {status}; its output: {log_of(stage.name)}")
        publish_metrics(stage)
        return Completed(message="run by DVC")

    def start(stage: Stage, finished: Callable[[bool], None]) -> None:
        future = run_stage.with_options(name=stage.name, task_run_name=stage.name).submit(stage)
        future.add_done_callback(lambda future: finished(_succeeded(future)))

    try:
        whole = Dag(dag.stages, frozenset(dag.stages), dag.pullable)
        results = run_dag(whole, workers, start)
        # A task of its own shows every stage; to the reader of the results it still makes a difference which ones ran.
        done = [name for name in results.done if name in dag.to_run]
        return dataclasses.replace(results, done=done, unchanged=[n for n in results.done if n not in dag.to_run])
    except BaseException:
        processes.stop()
        raise


def _succeeded(future: Any) -> bool:
    """Whether a task that is over completed; waiting is what makes its future fetch the final state."""
    future.wait()
    return bool(future.state.is_completed())


def build_flow(profile: Profile, dag: Dag) -> Callable[[], Results]:
    """The flow for one profile; a failed stage fails it once everything that can be run has been."""
    from prefect import flow
    from prefect.task_runners import ThreadPoolTaskRunner

    workers = workers_for(profile.compute)
    threads: Any = ThreadPoolTaskRunner(max_workers=workers)

    @flow(name="reproduce", flow_run_name=profile.name, task_runner=threads)
    def reproduce() -> Results:
        results = run_in_prefect(dag, workers)
        publish_report(profile)
        if results.failed:
            raise RuntimeError(f"failed: {', '.join(results.failed)}; skipped: {', '.join(results.skipped) or 'none'}")
        return results

    return reproduce


def main(root: Path) -> int:
    """Run the flow for the project in ``root``; the exit status."""
    prepare(root)
    try:
        with signals_interrupt(), only_run():
            profile = load_profile()
            preflight.check(profile)
            dag = read_dag(Path.cwd())
            # Two first uses of one database would migrate it at the same time.
            subprocess.run([sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"], check=True)
            results = build_flow(profile, dag)()
    except KeyboardInterrupt:
        print("interrupted: no stage is left running; the next `make flow` goes on from here", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({name: len(stages) for name, stages in vars(results).items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
