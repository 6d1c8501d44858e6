"""Verdicts: every expectation holds on good results and fails on doctored ones, by name."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components import check, check_data, gate
from components.expectations import Expectation, judge
from normalign.files import read_json, write_json
from normalign.settings import Profile

Edit = Callable[[Any], None]


def edit_json(path: Path, edit: Edit) -> None:
    document = read_json(path)
    edit(document)
    write_json(path, document)


def setter(*keys: str, value: Any) -> Edit:
    def edit(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return edit


def failed(path: Path) -> list[tuple[str, str]]:
    return [(v["expectation"], v["point"]) for v in read_json(path)["verdicts"] if not v["passed"]]


DOCTORED_DATA = [
    ("stage1_records", "dataset", setter("stage1", "kept", value=0)),
    ("stage2_records", "dataset", setter("stage2", "kept", value=0)),
    ("stage1_dropped", "dataset", setter("stage1", "dropped", value=1)),
    ("stage2_dropped", "dataset", setter("stage2", "dropped", value=1)),
    ("presence_items", "dataset", setter("benchmarks", "presence", value=7)),
    ("choice_items", "dataset", setter("benchmarks", "choice", value=0)),
    ("reading_items", "dataset", lambda d: d["benchmarks"].pop("reading")),
    ("text_items", "language_reference", setter("tasks", "text", "items", value=7)),
    ("text_norm", "text_norm", lambda d: d.update(T=0.0, g_init=0.0)),
    ("text_norm", "text_norm", lambda d: d.update(T=None)),
    ("zero_rows", "text_norm", setter("zero_rows", value=100)),
    ("initial_gain", "text_norm", setter("g_init", value=0.40001)),
    ("encoder_norm", "encoder_norm", setter("selected", "mean", value=None)),
    ("encoder_norm", "encoder_norm", setter("selected", "mean", value=0.0)),
    ("text_accuracy", "language_reference", setter("tasks", "text", "accuracy", value=0.34)),
    ("text_accuracy", "language_reference", setter("tasks", "text", "accuracy", value=0.96)),
]


def loss(stage: str, value: str, steps: slice = slice(None)) -> Callable[[Path], None]:
    """Overwrite the losses of ``steps`` in the stage's curves."""
    return _cells(stage, 1, value, steps)


def gradient(stage: str, value: str) -> Callable[[Path], None]:
    return _cells(stage, 3, value, slice(4, 5))


def _cells(stage: str, column: int, value: str, steps: slice) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / f"{stage}.csv"
        header, *rows = path.read_text().splitlines()
        cells = [row.split(",") for row in rows]
        for row in cells[steps]:
            row[column] = value
        path.write_text("\n".join([header, *(",".join(row) for row in cells)]) + "\n")

    return edit


def probe(point: str, *keys: str, value: float | None) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "probe.json", setter("points", point, *keys, value=value))


def pooled(value: float | None) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "evaluation.json", setter("pooled_visual", "low", value=value))


DOCTORED_VARIANT = [
    ("loss_finite", "stage1", loss("stage1", "nan", slice(9, 10))),
    ("loss_finite", "stage2", loss("stage2", "inf", slice(9, 10))),
    ("loss_finite", "stage2", loss("stage2", "", slice(9, 10))),
    ("loss_falls", "stage1", loss("stage1", "3.0")),
    ("loss_falls", "stage2", loss("stage2", "9.5", slice(-3, None))),
    ("gradients_finite", "stage1", gradient("stage1", "nan")),
    ("gradients_finite", "stage2", gradient("stage2", "")),
    ("norm_ratio", "init", probe("init", "ratio", value=1.26)),
    ("norm_ratio", "init", probe("init", "ratio", value=0.79)),
    ("norm_ratio", "stage1", probe("stage1", "ratio", value=3.1)),
    ("norm_ratio", "stage2", probe("stage2", "ratio", value=0.49)),
    ("norm_ratio", "stage2", probe("stage2", "ratio", value=None)),
    ("cosine_sync", "init", probe("init", "sync_gap", "first8", value=0.2)),
    ("cosine_sync", "stage1", probe("stage1", "sync_gap", "first8", value=0.21)),
    ("cosine_sync", "stage2", probe("stage2", "sync_gap", "first8", value=None)),
    ("images_matter", "evaluation", pooled(0.0)),
    ("images_matter", "evaluation", pooled(None)),
]


