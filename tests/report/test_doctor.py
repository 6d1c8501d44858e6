import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from normalign.diagnosis.verdict import judge
from normalign.norms.theory import Updates
from normalign.report import doctor as doctor_module
from normalign.report.blocks import Table
from normalign.report.doctor import doctor_sections, model_names, print_results, write_page
from normalign.report.doctor_charts import inequality_panels, layer_panels, routing_panels, theory_panels
from normalign.report.doctor_tables import changes, layer_table, routing_table, theory_table, verdict_table
from normalign.report.terminal import print_blocks

from ..diagnosis.results import attention_map, result, summary
from .markup import check_references, check_self_contained

EVIL = "<script>alert('x')</script> $x_$ [red]"
EIGHT = Updates.uniform(2.0, 90, 8)
BEFORE = result(200, Updates([40, *[10] * 9], [90] * 10), model="llava", maps=[attention_map("a", EVIL)])
AFTER = result(1, Updates([40, *[10] * 9], [90] * 10), model="llava-aligned", maps=[attention_map("a", EVIL)])
OTHER = result(5, EIGHT, model="other", T=0.9)


def routed() -> dict[str, Any]:
    side = {"softmax_entropy": [1.3, 1.2], "utilisation_entropy": [0.4, None], "load": [[0.9, 0.1], None]}
    routing = {"experts": 2, "top_k": 1, "layers": [2, 5], "visual": side, "text": side}
    return result(5, EIGHT, model="mixture", routing=routing)


def bare() -> dict[str, Any]:
    return result(5, EIGHT, model="bare", theory=None, attention=None, attention_reason="no weights", maps=[])


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the charts out where they are not the point."""
    for name in ("layer_panels", "theory_panels", "inequality_panels", "routing_panels"):
        monkeypatch.setattr(doctor_module, name, lambda *_: "<svg></svg>")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three models, one of them the aligned version of another."""
    out = tmp_path_factory.mktemp("doctor")
    return write_page([BEFORE, AFTER, OTHER], out).read_text(encoding="utf-8")


