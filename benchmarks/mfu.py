"""Model FLOPs utilisation of stage 2: the whole model trains, with random weights of a profile's dimensions.

Needs neither data nor weights, and torch, transformers and accelerate alone. Operations are those of `normalign plan`:
6 per parameter and token, 2 and 4 per term of attention, logits at supervised positions only; nothing that is computed
again counts. So the figure is comparable with what others call MFU, without the logits nobody needs.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoConfig

from benchmarks.training import precision
from normalign.plan.architecture import language_model, vision_tower
from normalign.plan.compute import training_flops
from normalign.plan.estimate import PEAK_TFLOPS
from normalign.plan.memory import Model
from normalign.plan.parts import counts
from normalign.plan.sources import published
from normalign.plan.workload import Workload
from normalign.settings import Profile, load_profile
from normalign.training.loop import Samples, train
from normalign.training.options import TrainingOptions
from normalign.vlm.chat import IGNORE, Encoded
from normalign.vlm.forward import Visual
from normalign.vlm.model import NormalignConfig, NormalignForConditionalGeneration, grid_of

WARM_UP = 3  # steps whose time does not count


def dimensions(profile: Profile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Published configurations of a profile's vision tower and language model, every token having its embedding."""
    vision = published()["vision"][profile.weights.vision.source]
    language = dict(published()["language"][profile.weights.language.source])
    language["vocab_size"] = max(language["vocab_size"], language.pop("tokens"))
    return vision, language


def random_model(profile: Profile) -> NormalignForConditionalGeneration:
    """The profile's model with random weights, made on the GPU where there is one."""
    vision, language = dimensions(profile)
    config = NormalignConfig(
        vision_config=AutoConfig.for_model(**vision).to_dict(),
        text_config=AutoConfig.for_model(**language).to_dict(),
        image_token_index=language["vocab_size"] - 1,
        vision_feature_layer=profile.model.feature_layer,
        vision_feature_select_strategy="full",
        feature_norm=profile.model.feature_norm,
        aligner={"aligner": "layernorm", "gwc": True},
    )
    config.image_seq_length = grid_of(config, profile.model.image_size) ** 2
    config.tie_word_embeddings = bool(language["tie_word_embeddings"])
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = NormalignForConditionalGeneration(config)
    model.model.language_model.set_attn_implementation("sdpa" if cuda else "eager")
    return model


def random_samples(config: NormalignConfig, text_tokens: int) -> Callable[[int], Encoded]:
    """What makes the sample of an index: an image and random text, the second half of it supervised."""
    generator = torch.Generator().manual_seed(0)

    def encode(index: int) -> Encoded:
        text = torch.randint(5, config.image_token_index, (text_tokens,), generator=generator).tolist()
        sample = Encoded(str(index), image="random")
        ids = [config.image_token_index] * config.image_seq_length + text
        silent = len(ids) - text_tokens // 2
        sample.add(ids, [IGNORE] * silent + ids[silent:])
        return sample

    return encode


def step_seconds(
    model: NormalignForConditionalGeneration, profile: Profile, options: TrainingOptions, **sizes: int
) -> float:
    """Median seconds of a step of the training loop; ``sizes``: ``text_tokens`` and ``steps``."""
    batch, size = options.micro_batch, profile.model.image_size
    pixels = torch.randn(batch, 3, size, size, device=model.device)
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as work:
        train(
            model,
            Samples(
                batch * sizes["steps"],
                random_samples(model.config, sizes["text_tokens"]),
                lambda _: Visual(pixels=pixels),
            ),
            options,
            accelerator=Accelerator(
                cpu=model.device.type == "cpu", mixed_precision="bf16" if precision() == "bf16" else "no"
            ),
            pad_id=0,
            work=Path(work),
            description="mfu",
            watch=lambda _: ends.append(time.perf_counter()),
        )
    return statistics.median(b - a for a, b in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False))


def operations(profile: Profile, options: TrainingOptions, visual: int, text_tokens: int) -> float:
    """Operations of one step, by the rules of `normalign plan`."""
    vision, language = dimensions(profile)
    towers = vision_tower(vision, "published"), language_model(language, "published", language["vocab_size"])
    shape = Model(*towers, profile.model, counts(*towers, profile.model, options))
    batch = options.micro_batch
    step = Workload(batch, visual, text_tokens, text_tokens // 2, 1, batch, batch, 1)
    return training_flops(shape, step, cached=False).total


def utilisation(
    name: str, *, micro_batch: int, text_tokens: int, steps: int, threads: int, recompute: bool
) -> dict[str, Any]:
    """Train ``steps`` steps of ``micro_batch`` samples with one image and ``text_tokens`` tokens each; median step."""
    torch.set_num_threads(threads)
    profile = load_profile(name)
    options = replace(
        profile.stage2, global_batch=micro_batch, micro_batch=micro_batch, pack=False, gradient_checkpointing=recompute
    )
    model = random_model(profile)
    visual = model.config.image_seq_length
    seconds = step_seconds(model, profile, options, text_tokens=text_tokens, steps=steps)
    done, tokens = operations(profile, options, visual, text_tokens), micro_batch * (visual + text_tokens)
    cuda = model.device.type == "cuda"
    peak = PEAK_TFLOPS["cuda"] if cuda else PEAK_TFLOPS["cpu"] * threads
    return {
        "profile": name,
        "device": torch.cuda.get_device_name() if cuda else f"cpu, {threads} threads",
        "precision": precision(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "visual_tokens": visual,
        "tokens_per_step": tokens,
        "tflop_per_step": done / 1e12,
        "seconds_per_step": seconds,
        "tokens_per_second": tokens / seconds,
        "peak_tflops": peak,
        "mfu": done / seconds / (peak * 1e12),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
    }
