"""Blocks of a report in the terminal."""

from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from normalign.report.blocks import Table, Text


def print_blocks(console: Console, blocks: Sequence[Text | Table]) -> None:
    """Print texts and tables one below the other; what looks like markup is shown as it is."""
    for block in blocks:
        if isinstance(block, Table):
            console.print(rich_table(block))
            console.print()
            continue
        for paragraph in block.paragraphs:
            console.print(("- " if block.bullets else "") + paragraph, markup=False, highlight=False)
        console.print()


def rich_table(table: Table) -> RichTable:
    """A table of a report for the terminal: rows to mark in bold, wide cells folded."""
    shown = RichTable(
        title=RichText(table.title),
        caption=RichText(table.note) if table.note else None,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    for column, letter in zip(table.columns, table.align, strict=True):
        side: Literal["left", "right"] = "right" if letter == "r" else "left"
        shown.add_column(RichText(column), justify=side, overflow="fold")
    for index, row in enumerate(table.rows):
        shown.add_row(*(RichText(cell) for cell in row), style="bold" if index in table.failed else None)
    return shown
