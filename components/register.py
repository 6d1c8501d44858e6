"""One MLflow run and one registered model version per variant; the same results are registered once."""

from components import stage_main
from normalign.registry.lookup import already_registered
from normalign.settings import Profile


def run(profile: Profile, *variants: str) -> str:
    """Register each of ``variants``, unless its results already are.

    Raises:
        ValueError: a result is missing, or the registry cannot be used; the message says why.
    """
    if not variants:
        raise ValueError(f"no variant named; valid: {', '.join(profile.variants)}")
    for variant in variants:
        profile.variant(variant)
    known = already_registered(profile, variants)
    if known is not None:
        return "\n".join(known)
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    from normalign.registry.store import open_registry
    from normalign.registry.versions import register

    try:
        client = open_registry(profile.registry)
        return "\n".join(register(client, profile, variant) for variant in variants)
    except (MlflowException, SQLAlchemyError) as error:
        first_line = str(error).partition("\n")[0]  # a statement in SQL may follow
        raise ValueError(f"registry: {first_line}") from error


if __name__ == "__main__":
    stage_main(run)
