"""Opening the registry, and the names in it."""

import logging
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import mlflow
from alembic.util.exc import CommandError
from filelock import FileLock
from mlflow.entities import LifecycleStage
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, ErrorCode
from mlflow.tracking import MlflowClient
from sqlalchemy.exc import SQLAlchemyError

from normalign.registry.fingerprint import SQLITE, model_name
from normalign.settings import Profile, RegistrySettings

LOCK_FILE = Path("state/registry.lock")


def registry_lock() -> FileLock:
    """A lock between the processes of this checkout that write to the registry; register stages run two at a time."""
    LOCK_FILE.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(LOCK_FILE)


def open_registry(registry: RegistrySettings) -> MlflowClient:
    """A client of the registry that ``MLFLOW_TRACKING_URI`` or else ``registry`` names; a new database is set up.

    Raises:
        ValueError: the database cannot be opened, or is not this MLflow's.
        MlflowException: the registry refuses.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or registry.tracking_uri
    for name in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if uri.startswith(SQLITE):
        # Absolute, since MLflow keeps one open database per address and process, wherever that process stands.
        database = Path(uri.removeprefix(SQLITE)).resolve()
        database.parent.mkdir(parents=True, exist_ok=True)
        uri = f"{SQLITE}{database}"
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    # Opening a fresh database creates its tables; two processes that do so at once both fail.
    with registry_lock():
        try:
            if uri.startswith(SQLITE):
                _try_sqlite(Path(uri.removeprefix(SQLITE)))
            client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            client.search_registered_models(max_results=1)  # the registry is opened by its first query
        except (sqlite3.Error, SQLAlchemyError, CommandError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"registry: {uri} is not a database of this MLflow, or cannot be opened ({reason}); "
                "move it away or set registry.tracking_uri"
            ) from error
    return client


def _try_sqlite(database: Path) -> None:
    """Fail at once where MLflow would try again for minutes."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA schema_version")


def experiment(client: MlflowClient, profile: Profile) -> str:
    """Id of the profile's experiment, created or restored if need be; the caller holds the registry lock."""
    name = model_name(profile.name)
    found = client.get_experiment_by_name(name)
    if found is not None:
        if found.lifecycle_stage == LifecycleStage.DELETED:
            client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)
    # Without a location of its own, a local database puts artifacts under whatever folder is the current one.
    served = str(mlflow.get_tracking_uri()).startswith("http")  # then the server decides
    location = None if served else Path(profile.registry.artifacts).resolve().as_uri()
    return str(client.create_experiment(name, artifact_location=location))


def ensure_registered_model(client: MlflowClient, name: str) -> None:
    """Create the registered model unless it exists."""
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != ErrorCode.Name(RESOURCE_ALREADY_EXISTS):
            raise
