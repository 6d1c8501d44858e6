"""Stop the line unless every verdict is good: on the data, or on one variant."""

from pathlib import Path
from typing import Any

from components import stage_main
from normalign.files import read_json, write_json
from normalign.settings import Profile


class GateClosedError(ValueError):
    """At least one expectation does not hold; the message holds every failed one."""


def run(profile: Profile, variant: str | None = None) -> str:
    """Write the gate file if every verdict is good.

    Raises:
        GateClosedError: a verdict is bad; no gate file is left behind.
        ValueError: the verdicts are missing or malformed.
    """
    if variant is None:
        name, source = "data", profile.folder / "check_data.json"
    else:
        profile.variant(variant)
        name, source = variant, profile.results(variant) / "check.json"
    gate = profile.folder / "gates" / f"{name}.json"
    gate.unlink(missing_ok=True)
    verdicts = _read_verdicts(source)
    failed = [verdict for verdict in verdicts if verdict["passed"] is not True]
    if failed:
        lines = "".join(f"\n  {verdict['message']}" for verdict in failed)
        raise GateClosedError(
            f"gate of {name} in profile {profile.name} is closed: "
            f"{len(failed)} of {len(verdicts)} expectations do not hold ({source}){lines}"
        )
    write_json(gate, {"passed": True})  # no more than that: what is behind a gate does not depend on what was judged
    return f"gate of {name} is open: {len(verdicts)} expectations hold"


def _read_verdicts(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise ValueError(f"{path} is missing; run the stage that writes it (`dvc repro`)")
    document = read_json(path)
    verdicts = document.get("verdicts") if isinstance(document, dict) else None
    # An empty list would hold vacuously.
    if not isinstance(verdicts, list) or not verdicts or not all(map(_is_verdict, verdicts)):
        raise ValueError(f"{path}: field 'verdicts' is not a list of verdicts; run the check again")
    return verdicts


def _is_verdict(value: Any) -> bool:
    return isinstance(value, dict) and {"passed", "message"} <= value.keys()


if __name__ == "__main__":
    stage_main(run)
