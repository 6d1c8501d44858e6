"""Stage ``stage1``: train projector and aligner in front of a frozen language model."""

from safetensors.torch import save_file

from components import stage_main
from components.common import initial_model
from components.training import FeatureCache, clear_work, run_stage, summary
from normalign.files import atomic_directory
from normalign.settings import Profile


def run(profile: Profile, variant: str) -> str:
    """Write the trained projector and aligner, and ``stage1.csv``."""
    model, processor = initial_model(profile, variant)
    cache = FeatureCache(profile.folder / "features")
    trained = run_stage(profile, "stage1", variant, model, processor, cache)
    if trained.main:
        prefix = "model.multi_modal_projector."
        state = {name.removeprefix(prefix): v for name, v in trained.state.items() if name.startswith(prefix)}
        with atomic_directory(profile.model_folder(variant, "stage1")) as folder:
            save_file(state, folder / "projector.safetensors")
        clear_work(profile, "stage1", variant)
    return summary("stage1", variant, trained)


if __name__ == "__main__":
    stage_main(run)
