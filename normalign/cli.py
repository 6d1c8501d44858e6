"""The `normalign` command. Each command imports what it needs when it is called, so that `--help` is quick."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

app = typer.Typer(name="normalign", no_args_is_help=True, add_completion=False, help=__doc__.splitlines()[0])
profile_app = typer.Typer(no_args_is_help=True, help="Which profile of params.yaml the pipeline runs.")
app.add_typer(profile_app, name="profile")
_PROFILE = typer.Option(None, help="Profile to show; default: the one in params.yaml.")


@contextmanager
def _told() -> Iterator[None]:
    """Print an error that a person can mend as one line, without a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


@profile_app.command("use")
def profile_use(name: str = typer.Argument(help="A profile of params.yaml.")) -> None:
    """Make NAME the profile that `make repro` runs."""
    from normalign.commands import profile

    with _told():
        before = profile.use(name)
    typer.echo(f"params.yaml: profile {before} -> {name}")


@app.command()
def report(profile: str | None = _PROFILE) -> None:
    """Print the report's tables and say where its page is."""
    from normalign.commands.report import report

    with _told():
        report(profile)


@app.command()
def compare(profile: str | None = _PROFILE) -> None:
    """Print the registered versions of a profile side by side."""
    from normalign.commands.compare import compare

    with _told():
        compare(profile)
