"""Several processes train as one does, replicated or sharded; killed ones go on where they were, to the bit."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from normalign.training.checkpoint import FILE

from ..conftest import Tiny
from .helpers import options
from .workers import Job, finish, run, start

GWC = {"aligner": "layernorm", "gwc": True}
# Of two processes one gets the samples at even places of a step, the other those at odd ones: mostly images, and text
# alone (1 and 5 have no image). Eleven samples by four: in an epoch's last step the processes differ in number.
ORDER = (0, 1, 2, 5, 3, 1, 4, 5, 0, 1, 2)


def job(tiny: Tiny, folder: Path, **changes: Any) -> Job:
    folder.mkdir()
    chosen = options(**{"global_batch": 4, "micro_batch": 1, "epochs": 17, **changes.pop("options", {})})
    order = changes.pop("order", ORDER)
    return Job(tiny, chosen, folder / "work", folder / "out.pt", changes.pop("aligner", GWC), order, **changes)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_two_processes_give_the_loss_curve_of_one_over_50_steps(tiny: Tiny, tmp_path: Path, sharded: bool) -> None:
    one = run(job(tiny, tmp_path / "one"), 1)
    two = run(job(tiny, tmp_path / "two", sharded=sharded), 2)
    assert len(one["rows"]) == len(two["rows"]) > 50
    assert (two["sharded"] > 20) == sharded  # accelerate would replicate on a CPU without a word
    for name in ("loss", "grad_total", "supervised_tokens", "samples", "dropped"):
        ours, theirs = ([row[name] for row in result["rows"]] for result in (one, two))
        assert theirs == pytest.approx(ours, rel=1e-3 if name == "grad_total" else 1e-4), name
    drift = [[row["gain_drift"] for row in result["rows"]] for result in (one, two)]
    assert drift[1] == pytest.approx(drift[0], rel=1e-3) and drift[0][-1] > 0


@pytest.mark.parametrize(
    ("dropped", "trained"),
    [((), [4, 1]), ((0, 1), None), ((0, 1, 2, 3), None)],
    ids=["none dropped", "some dropped", "all but one dropped"],
)
def test_a_process_that_has_only_text_or_no_sample_at_all_takes_part(
    tiny: Tiny, tmp_path: Path, dropped: tuple[int, ...], trained: list[int] | None
) -> None:
    """Places 1 and 3 of a step go to the second process: text alone, and in the last step nothing.

    Dropped samples leave a process, or both, without any: a step that nobody has samples for is passed over.
    """
    order, chosen = (0, 1, 2, 5, 3), {"epochs": 1, "seed": 0}
    one, two = (
        run(job(tiny, tmp_path / str(count), order=order, options=chosen, dropped=dropped), count) for count in (1, 2)
    )
    samples = [row["samples"] for row in two["rows"]]
    assert sum(samples) == len(order) - len(dropped) and 0 not in samples
    assert trained is None or samples == trained
    assert one["lost"] == two["lost"] and two["lost"][-1] == len(dropped)  # each process knows of all
    for ours, theirs in zip(one["rows"], two["rows"], strict=True):
        assert {k: v for k, v in theirs.items() if v is not None} == pytest.approx(
            {k: v for k, v in ours.items() if v is not None}, rel=1e-4, abs=1e-6
        )


@pytest.mark.parametrize(
    ("count", "sharded", "epochs", "wanted"),
    # From three processes on, the order in which they add up is no longer the same whatever it is.
    [(1, False, 10, 10), (2, False, 10, 10), (4, False, 4, 3), (2, True, 4, 3)],
    ids=["one", "two", "four", "two-sharded"],
)
def test_fault_7_killed_at_random_moments_and_resumed_the_weights_are_bitwise_those_of_an_uninterrupted_run(
    tiny: Tiny, tmp_path: Path, count: int, sharded: bool, epochs: int, wanted: int
) -> None:
    every_step = {"checkpoint_minutes": 0.0, "epochs": epochs}
    whole = run(job(tiny, tmp_path / "whole", sharded=sharded, options=every_step), count)
    cut = job(tiny, tmp_path / "cut", sharded=sharded, options=every_step)
    rng = random.Random(count)
    kills = 0
    while kills < wanted:
        processes = start(cut, count)
        before = _stamp(cut.work)
        while _stamp(cut.work) == before and any(p.is_alive() for p in processes):
            time.sleep(0.001)  # until it writes its first checkpoint: a kill before that would only start it again
        time.sleep(rng.uniform(0, 0.1))
        if cut.out.exists():
            break
        for process in processes:
            process.kill()
        kills += 1
        finish(processes)
    assert kills > wanted // 2, "too fast to be killed often enough: give it more steps"
    assert run(cut, count)["rows"] == whole["rows"]
    found = torch.load(cut.out, weights_only=True)["state"]
    assert all(torch.equal(found[name], value) for name, value in whole["state"].items())


def _stamp(work: Path) -> int:
    return (work / FILE).stat().st_mtime_ns if (work / FILE).exists() else 0


def test_a_checkpoint_of_two_sharded_processes_is_resumed_by_one(tiny: Tiny, tmp_path: Path) -> None:
    whole = run(job(tiny, tmp_path / "whole"), 1)
    cut = job(tiny, tmp_path / "cut", sharded=True, options={"checkpoint_minutes": 0.0})
    processes = start(cut, 2)
    while not (cut.work / FILE).exists():
        time.sleep(0.01)
    for process in processes:
        process.kill()
    finish(processes)
    alone = Job(tiny, cut.options, cut.work, cut.out, cut.aligner, cut.order)
    losses = [row["loss"] for row in run(alone, 1)["rows"]]
    assert losses == pytest.approx([row["loss"] for row in whole["rows"]], rel=1e-4)
