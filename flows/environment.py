"""What every process of a run finds in its environment: quiet tools whose state stays inside the project."""

import os
import sys
from configparser import ConfigParser
from pathlib import Path

STATE = Path("state")
LOGS = STATE / "logs"


def prepare(root: Path) -> None:
    """Enter ``root``, the folder of dvc.yaml, and set the environment that DVC, the stages and Prefect inherit."""
    os.chdir(root)
    LOGS.mkdir(parents=True, exist_ok=True)
    state = STATE.resolve()
    os.environ.update(
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        PYTHONUNBUFFERED="1",  # a stage's lines are shown as they are written
        SHELL="/bin/sh",  # DVC starts stages through it
        DVC_SITE_CACHE_DIR=str(state / "dvc"),
        DVC_NO_ANALYTICS="1",
        MLFLOW_DISABLE_TELEMETRY="true",
        GX_ANALYTICS_ENABLED="false",
        PREFECT_HOME=str(state / "prefect"),
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS="120",
    )
    if not any((folder / ".git").exists() for folder in [Path.cwd(), *Path.cwd().parents]):
        _work_without_git()


def _work_without_git() -> None:
    """DVC refuses a tree without git history unless its untracked configuration says that this is meant."""
    local = Path(".dvc/config.local")
    settings = ConfigParser()
    settings.read(local, encoding="utf-8")
    settings.read_dict({"core": {"no_scm": "true"}})
    local.parent.mkdir(exist_ok=True)
    with local.open("w", encoding="utf-8") as handle:
        settings.write(handle)
