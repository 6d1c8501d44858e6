"""Stage ``encoder_norm``: norms of the vision tower's tokens, layer by layer, and at the layer the projector reads."""

import torch
from tqdm import tqdm

from components import stage_main
from components.common import image_root, initial_model, place, spread, use_threads
from normalign.data.images import open_image
from normalign.data.llava import Records
from normalign.diagnosis.encoder import EncoderNorms
from normalign.files import read_json, write_json
from normalign.metrics import rounded
from normalign.norms.statistics import summarise_norms, vision_sinks
from normalign.settings import Profile
from normalign.vlm.generate import pixels_of

BATCH = 8


def run(profile: Profile) -> str:
    """Write ``encoder_norm.json``."""
    use_threads(profile)
    model, processor = initial_model(profile, "baseline")
    place(profile, model)
    records = Records(profile.folder / "dataset" / "stage1.jsonl")
    paths = spread(sorted({r.image for r in records if r.image is not None}), profile.encoder_norm.images)
    root = image_root(profile, "stage1")
    norms = EncoderNorms(model.model.vision_tower)
    selected = []
    for start in tqdm(range(0, len(paths), BATCH), desc="encoder_norm", unit="batch"):
        images = [open_image(path, root, profile.dataset.max_pixels) for path in paths[start : start + BATCH]]
        pixels = pixels_of(processor, images).to(model.device)
        norms.add(lambda pixels=pixels: selected.append(model.model.encode(pixels)))  # type: ignore[misc]
    features = torch.cat(selected)
    token_norms = features.norm(dim=-1).flatten().cpu()
    chosen = summarise_norms(token_norms, vision_sinks(token_norms))
    text = read_json(profile.folder / "text_norm.json")["T"]
    grid = round(features.shape[1] ** 0.5)
    result = {
        "images": len(paths),
        "tokens_per_image": features.shape[1],
        "grid": [grid, grid],
        "feature_layer": profile.model.feature_layer,
        "feature_norm": profile.model.feature_norm,
        "selected": chosen,
        "ratio_to_T": chosen["mean"] / text,
        **norms.summary(),
    }
    write_json(profile.folder / "encoder_norm.json", rounded(result))
    return (
        f"encoder_norm: layer {profile.model.feature_layer}, final norm "
        f"{'applied' if profile.model.feature_norm else 'not applied'}: mean {chosen['mean']:.2f}, "
        f"{chosen['mean'] / text:.1f} x T, {chosen['sinks']['count']} sink tokens of {chosen['tokens']}"
    )


if __name__ == "__main__":
    stage_main(run)
