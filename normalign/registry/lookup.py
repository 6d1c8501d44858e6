"""Is it registered already? Asked of MLflow's database itself, in milliseconds: importing MLflow takes seconds.

Only a full yes counts. Anything else (another kind of registry, a table that looks different, a version that is not
there or not the newest challenger) is left to MLflow's own client.
"""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from normalign.registry.fingerprint import CHALLENGER, FINGERPRINT_TAG, SQLITE, fingerprint, model_name
from normalign.settings import Profile

_VERSION = """
    SELECT MAX(v.version) FROM model_versions v
    JOIN model_version_tags t ON t.name = v.name AND t.version = v.version
    WHERE v.name = ? AND v.current_stage != 'Deleted_Internal' AND t.key = ? AND t.value = ?
"""
_CHALLENGER_IS_NEWEST = """
    SELECT COUNT(*) FROM registered_model_aliases a WHERE a.name = ? AND a.alias = ? AND a.version =
    (SELECT MAX(v.version) FROM model_versions v WHERE v.name = a.name AND v.current_stage != 'Deleted_Internal')
"""


def already_registered(profile: Profile, variants: tuple[str, ...]) -> list[str] | None:
    """A sentence per variant if every one's present results are registered; None if that is not certain.

    Raises:
        ValueError: a result of a variant is missing.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or profile.registry.tracking_uri
    database = Path(uri.removeprefix(SQLITE))
    if not uri.startswith(SQLITE) or not database.is_file():
        return None
    name = model_name(profile.name)
    lines = []
    try:
        with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            if connection.execute(_CHALLENGER_IS_NEWEST, (name, CHALLENGER)).fetchone() != (1,):
                return None
            for variant in variants:
                mark = fingerprint(profile, variant)
                (version,) = connection.execute(_VERSION, (name, FINGERPRINT_TAG, mark)).fetchone()
                if version is None:
                    return None
                lines.append(f"{variant}: already registered as version {version} of {name}")
    except sqlite3.Error:
        return None
    return lines
