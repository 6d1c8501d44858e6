"""The model registry (MLflow): what a registered version holds, and how it is found again."""

import os

# Read by MLflow when it is imported, which the modules of this package do.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a dead server is an error, not a pause
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # a tree without git is fine
