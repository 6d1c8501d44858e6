"""Stage ``probe``: layer statistics at initialisation, after stage 1 and after stage 2."""

import base64
import csv
import io
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm
from transformers import LlavaProcessor

from components import stage_main
from components.common import after_stage1, image_root, initial_model, place, spread, timed, use_threads
from normalign.data.images import open_image
from normalign.data.llava import Records
from normalign.data.synthetic import load_benchmark
from normalign.data.tasks import is_local
from normalign.diagnosis.attention import AttentionStatistics, LastLook
from normalign.diagnosis.capture import layer_parts, watch_attention, watch_layers
from normalign.diagnosis.layers import LayerStatistics, Masks
from normalign.files import read_json, write_json, write_text
from normalign.metrics import rounded
from normalign.norms.aligner import GlobalScaleAligner
from normalign.norms.statistics import language_sinks, summarise_norms, vision_sinks
from normalign.settings import Profile
from normalign.vlm.checkpoint import chat_format, load
from normalign.vlm.generate import answer, pixels_of
from normalign.vlm.model import NormalignForConditionalGeneration

POINTS = ("init", "stage1", "stage2")


@dataclass(frozen=True)
class Sample:
    """A question about an image with its right answer, as the probe sends it through the model."""

    task: str
    id: str
    path: str
    question: str
    answer: str
    image: Image.Image


def run(profile: Profile, variant: str) -> str:
    """Write ``probe.json``, ``layers.csv`` and the attention maps."""
    use_threads(profile)
    samples = _samples(profile)
    points: dict[str, Any] = {}
    for point in POINTS:
        with timed(f"probe-{variant}-{point}"):
            model, processor = _model(profile, variant, point)
            place(profile, model)
            points[point] = _Probe(model, processor, read_json(profile.folder / "text_norm.json")["T"]).run(
                samples, f"probe {variant} {point}"
            )
    maps = _attention_maps(model, processor, samples, profile.probe.attention_items)
    counts = points["init"].pop("counts")
    for point in POINTS[1:]:
        points[point].pop("counts")
    write_json(profile.results(variant) / "probe.json", rounded({"points": points, **counts}))
    write_text(profile.results(variant) / "layers.csv", _layers_csv(points))
    write_json(profile.folder / "attention" / f"{variant}.json", maps)
    first, last = points["init"], points["stage2"]
    return (
        f"probe {variant}: visual norm / T {first['ratio']:.2f} → {last['ratio']:.2f}, first-8 sync gap "
        f"{first['sync_gap']['first8']:.3f} → {last['sync_gap']['first8']:.3f}"
    )


def _model(profile: Profile, variant: str, point: str) -> tuple[NormalignForConditionalGeneration, LlavaProcessor]:
    if point == "init":
        model, processor = initial_model(profile, variant)
    elif point == "stage1":
        model, processor = after_stage1(profile, variant)
    else:
        return load(profile.model_folder(variant, "stage2"))
    model.config.update({"normalign_system_prompt": profile.model.system_prompt})
    return model, processor


