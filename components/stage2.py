"""Stage ``stage2``: train every module on the instruction data."""

from components import stage_main
from components.common import after_stage1
from components.training import clear_work, run_stage, summary
from normalign.files import atomic_directory
from normalign.settings import Profile
from normalign.vlm.checkpoint import save


def run(profile: Profile, variant: str) -> str:
    """Write the trained model with its processor, and ``stage2.csv``."""
    model, processor = after_stage1(profile, variant)
    trained = run_stage(profile, "stage2", variant, model, processor, cache=None)
    if trained.main:
        with atomic_directory(profile.model_folder(variant, "stage2")) as folder:
            save(model, processor, folder, profile.model.system_prompt, trained.state)
        clear_work(profile, "stage2", variant)
    return summary("stage2", variant, trained)


if __name__ == "__main__":
    stage_main(run)
