import pytest

from normalign.report.blocks import MISSING, Section, Table, Text, interval, markdown_section, number, percent


@pytest.mark.parametrize(
    ("value", "text"),
    [(25102.4, "25,102"), (47.51, "47.5"), (3.2022, "3.20"), (0.1334, "0.133"), (0, "0"), (-0.5, "−0.500")],
)
def test_numbers_have_about_three_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_unknown_values_are_a_dash() -> None:
    assert {number(None), number(float("nan")), percent(None), interval(None, 0.1)} == {MISSING}


def test_shares_are_shown_as_signed_points_and_a_rounded_zero_has_no_sign() -> None:
    assert interval(-0.0123, 0.045) == "−1.2 to +4.5"
    assert percent(-0.0001, signed=True) == "0.0"


def test_a_table_whose_rows_do_not_fit_its_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Table("t", ["a", "b"], [["1"]], "ll")


def test_markdown_escapes_what_would_break_a_table_or_become_html() -> None:
    table = Table("T", ["a"], [["<b>x|y</b>\nz"]], "l")
    text = markdown_section(Section("s", "S", [Text(["one", "two"], bullets=True), table]))
    assert text == "## S\n\n- one\n- two\n\n### T\n\n| a |\n| :--- |\n| &lt;b&gt;x\\|y&lt;/b&gt; z |"
