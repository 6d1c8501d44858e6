"""`normalign tables`: RQ1 to RQ4 of the paper, its figures beside ours."""

import json
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from normalign.report.measured import find_results, read_results
from normalign.report.questions import question_tables, questions_json
from normalign.report.terminal import print_blocks


def tables(results: Sequence[Path], *, as_json: bool = False) -> None:
    """Print the tables, or one JSON object, from the result files given and what the pipeline measured here.

    Raises:
        OSError, ValueError: a file is missing or holds no result.
    """
    measured = [*read_results(results), *find_results()]
    if as_json:
        typer.echo(json.dumps(questions_json(measured), indent=2, allow_nan=False))
        return
    print_blocks(Console(), question_tables(measured))
    typer.echo(
        "To measure more: normalign text-norm MODEL... --json, encoder-norm ENCODER... --images DIR --json and "
        "probe MODEL --images DIR --out DIR; give the files to this command."
    )