def _samples(profile: Profile) -> list[Sample]:
    """Questions with images, evenly from the data set's own visual benchmarks, or else from its stage-2 records."""
    dataset = profile.folder / "dataset"
    local = [task for task in profile.evaluate.visual_tasks if is_local(dataset, task)]
    if not local:
        return _record_samples(profile)
    per_task = -(-profile.probe.samples // len(local))
    return [
        Sample(
            task, item.id, item.image, item.question, item.choices[item.answer], open_image(item.image, dataset, cap)
        )
        for cap in [profile.dataset.max_pixels]
        for task in local
        for item in spread(load_benchmark(dataset / "benchmarks" / f"{task}.jsonl"), per_task)
        if item.image is not None
    ]


def _record_samples(profile: Profile) -> list[Sample]:
    records = Records(profile.folder / "dataset" / "stage2.jsonl")
    having = [index for index, record in enumerate(records) if record.image is not None]
    root = image_root(profile, "stage2")
    return [
        Sample(
            "instruction",
            record.id,
            record.image,
            record.turns[0].question,
            record.turns[0].answer,
            open_image(record.image, root, profile.dataset.max_pixels),
        )
        for record in (records[index] for index in spread(having, profile.probe.samples))
        if record.image is not None
    ]


class _Probe:
    def __init__(self, model: NormalignForConditionalGeneration, processor: LlavaProcessor, text_norm: float) -> None:
        self.model, self.processor, self.text_norm = model, processor, text_norm
        self.chat = chat_format(model, processor)
        # Attention weights exist only in the plain implementation.
        model.model.language_model.set_attn_implementation("eager")

    @torch.no_grad()
    def run(self, samples: list[Sample], description: str) -> dict[str, Any]:
        """The statistics of one point of training."""
        model = self.model.model
        self._calibrate(samples)
        layers = model.language_model.layers
        parts = layer_parts(layers)
        statistics = LayerStatistics(len(layers), model.config.text_config.hidden_size)
        attention = AttentionStatistics(len(layers))
        interface: dict[str, list[Tensor]] = {
            name: [] for name in ("vision_output", "projector_output", "aligner_output", "text_embeddings")
        }
        for sample in tqdm(samples, desc=description, unit="sample"):
            ids, visual = self._inputs(sample)
            features = model.encode(pixels_of(self.processor, [sample.image]).to(self.model.device))
            caught: list[Tensor] = []
            handle = model.multi_modal_projector.aligner.register_forward_hook(
                lambda _m, inputs, output, caught=caught: caught.extend([inputs[0], output])
            )
            embeddings = model.embed(ids, model.project(features))
            handle.remove()
            for name, tokens in zip(interface, (features, *caught, embeddings[~visual]), strict=True):
                interface[name].append(tokens.float().norm(dim=-1).flatten().cpu())
            masks = Masks(visual, ~visual)
            with (
                watch_layers(parts, partial(statistics.add, masks=masks)),
                watch_attention(layers, partial(attention.add, masks=masks)),
            ):
                model.language_model(inputs_embeds=embeddings, use_cache=False)
        return self._result(statistics, interface, attention, len(samples))

    def _inputs(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Ids (1, L) of the question followed by its right answer, and which positions are visual."""
        shared, own = self.chat.prompt(sample.question, has_image=True)
        ids = torch.tensor([shared + own + self.chat.option(sample.question, sample.answer, has_image=True)])
        ids = ids.to(self.model.device)
        return ids, ids.eq(self.chat.image_token_id)

    def _calibrate(self, samples: list[Sample]) -> None:
        """global_scale stores its norm in training; before any, the probe's own images stand in."""
        projector = self.model.model.multi_modal_projector
        if isinstance(projector.aligner, GlobalScaleAligner) and projector.aligner.running_norm == 0:
            features = self.model.model.encode(
                pixels_of(self.processor, [s.image for s in samples]).to(self.model.device)
            )
            projector.aligner.calibrate(projector.linear_2(projector.act(projector.linear_1(features))))

    def _result(
        self,
        statistics: LayerStatistics,
        interface: dict[str, list[Tensor]],
        attention: AttentionStatistics,
        count: int,
    ) -> dict[str, Any]:
        norms = {name: torch.cat(parts) for name, parts in interface.items()}
        summaries = {
            name: summarise_norms(n, vision_sinks(n) if name == "vision_output" else language_sinks(n))
            for name, n in norms.items()
        }
        visual, text = norms["aligner_output"].double().mean().item(), norms["text_embeddings"].double().mean().item()
        return {
            "interface": summaries,
            "ratio": visual / self.text_norm,
            "k_in_context": visual / text,
            **statistics.summary(),
            "attention": attention.summary(),
            "counts": {
                "T": self.text_norm,
                "samples": count,
                "visual_tokens": len(norms["aligner_output"]),
                "text_tokens": len(norms["text_embeddings"]),
            },
        }


@torch.no_grad()
def _attention_maps(
    model: NormalignForConditionalGeneration, processor: LlavaProcessor, samples: list[Sample], per_task: int
) -> list[dict[str, Any]]:
    """Where the position that answers looks, in the layer whose text looks at the image most."""
    chat = chat_format(model, processor)
    grid = round(model.config.image_seq_length**0.5)
    maps = []
    for task in dict.fromkeys(sample.task for sample in samples):
        for sample in [s for s in samples if s.task == task][:per_task]:
            shared, own = chat.prompt(sample.question, has_image=True)
            ids = torch.tensor([shared + own], device=model.device)
            visual = ids.eq(chat.image_token_id)[0]
            features = model.model.encode(pixels_of(processor, [sample.image]).to(model.device))
            embeddings = model.model.embed(ids, model.model.project(features))
            look = LastLook()

            def take(layer: int, weights_BHLL: Tensor, look: LastLook = look, visual: Tensor = visual) -> None:
                look.add(layer, weights_BHLL[0], visual, ~visual)

            with watch_attention(model.model.language_model.layers, take):
                model.model.language_model(inputs_embeds=embeddings, use_cache=False)
            maps.append(
                {
                    "id": sample.id,
                    "task": task,
                    "image": sample.path,
                    "image_png_base64": _png(sample.image),
                    "question": sample.question,
                    "answer": sample.answer,
                    "prediction": answer(model, processor, sample.image, sample.question),
                    "grid": [grid, grid],
                    "layer": look.layer,
                    "map": look.map((grid, grid)),
                }
            )
    return maps


def _png(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _layers_csv(points: dict[str, Any]) -> str:
    """A long table for ``dvc plots``."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["point", "modality", "layer", "norm_median", "cosine", "relative_update"])
    for name, point in points.items():
        for modality, layers in point["layers"].items():
            for layer, cosine in enumerate(layers["cosine"]):
                row = [layers["norm_median"][layer], cosine, layers["relative_update"][layer]]
                writer.writerow([name, modality, layer, *rounded(row)])
    return buffer.getvalue()


if __name__ == "__main__":
    stage_main(run)
