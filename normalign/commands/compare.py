"""`normalign compare`: the registered versions of a profile side by side."""

import datetime

from mlflow.entities import Run
from mlflow.entities.model_registry import ModelVersion
from rich import box
from rich.console import Console
from rich.table import Table

from normalign.registry.fingerprint import model_name
from normalign.registry.record import MODIFIED
from normalign.registry.store import open_registry
from normalign.registry.versions import runs_of, versions_of
from normalign.settings import load_profile

COLUMNS = (
    "version",
    "variant",
    "aliases",
    "norm / T",
    "sync gap",
    "visual, %",
    "shuffled, %",
    "text, %",
    "commit",
    "registered",
)


def compare(profile: str | None = None) -> None:
    """Print the registered versions of ``profile`` (default: the one params.yaml picks), oldest first.

    Raises:
        SettingsError: there is no such profile.
    """
    settings = load_profile(profile)
    name = model_name(settings.name)
    client = open_registry(settings.registry)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # piped: one line per version
    versions = versions_of(client, name)
    if not versions:
        console.print(f"Nothing is registered as {name} yet; `make repro` registers what passes its gates.")
        return
    aliases: dict[str, list[str]] = {}
    for alias, version in client.get_registered_model(name).aliases.items():
        aliases.setdefault(str(version), []).append(alias)
    runs = runs_of(client, versions)
    caption = "norm / T and sync gap (first 8 layers) after stage 2; accuracies with matched and shuffled images"
    table = Table(title=name, caption=caption, box=box.SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for version in versions:
        labels = ", ".join(sorted(aliases.get(str(version.version), [])))
        table.add_row(*_row(version, labels, runs[str(version.run_id)]))
    console.print(table)
    console.print(
        f"Load one with mlflow.pyfunc.load_model('models:/{name}@challenger') or by version, "
        f"'models:/{name}/{versions[-1].version}'.",
        markup=False,
        soft_wrap=True,
    )


def _row(version: ModelVersion, aliases: str, run: Run) -> list[str]:
    metrics = run.data.metrics

    def show(key: str, scale: float = 1.0, digits: int = 1) -> str:
        return f"{metrics[key] * scale:.{digits}f}" if key in metrics else "–"

    commit = version.tags.get("git_commit", "–")
    created = datetime.datetime.fromtimestamp(version.creation_timestamp / 1000)
    return [
        str(version.version),
        version.tags.get("variant", "–"),
        aliases,
        show("ratio/stage2", digits=2),
        show("sync_gap_first8/stage2", digits=4),
        f"{show('visual/accuracy', 100)} ± {show('visual/stderr', 100)}",
        show("visual/shuffled_accuracy", 100),
        show("text/accuracy", 100),
        f"{commit[:7]}{MODIFIED if commit.endswith(MODIFIED) else ''}",
        f"{created:%Y-%m-%d %H:%M}",
    ]
