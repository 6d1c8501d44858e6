"""The order in which stages are started, and how many at a time, on Dags made up by hypothesis."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.dag import Dag, Stage
from flows.runner import run_dag, workers_for
from normalign.settings import ComputeSettings


@st.composite
def dags(draw: st.DrawFn) -> Dag:
    """Up to nine stages; edges run from earlier to later ones; what is to be run is closed downstream."""
    names = [f"s{i}" for i in range(draw(st.integers(1, 9)))]
    stages = {
        name: Stage(name, ("true",), frozenset(draw(st.sets(st.sampled_from(names[:i])))) if i else frozenset())
        for i, name in enumerate(names)
    }
    dag = Dag(stages, frozenset(), None)
    return Dag(stages, dag.downstream(draw(st.sets(st.sampled_from(names)))), None)


@given(dags(), st.integers(1, 3), st.sets(st.integers(0, 8)))
def test_a_stage_starts_after_its_upstream_and_is_skipped_only_below_a_failure(
    dag: Dag, workers: int, bad: set[int]
) -> None:
    failing = {f"s{i}" for i in bad}
    succeeded = set(dag.stages) - dag.to_run
    running: set[str] = set()

    def execute(stage: Stage, finished: Callable[[bool], None]) -> None:
        running.discard(stage.name)
        if stage.name not in failing:
            succeeded.add(stage.name)
        finished(stage.name not in failing)

    with ThreadPoolExecutor(workers) as pool:

        def start(stage: Stage, finished: Callable[[bool], None]) -> None:
            assert stage.upstream <= succeeded
            running.add(stage.name)
            assert len(running) <= workers
            pool.submit(execute, stage, finished)

        results = run_dag(dag, workers, start)

    assert sorted(results.unchanged + results.done + results.failed + results.skipped) == sorted(dag.stages)
    assert set(results.failed) == failing & (dag.to_run - set(results.skipped))
    assert set(results.skipped) == dag.downstream(results.failed) - set(results.failed)


def test_the_longest_way_still_to_go_comes_first() -> None:
    order: list[str] = []

    def start(stage: Stage, finished: Callable[[bool], None]) -> None:
        order.append(stage.name)
        finished(True)

    edges = {"short": (), "long": (), "middle": ("long",), "end": ("middle",)}
    stages = {name: Stage(name, ("true",), frozenset(upstream)) for name, upstream in edges.items()}
    run_dag(Dag(stages, frozenset(stages), None), 1, start)
    assert order == ["long", "middle", "short", "end"]


@pytest.mark.parametrize(
    ("device", "threads", "cores", "expected"),
    [("cpu", 1, 2, 2), ("cpu", 1, 1, 1), ("cpu", 1, 64, 2), ("cpu", 8, 4, 1), ("cpu", 2, 4, 2), ("cuda", 1, 64, 1)],
)
def test_two_stages_run_at_a_time_if_cores_allow_and_one_on_an_accelerator(
    device: str, threads: int, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert workers_for(ComputeSettings(device, 1, threads, "fp32")) == expected  # type: ignore[arg-type]
