"""`normalign report`: where the page is, and its tables in the terminal."""

import typer
from rich.console import Console
from rich.markdown import Markdown

from normalign.settings import load_profile


def report(profile: str | None = None) -> None:
    """Print the tables of a profile's report (default: the profile in params.yaml) and say where its page is.

    Raises:
        FileNotFoundError: there is no report yet.
    """
    folder = load_profile(profile).folder / "report"
    tables, page = folder / "report.md", folder / "index.html"
    if not tables.is_file():
        raise FileNotFoundError(f"{tables} does not exist; run `make repro` first")
    Console().print(Markdown(tables.read_text(encoding="utf-8")))
    place = page.resolve().as_uri() if page.is_file() else f"not here ({page}: `make repro` brings it)"
    typer.echo(f"Page: {place}")
