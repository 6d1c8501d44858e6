"""The headline figures that dvc metrics, the registry and the closing table share."""

import pytest

from normalign.files import read_json, write_json
from normalign.headline import headline
from tests.components.conftest import Results


def test_text_accuracy_weighs_tasks_by_their_items(results: Results) -> None:
    path = results.profile.results("norm") / "evaluation.json"
    evaluation = read_json(path)
    for name, items, accuracy in (("text", 100, 0.5), ("more", 300, 0.9)):
        evaluation["tasks"][name] = {"kind": "text", "items": items, "accuracy": accuracy, "stderr": 0.01}
    write_json(path, evaluation)
    assert headline(results.profile, "norm")["text/accuracy"] == pytest.approx((100 * 0.5 + 300 * 0.9) / 400)


def test_a_figure_that_was_not_finite_is_left_out(results: Results) -> None:
    path = results.profile.results("norm") / "probe.json"
    probe = read_json(path)
    probe["points"]["stage2"]["ratio"] = None
    write_json(path, probe)
    figures = headline(results.profile, "norm")
    assert "ratio/stage2" not in figures and "ratio/stage1" in figures
