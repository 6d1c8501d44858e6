"""`normalign text-norm`: T of several models, read from their embedding tensors alone."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from normalign.embeddings.measure import measure_text_norm
from normalign.embeddings.source import TextEmbedding, find_embedding

LONG = 1 << 28  # bytes; less is read before a bar could be drawn
NUMBERS, SCALED = 98, 18  # columns of text that the numbers take, and those of scaled embeddings on top
PERCENTILES = ("1", "5", "25", "75", "95", "99")


def text_norm(models: list[str], *, as_json: bool = False) -> bool:
    """Print T and its statistics for ``models`` as one table, or as one JSON object; whether all could be measured.

    A model that cannot be measured has a row that says why, and the others are measured all the same.
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

    console = Console()
    names = 24 if console.is_terminal else max(len(row["model"]) for row in rows)  # piped: one line per model
    scaled = any(row.get("embedding_scale", 1.0) != 1.0 for row in rows)
    console = Console(width=max(console.width, names + NUMBERS + SCALED * scaled))
    caption = "T: mean L2 norm of the non-zero rows of the text embedding; p: percentiles of the same; D: width"
    if scaled:
        caption += "; as used: after the scaling of embeddings in forward"
    table = Table(title="Text embeddings", caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold")
    for name in _columns(scaled):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if "error" in row:
            table.add_row(Text(f"{row['model']}: not measured, see below"))
        else:
            table.add_row(Text(row["model"]), *_cells(row, scaled))
    console.print(table)
    console.print(
        "T is the norm that an aligner aims at: `normalign attach MODEL OUT --aligner layernorm` inserts one, "
        "`normalign probe MODEL --images DIR` measures the visual tokens against it.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _columns(scaled: bool) -> list[str]:
    columns = ["T", "std", "median", *(f"p{p}" for p in PERCENTILES), "zero rows", "rows", "D", "T/√D"]
    return [*columns, "scale", "T as used"] if scaled else columns


def _cells(row: dict[str, Any], scaled: bool) -> list[str]:
    values = [row["T"], row["std"], row["median"], *(row["percentiles"][p] for p in PERCENTILES)]
    cells = [_number(value) for value in values]
    cells += [f"{row['zero_rows']}", f"{row['rows']}", f"{row['hidden_size']}", _number(row["g_init"])]
    return [*cells, _number(row["embedding_scale"]), _number(row["T_as_used"])] if scaled else cells


def _number(value: float) -> str:
    return f"{value:#.4g}"
