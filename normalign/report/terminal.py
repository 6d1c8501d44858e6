"""Blocks of a report in the terminal."""

import textwrap
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
            if block.note:
                console.print(block.note, style="dim", markup=False, highlight=False)
            console.print()
            continue
        for paragraph in block.paragraphs:
            console.print(("- " if block.bullets else "") + paragraph, markup=False, highlight=False)
        console.print()


def rich_table(table: Table) -> RichTable:
    """A table of a report for the terminal, without its note: rows to mark in bold, wide cells folded."""
    shown = RichTable(
        title=RichText(table.title),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
    )
    for index, letter in enumerate(table.align):
        side: Literal["left", "right"] = "right" if letter == "r" else "left"
        header = _header(table.columns[index], [row[index] for row in table.rows])
        shown.add_column(RichText(header), justify=side, overflow="fold")
    for index, row in enumerate(table.rows):
        shown.add_row(*(RichText(cell) for cell in row), style="bold" if index in table.failed else None)
    return shown


def _header(column: str, cells: Sequence[str]) -> str:
    """A column's name, on as many lines as it takes to be no wider than its cells or its longest word."""
    width = max([1, *map(len, column.split()), *map(len, cells)])
    return textwrap.fill(column, width)
