"""`normalign profile`: which profile of params.yaml the pipeline runs."""

import re
from pathlib import Path

from normalign.files import write_text
from normalign.settings import PARAMS_FILE, load_profile, read_params

_PROFILE_LINE = re.compile(r"^(profile:[ \t]*)([^\s#]+)", re.MULTILINE)


def use(name: str, path: Path = PARAMS_FILE) -> str:
    """Make ``name`` the profile that runs; nothing but the value on the ``profile:`` line of ``path`` changes.

    Returns the name of the profile that ran before.

    Raises:
        SettingsError: no such profile (the message names the nearest one), or its settings are wrong.
        ValueError: ``profile:`` is not one line with a plain value.
    """
    before = str(read_params(path)["profile"])
    load_profile(name, path)
    text, replaced = _PROFILE_LINE.subn(rf"\g<1>{name}", path.read_text(encoding="utf-8"))
    if replaced != 1:
        raise ValueError(f"{path}: expected one line 'profile: NAME' at the left margin, found {replaced}")
    write_text(path, text)
    return before
