"""`normalign text-norm`: T of several models, read from their embedding tensors alone."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from normalign.embeddings.measure import measure_text_norm
from normalign.embeddings.source import TextEmbedding, find_embedding
from normalign.embeddings.statistics import PERCENTILES

LONG = 1 << 28  # bytes; less is read before a bar could be drawn
NAMES, COLUMN = 16, 7  # width, in characters, that is kept for the models' names and for each further column
DISPENSABLE = ("p1", "p25", "p75", "p99")  # left to --json where the terminal is narrow


def text_norm(models: list[str], *, as_json: bool = False) -> bool:
    """Print T and its statistics for ``models`` as one table, or as one JSON object; whether all could be measured.

    A model that cannot be measured has a row without numbers and a line on stderr that says why (in JSON: ``error``),
    and the others are measured all the same.
    """
    rows = [_row(model) for model in models]
    failed = [row for row in rows if "error" in row]
    if as_json:
        print(json.dumps({"models": rows}, indent=2))
    elif len(failed) < len(rows):
        _print_table(rows)
    for row in failed:
        print(f"error: {row['error']}", file=sys.stderr)
    return not failed


def _row(model: str) -> dict[str, Any]:
    try:
        embedding = find_embedding(model)
    except (ValueError, OSError) as error:
        return {"model": model, "error": str(error)}
    try:
        with _progress(model, embedding) as progress:
            return {"model": model, **measure_text_norm(embedding, progress)}
    except (ValueError, OSError) as error:
        reason = str(error)
        return {"model": model, "error": reason if reason.startswith(model) else f"{model}: {reason}"}


@contextmanager
def _progress(model: str, embedding: TextEmbedding) -> Iterator[Callable[[int], object] | None]:
    """A bar over the bytes read, where reading them takes a while."""
    if embedding.size < LONG and embedding.is_local:
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=embedding.size, unit="B", unit_scale=True, desc=model, leave=False, disable=None) as bar:
        yield bar.update


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = _columns(any(row.get("embedding_scale", 1.0) != 1.0 for row in rows))
    console = Console()
    if console.is_terminal and console.width < NAMES + COLUMN * len(columns):
        columns = {title: cell for title, cell in columns.items() if title not in DISPENSABLE}
    room = COLUMN * len(columns)
    if console.is_terminal:
        console = Console(width=max(console.width, NAMES + room))
    else:  # piped: one line per model
        console = Console(width=max(len(row["model"]) for row in rows) + 2 * room)
    caption = "T: mean L2 norm of the non-zero rows of the text embedding; p: percentiles of the same; D: width"
    table = Table(title="Text embeddings", caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold")
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(Text(row["model"]), *("-" if "error" in row else cell(row) for cell in columns.values()))
    console.print(table)
    console.print(
        "T is the norm that an aligner aims at: `normalign attach MODEL OUT --aligner layernorm` inserts one, "
        "`normalign probe MODEL --images DIR` measures the visual tokens against it.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _columns(scaled: bool) -> dict[str, Callable[[dict[str, Any]], str]]:
    """Title of each column and what fills it; ``scaled``: with those of embeddings that forward scales."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "T": lambda row: _number(row["T"]),
        "std": lambda row: _number(row["std"]),
        "median": lambda row: _number(row["median"]),
        **{f"p{p}": lambda row, p=p: _number(row["percentiles"][str(p)]) for p in PERCENTILES},  # type: ignore[misc]
        "zero\nrows": lambda row: f"{row['zero_rows']}",
        "rows": lambda row: f"{row['rows']}",
        "D": lambda row: f"{row['hidden_size']}",
        "T/√D": lambda row: _number(row["g_init"]),
    }
    if scaled:
        columns["scale in\nforward"] = lambda row: _number(row["embedding_scale"])
        columns["T as\nused"] = lambda row: _number(row["T_as_used"])
    return columns


def _number(value: float) -> str:
    return f"{value:#.4g}"
