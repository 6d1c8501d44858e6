"""What a page is made of, and how it reads as Markdown; the page template renders the same as HTML."""

from collections.abc import Sequence
from dataclasses import dataclass

MISSING = "–"
NOT_AVAILABLE = "not available"


@dataclass(frozen=True)
class Text:
    """Paragraphs, or a list with ``bullets``."""

    paragraphs: Sequence[str]
    bullets: bool = False
    kind: str = "text"


@dataclass(frozen=True)
class Table:
    """A table of ready-made cells. ``align``: a letter (l, r) per column; ``failed``: rows to mark."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str
    note: str = ""
    failed: frozenset[int] = frozenset()
    kind: str = "table"

    def __post_init__(self) -> None:
        widths = {len(row) for row in self.rows} | {len(self.columns), len(self.align)}
        if len(widths) != 1:
            raise ValueError(f"table {self.title!r}: rows, columns and align differ in length: {sorted(widths)}")


@dataclass(frozen=True)
class Chart:
    """An SVG element of our own making, inserted as it is; screen readers get title and caption."""

    title: str
    svg: str
    caption: str
    kind: str = "chart"


@dataclass(frozen=True)
class MapPanel:
    """One variant's attention map over an image; ``overlay``: a small PNG as data URI, None if missing."""

    variant: str
    overlay: str | None
    caption: str
    prediction: str


@dataclass(frozen=True)
class MapItem:
    """One item: the image once (a data URI, pixels wide and high) and a panel per model.

    Task, answer and a panel's prediction are empty where the item is no benchmark's.
    """

    anchor: str
    task: str
    question: str
    answer: str
    image: str
    width: int
    height: int
    panels: Sequence[MapPanel]


@dataclass(frozen=True)
class Gallery:
    """Attention maps, an item a row."""

    items: Sequence[MapItem]
    kind: str = "gallery"


@dataclass(frozen=True)
class Section:
    anchor: str
    title: str
    blocks: Sequence[Text | Table | Chart | Gallery]


def number(value: float | None, signed: bool = False) -> str:
    """``value`` with about three significant digits, without exponents where a reader can avoid them."""
    if value is None or value != value:
        return MISSING
    if value == 0:
        return "0"
    size = abs(value)
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    sign = "+" if signed else ""
    if 0 < size < 0.001:
        return _minus(f"{value:{sign}.1e}")
    return _minus(f"{value:{sign},.{decimals}f}")


def percent(share: float | None, signed: bool = False) -> str:
    """A share 0..1 in per cent with one decimal, without the sign %."""
    if share is None:
        return MISSING
    return _minus(f"{100 * share + 0.0:{'+' if signed else ''}.1f}")


def interval(low: float | None, high: float | None) -> str:
    """Two shares as percentage points."""
    return MISSING if low is None or high is None else f"{percent(low, True)} to {percent(high, True)}"


def p_text(p_value: float) -> str:
    """ "= 0.12", or "< 0.001"."""
    return "< 0.001" if p_value < 0.001 else f"= {p_value:.3f}"


def markdown_section(section: Section) -> str:
    """The section as Markdown; charts and maps are left to the page."""
    parts = [f"## {section.title}"]
    for block in section.blocks:
        if isinstance(block, Text):
            lines = [("- " if block.bullets else "") + _escape(paragraph) for paragraph in block.paragraphs]
            parts.append(("\n" if block.bullets else "\n\n").join(lines))
        elif isinstance(block, Table):
            parts.append(_markdown_table(block))
    if len(parts) == 1:
        parts.append("On the page only.")
    return "\n\n".join(parts)


def _markdown_table(table: Table) -> str:
    rule = ["---:" if letter == "r" else ":---" for letter in table.align]
    lines = [f"### {_escape(table.title)}", ""]
    for row in (table.columns, rule, *table.rows):
        lines.append("| " + " | ".join(cell if row is rule else _escape(cell) for cell in row) + " |")
    if table.note:
        lines += ["", _escape(table.note)]
    return "\n".join(lines)


def _escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line: no HTML, no stray table cells or emphasis."""
    text = " ".join(text.split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for character in ("\\", "|", "*", "_", "`", "["):
        text = text.replace(character, "\\" + character)
    return text


def _minus(text: str) -> str:
    """A true minus sign; a rounded zero has no sign."""
    body = text.lstrip("+-")
    if not body.strip("0.,"):
        return body
    return text.replace("-", "−", 1) if text.startswith("-") else text