def tables_text(results: list[dict[str, Any]], width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    print_results(results, console)
    return console.export_text()


def test_the_page_is_well_formed_self_contained_and_its_references_resolve(page: str) -> None:
    check_self_contained(page)
    check_references(page)


def test_the_page_says_what_was_found_in_words(page: str) -> None:
    text = re.sub(r"<[^>]+>", " ", page)
    for sentence in (*judge(BEFORE)["words"], *judge(AFTER)["advice"]):
        assert " ".join(sentence.split()[:6]) in text
    assert "Before and after: llava-aligned" in text and "Before and after: other" not in text


@pytest.mark.usefixtures("no_charts")
def test_the_page_on_one_model_needs_no_attention_theory_routing_or_maps(tmp_path: Path) -> None:
    page = write_page([bare()], tmp_path).read_text(encoding="utf-8")
    assert "Attention was not measured: no weights." in page and "Attention maps: not available." in page
    assert "Routing" not in page and "Before and after" not in page
    check_self_contained(page)


@pytest.mark.usefixtures("no_charts")
def test_text_from_models_and_data_is_escaped(tmp_path: Path) -> None:
    evil = result(5, EIGHT, model=EVIL, family=EVIL, maps=[attention_map("a", EVIL)])
    evil["counts"]["skipped"] = {EVIL: 1}
    page = write_page([evil], tmp_path).read_text(encoding="utf-8")
    assert "<script" not in page and page.count("&lt;script&gt;") >= 4


def test_charts_draw_names_as_they_are() -> None:
    evil = [result(5, EIGHT, model=EVIL), result(5, EIGHT, model="_hidden")]
    svg = layer_panels(evil, model_names(evil), "curves", doctor_module.CURVES)
    text = "".join(ElementTree.fromstring(svg).itertext())
    assert EVIL in text and "_hidden" in text


def test_every_chart_is_an_svg_element_with_all_models_and_the_same_each_time() -> None:
    results = [BEFORE, routed(), bare()]
    names = model_names(results)
    for draw in (theory_panels, inequality_panels, routing_panels):
        svg = draw(results, names, "chart")
        text = "".join(ElementTree.fromstring(svg).itertext())
        assert all(name in text for name in names)
        assert svg == draw(results, names, "chart")


def test_a_panel_without_any_curve_says_so() -> None:
    assert "not available" in theory_panels([bare()], ["bare"], "theory")
    assert "not available" in layer_panels([bare()], ["bare"], "mass", doctor_module.ATTENTION)


@pytest.mark.usefixtures("no_charts")
def test_rendering_again_gives_the_same_bytes_without_path(tmp_path: Path) -> None:
    first, second = (write_page([BEFORE, AFTER], tmp_path / name).read_bytes() for name in "ab")
    assert first == second and str(tmp_path).encode() not in first


@pytest.mark.usefixtures("no_charts")
def test_sections_come_in_the_agreed_order() -> None:
    one = [section.anchor for section in doctor_sections([routed()], ["mixture"])]
    assert one == ["verdict", "norms", "layers", "theory", "routing", "maps", "numbers", "reading"]
    two = [section.anchor for section in doctor_sections([BEFORE, AFTER], ["a", "b"])]
    assert two[:5] == ["verdict", "model-0", "model-1", "change", "norms"]


def test_stages_of_one_model_are_told_by_width_depth_and_t() -> None:
    assert changes([BEFORE, AFTER, OTHER]) == [(0, 1)]
    assert changes([OTHER, BEFORE, AFTER, BEFORE]) == [(1, 2), (1, 3)]
    assert changes([BEFORE, {**AFTER, "width": 128}]) == []
    assert changes([BEFORE, {**AFTER, "T": 2.03}]) == []


def test_equal_names_are_numbered() -> None:
    assert model_names([BEFORE, BEFORE, OTHER, BEFORE]) == ["llava", "llava (2)", "other", "llava (3)"]


def test_verdict_table_shows_the_figures_it_rests_on_and_marks_what_is_strong() -> None:
    results = [BEFORE, AFTER]
    table = verdict_table(results, model_names(results), [judge(each) for each in results])
    assert table.rows[0][:5] == ["llava", "strong", "inertia", "200", "200"] and table.failed == {0}
    assert table.rows[1][:5] == ["llava-aligned", "mild", "overwriting", "1.00", "1.00"]


def test_layer_table_has_a_row_per_layer_with_norms_entering_it() -> None:
    table = layer_table(OTHER, "other")
    assert len(table.rows) == 8 and len(layer_table(OTHER, "other", 3).rows) == 3
    # Text of norm 0.9 gets 2 at right angles: atan(2 / 0.9) = 65.8 degrees; visual tokens of 4.5: 24.0, as predicted.
    assert table.rows[0] == ["1", "4.50", "0.900", "0.914", "0.410", "65.8", "24.0", "24.0", "0.100"]


def test_tables_work_with_what_is_missing() -> None:
    assert theory_table(["bare"], [judge(bare())]).rows == [["bare", *["–"] * 7]]
    assert [row[-2:] for row in routing_table(routed(), "mixture").rows] == [["90.0", "90.0"], ["–", "–"]]
    absent = result(5, EIGHT)
    absent["interface"]["vision_output"] = None
    absent["interface"]["visual_vocabulary"] = summary(64)
    assert "62.1" in tables_text([absent])  # the vocabulary's median


def test_the_terminal_shows_words_and_tables_within_80_columns() -> None:
    text = tables_text([BEFORE, AFTER, {**OTHER, "model": EVIL}])
    assert max(map(len, text.splitlines())) <= 80
    for part in ("inertia", "overwriting", "Before and after: llava-aligned", "Theory", "[red]"):
        assert part in text
    assert "…" not in text


def test_a_header_takes_as_many_lines_as_its_cells_allow() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    print_blocks(console, [Table("t", ["Model", "Mean without sinks"], [["m", "1.00"]], "lr")])
    lines = [line.split() for line in console.export_text().splitlines()]
    assert [line for line in lines if {"Mean", "without", "sinks"} & {*line}] == [
        ["Mean"],
        ["without"],
        ["Model", "sinks"],
    ]
    assert "overwriting" in tables_text([BEFORE, AFTER])


def test_without_results_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="probe a model first"):
        write_page([], tmp_path)
