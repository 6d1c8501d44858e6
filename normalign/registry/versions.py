"""Finding and creating registered versions; registering the same results twice gives one version."""

import contextlib
import warnings
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import mlflow
import mlflow.pyfunc
from mlflow.entities import Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import MlflowClient

from normalign.registry.fingerprint import CHALLENGER, FINGERPRINT_TAG, fingerprint, model_md5, model_name
from normalign.registry.record import log_record, provenance
from normalign.registry.store import ensure_registered_model, experiment, registry_lock
from normalign.settings import Profile

# Larger weights stay where DVC keeps them: the version then holds their path and md5 instead of a copy.
MAX_COPIED_BYTES = 1 << 30
REQUIREMENTS = ("torch", "transformers", "accelerate", "safetensors", "pillow", "pandas", "mlflow")


def versions_of(client: MlflowClient, name: str) -> list[ModelVersion]:
    """Every version of a registered model, oldest first; none if there is no such model."""
    found: list[ModelVersion] = []
    token = None
    while True:
        page = client.search_model_versions(f"name='{name}'", page_token=token)
        found += page
        token = page.token
        if not token:
            return sorted(found, key=lambda version: int(version.version))


def register(client: MlflowClient, profile: Profile, variant: str) -> str:
    """Register the variant's results unless they are registered already; returns a sentence that says which.

    The version is created last and carries its fingerprint from its first moment: an attempt that was cut
    short leaves a run without a version, and the next attempt removes it.

    Raises:
        ValueError: a result of the variant is missing.
    """
    name = model_name(profile.name)
    mark = fingerprint(profile, variant)
    known = [v for v in versions_of(client, name) if v.tags.get(FINGERPRINT_TAG) == mark]
    if known:
        _move_challenger(client, name)
        return f"{variant}: already registered as version {known[-1].version} of {name}"
    with registry_lock():
        experiment_id = experiment(client, profile)
    _remove_abandoned(client, experiment_id, mark)
    tags = {
        "variant": variant,
        FINGERPRINT_TAG: mark,
        "dvc_md5": model_md5(profile, variant),
        **provenance(profile),
    }
    with mlflow.start_run(experiment_id=experiment_id, run_name=variant, tags=tags) as run:
        log_record(client, run.info.run_id, profile, variant)
        model_id = _log_model(profile, variant, tags)
    with registry_lock():
        ensure_registered_model(client, name)
        created = client.create_model_version(
            name, f"models:/{model_id}", run.info.run_id, tags=tags, model_id=model_id
        )
        _move_challenger(client, name)
    return f"{variant}: registered as version {created.version} of {name}"


def _log_model(profile: Profile, variant: str, tags: dict[str, str]) -> str:
    """Log the stage-2 model to the active run; returns the logged model's id."""
    folder = profile.model_folder(variant, "stage2")
    files = [path for path in folder.rglob("*") if path.is_file()]
    if not files:
        raise ValueError(f"{folder} is missing or empty; run `dvc repro` or `dvc pull`")
    if sum(path.stat().st_size for path in files) > MAX_COPIED_BYTES:
        where = {"dvc_path": folder.as_posix(), "dvc_md5": tags["dvc_md5"]}
        return str(mlflow.create_external_model(name=variant, tags=where).model_id)
    warnings.filterwarnings("ignore", ".*An input example was not provided")
    info = mlflow.pyfunc.log_model(
        name=variant,
        python_model=str(Path(__file__).with_name("pyfunc_model.py")),
        artifacts={"model": str(folder)},
        signature=_signature(),
        # Named, since inferring them would load the model; normalign itself is installed from its source.
        pip_requirements=[f"{package}=={installed_version(package)}" for package in REQUIREMENTS],
    )
    return str(info.model_id)


def _signature() -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema

    image = ColSpec(DataType.string, "image", required=False)
    question = ColSpec(DataType.string, "question")
    return ModelSignature(inputs=Schema([image, question]), outputs=Schema([ColSpec(DataType.string)]))


def _move_challenger(client: MlflowClient, name: str) -> None:
    """Have the alias `challenger` name the newest version."""
    newest = str(versions_of(client, name)[-1].version)  # a number or text, depending on the store
    if str(client.get_registered_model(name).aliases.get(CHALLENGER)) != newest:
        client.set_registered_model_alias(name, CHALLENGER, newest)


def _remove_abandoned(client: MlflowClient, experiment_id: str, mark: str) -> None:
    """Remove the runs of an earlier attempt at the same results, which has no version, with what they stored."""
    for run in client.search_runs([experiment_id], f"tags.{FINGERPRINT_TAG} = '{mark}'"):
        for model in client.search_logged_models([experiment_id], f"source_run_id = '{run.info.run_id}'"):
            _delete_artifacts(model.artifact_location)
            client.delete_logged_model(model.model_id)
        _delete_artifacts(run.info.artifact_uri)
        client.delete_run(run.info.run_id)


def _delete_artifacts(uri: str) -> None:
    # Some stores cannot delete; what stays there is unreachable and `mlflow gc` collects it.
    with contextlib.suppress(NotImplementedError):
        get_artifact_repository(uri).delete_artifacts()


def runs_of(client: MlflowClient, versions: list[ModelVersion]) -> dict[str, Run]:
    """The runs behind ``versions``, by run id."""
    return {str(v.run_id): client.get_run(str(v.run_id)) for v in versions}
