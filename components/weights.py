"""Stage ``weights``: fetch the vision tower and the language model as safetensors."""

from components import stage_main
from normalign.files import write_json
from normalign.settings import Profile


def run(profile: Profile) -> str:
    """Write ``weights/vision/``, ``weights/language/`` and their fingerprints, ``weights.json``."""
    from transformers.utils import logging

    from normalign.weights import fetch_language, fetch_vision

    logging.disable_progress_bar()
    folder = profile.folder / "weights"
    prints = {
        "vision": fetch_vision(profile.weights.vision, folder / "vision"),
        "language": fetch_language(profile.weights.language, folder / "language"),
    }
    write_json(profile.folder / "weights.json", prints)
    towers = (f"{name} {p['class']} {p['parameters'] / 1e6:.1f} M {p['dtype']}" for name, p in prints.items())
    return "weights: " + ", ".join(towers)


if __name__ == "__main__":
    stage_main(run)
