"""Stage ``features``: what the frozen vision tower makes of the stage-1 images, once for all variants."""

import json

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from components import stage_main
from components.common import image_root, initial_model, place, timed, use_threads
from normalign.data.images import open_image
from normalign.data.llava import Records
from normalign.files import atomic_directory
from normalign.settings import Profile
from normalign.vlm.generate import pixels_of

BATCH = 8
BYTES_PER_VALUE = 4  # float32


def run(profile: Profile) -> str:
    """Write ``features/index.json`` and, within the disk budget, ``features/features.safetensors`` (image, P, E)."""
    use_threads(profile)
    records = Records(profile.folder / "dataset" / "stage1.jsonl")
    paths = sorted({record.image for record in records if record.image is not None})
    model, processor = initial_model(profile, "baseline")
    place(profile, model)
    tower = model.config.vision_config
    needed = len(paths) * model.config.image_seq_length * tower.hidden_size * BYTES_PER_VALUE
    budget = profile.features.budget_gb * 1e9
    folder = profile.folder / "features"
    with atomic_directory(folder) as temporary, timed("features"):
        if needed <= budget:
            root = image_root(profile, "stage1")
            parts = []
            for start in tqdm(range(0, len(paths), BATCH), desc="features", unit="batch"):
                images = [open_image(path, root, profile.dataset.max_pixels) for path in paths[start : start + BATCH]]
                with torch.no_grad():
                    parts.append(model.model.encode(pixels_of(processor, images).to(model.device)).cpu())
            save_file({"features": torch.cat(parts)}, temporary / "features.safetensors")
        index = {"cached": needed <= budget, "bytes": needed, "images": paths if needed <= budget else []}
        (temporary / "index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if needed > budget:
        return (
            f"features: {needed / 1e9:.1f} GB would pass the budget of {profile.features.budget_gb} GB "
            "(features.budget_gb); the vision tower runs in the loop instead"
        )
    return f"features: {len(paths)} images, {needed / 1e6:.1f} MB"


if __name__ == "__main__":
    stage_main(run)