def test_every_expectation_holds_on_good_results_and_opens_the_gates(results: Any) -> None:
    profile = results.profile
    assert check_data.run(profile) == "13 of 13 expectations hold"
    gate.run(profile)
    assert read_json(profile.folder / "gates/data.json") == {"passed": True}
    for variant, count in (("baseline", 7), ("norm", 13), ("norm_gwc", 13)):
        assert check.run(profile, variant) == f"{count} of {count} expectations hold"
        gate.run(profile, variant)
        assert read_json(profile.folder / f"gates/{variant}.json") == {"passed": True}


@pytest.mark.parametrize(("name", "file", "edit"), DOCTORED_DATA)
def test_doctored_data_closes_the_gate_and_is_named(results: Any, name: str, file: str, edit: Edit) -> None:
    profile = results.profile
    edit_json(profile.folder / f"{file}.json", edit)
    check_data.run(profile)
    assert (name, "data") in failed(profile.folder / "check_data.json")
    with pytest.raises(gate.GateClosedError, match=f"data: {name} at data: .* must be"):
        gate.run(profile)


@pytest.mark.parametrize(("name", "point", "doctor"), DOCTORED_VARIANT)
def test_a_doctored_variant_closes_its_gate_and_is_named(
    results: Any, name: str, point: str, doctor: Callable[[Path], None]
) -> None:
    profile = results.profile
    doctor(profile.results("norm"))
    check.run(profile, "norm")
    # A loss that is not finite cannot be called falling where it stands at an end of the curve: not here.
    assert failed(profile.results("norm") / "check.json") == [(name, point)]
    with pytest.raises(gate.GateClosedError, match=f"norm: {name} at {point}: .* must be"):
        gate.run(profile, "norm")
    check.run(profile, "norm_gwc")
    gate.run(profile, "norm_gwc")


def test_every_expectation_of_the_code_is_doctored_above(results: Any) -> None:
    profile = results.profile
    check_data.run(profile)
    check.run(profile, "norm")
    of_data = {v["expectation"] for v in read_json(profile.folder / "check_data.json")["verdicts"]}
    verdicts = read_json(profile.results("norm") / "check.json")["verdicts"]
    assert of_data == {name for name, _, _ in DOCTORED_DATA}
    assert {(v["expectation"], v["point"]) for v in verdicts} == {(name, point) for name, point, _ in DOCTORED_VARIANT}


def test_a_verdict_names_variant_expectation_point_observed_value_and_bound(results: Any) -> None:
    probe("stage2", "ratio", value=3.123456789)(results.profile.results("norm_gwc"))
    check.run(results.profile, "norm_gwc")
    verdicts = read_json(results.profile.results("norm_gwc") / "check.json")
    assert verdicts["passed"] is False
    assert [v for v in verdicts["verdicts"] if not v["passed"]] == [
        {
            "variant": "norm_gwc",
            "expectation": "norm_ratio",
            "point": "stage2",
            "observed": 3.12346,
            "low": 0.5,
            "high": 3.0,
            "passed": False,
            "message": (
                "norm_gwc: norm_ratio at stage2: visual norm / T as a share of the intended 1 is 3.12346, "
                "must be at least 0.5 and at most 3"
            ),
        }
    ]


def with_variant(profile: Profile, name: str, **changes: Any) -> Profile:
    changed = dataclasses.replace(profile.variant(name), **changes)
    return dataclasses.replace(profile, variants=profile.variants | {name: changed})


def test_the_ratio_is_held_against_what_the_variant_aims_for(results: Any) -> None:
    profile = with_variant(results.profile, "norm", multiple=4.0)
    results.profile = profile
    results.variant("norm")  # ratio 4 at every point
    check.run(profile, "norm")
    path = profile.results("norm") / "check.json"
    assert failed(path) == []
    verdicts = read_json(path)["verdicts"]
    assert [v["observed"] for v in verdicts if v["expectation"] == "norm_ratio"] == [1.0, 1.0, 1.0]
    # Another multiple is an imbalance by intention: the sync gap is not held against the baseline's.
    assert not [v for v in verdicts if v["expectation"] == "cosine_sync"]


