"""The console command, also as `python -m normalign`."""

import sys


def main() -> None:
    """Run the command line.

    `text-norm MODEL... [--json]` is answered without Typer, whose import takes longer than the norms of a small model;
    anything else on that command's line (`--help`, a wrong option) is Typer's as ever.
    """
    command, *words = sys.argv[1:] or [""]
    models = [word for word in words if word != "--json"]
    if command == "text-norm" and models and not any(model.startswith("-") for model in models):
        from normalign.commands.text_norm import text_norm

        sys.exit(0 if text_norm(models, as_json="--json" in words) else 1)
    from normalign.cli import app

    app(prog_name="normalign")


if __name__ == "__main__":
    main()
