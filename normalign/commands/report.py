"""`normalign report`: where the page is, and its tables in the terminal."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from normalign.settings import SettingsError, load_profile


def report(
    profile: Annotated[str | None, typer.Option(help="Profile to show; default: the one in params.yaml.")] = None,
) -> None:
    """Print the report's tables and say where its page is."""
    console = Console()
    try:
        folder = load_profile(profile).folder / "report"
    except SettingsError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    tables, page = folder / "report.md", folder / "index.html"
    if not tables.is_file():
        typer.echo(f"error: {tables} does not exist; run `make repro` first", err=True)
        raise typer.Exit(1)
    console.print(Markdown(tables.read_text(encoding="utf-8")))
    place = page.resolve().as_uri() if page.is_file() else f"not here ({page}: `dvc pull` or `make repro` brings it)"
    typer.echo(f"Page: {place}")