def test_a_variant_without_an_aim_has_neither_ratio_nor_sync_expectation(results: Any) -> None:
    results.variant("norm_default_init")
    check.run(results.profile, "norm_default_init")
    names = {
        v["expectation"] for v in read_json(results.profile.results("norm_default_init") / "check.json")["verdicts"]
    }
    assert names == {"loss_finite", "loss_falls", "gradients_finite", "images_matter"}


@pytest.mark.parametrize(
    ("losses", "falls"), [("2 1", True), ("1 2", False), ("1", False), ("3 2 2 1", True), ("1 3 1 3 1", False)]
)
def test_the_ends_of_a_short_curve_do_not_overlap(results: Any, losses: str, falls: bool) -> None:
    path = results.profile.results("norm") / "stage1.csv"
    header, *rows = path.read_text().splitlines()
    values = losses.split()
    cut = [",".join([row.split(",")[0], loss, *row.split(",")[2:]]) for row, loss in zip(rows, values, strict=False)]
    path.write_text("\n".join([header, *cut]) + "\n")
    check.run(results.profile, "norm")
    assert (("loss_falls", "stage1") not in failed(results.profile.results("norm") / "check.json")) == falls


def test_lmms_evals_own_text_tasks_are_held_against_their_own_chance_levels_and_sizes(results: Any) -> None:
    evaluate = dataclasses.replace(results.profile.evaluate, text_tasks=("hellaswag", "spoken"))
    profile = dataclasses.replace(results.profile, evaluate=evaluate)
    # 0.34 < 0.25 + 0.1; without a chance level 0.34 > 0.1.
    tasks = {"items": 9, "chance": 0.25, "accuracy": 0.34}, {"items": 7, "chance": None, "accuracy": 0.34}
    named = dict(zip(("hellaswag", "spoken"), tasks, strict=True))
    edit_json(profile.folder / "language_reference.json", setter("tasks", value=named))
    check_data.run(profile)
    assert failed(profile.folder / "check_data.json") == [("hellaswag_accuracy", "data"), ("spoken_items", "data")]


def test_a_missing_field_is_an_error_that_names_file_and_field(results: Any) -> None:
    folder = results.profile.results("norm")
    edit_json(folder / "probe.json", lambda d: d["points"]["stage1"].pop("ratio"))
    with pytest.raises(ValueError, match=r"probe\.json: field 'points\.stage1\.ratio' is missing"):
        check.run(results.profile, "norm")
    (folder / "stage1.csv").unlink()
    with pytest.raises(ValueError, match=r"stage1\.csv is missing"):
        check.run(results.profile, "norm")


def test_verdict_files_are_strict_json_and_identical_twice(results: Any) -> None:
    profile = results.profile
    loss("stage2", "nan")(profile.results("norm"))
    path = profile.results("norm") / "check.json"
    check.run(profile, "norm")
    first = path.read_bytes()
    assert "NaN" not in json.dumps(read_json(path))
    check.run(profile, "norm")
    assert path.read_bytes() == first


def test_a_library_failure_is_raised_and_not_read_as_a_bad_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas as pd

    def fail(*_: Any, **__: Any) -> Any:
        raise TypeError("a rule that cannot be computed")

    monkeypatch.setattr(pd.Series, "isnull", fail)
    with pytest.raises(RuntimeError, match="failed to compute"):
        judge([Expectation("norm", "x", "init", "x", 1.0)])


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(), st.one_of(st.none(), st.floats(-10, 10)), st.booleans()),
        min_size=8,
        max_size=30,
    )
)
def test_verdicts_agree_with_plain_comparisons(cases: list[tuple[float, float | None, bool]]) -> None:
    expectations = [
        Expectation("v", "e", "init", "x", value, low, None if low is None else low + 1, strict)
        for value, low, strict in cases
    ]
    for verdict, (value, low, strict) in zip(judge(expectations), cases, strict=True):
        within = low is None or (low < value < low + 1 if strict else low <= value <= low + 1)
        assert verdict["passed"] == (math.isfinite(value) and within)
