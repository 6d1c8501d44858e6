"""Model FLOPs utilisation of stage 2: the whole model trains, with random weights of a profile's dimensions.

Needs neither data nor weights, and torch, transformers and accelerate alone. Operations are those of `normalign plan`:
6 per parameter and token, 2 and 4 per term of attention, logits at supervised positions only; nothing that is computed
again counts. So the figure is comparable with what others call MFU, without the logits nobody needs.
"""

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

WARM_UP = 3  # steps whose time does not count


def utilisation(
    name: str, *, micro_batch: int, text_tokens: int, steps: int, threads: int, recompute: bool
) -> dict[str, Any]:
    """Train ``steps`` steps of ``micro_batch`` samples with one image and ``text_tokens`` tokens each; median step."""
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
    from normalign.settings import load_profile
    from normalign.training.loop import Samples, train
    from normalign.vlm.chat import IGNORE, Encoded
    from normalign.vlm.forward import Visual
    from normalign.vlm.model import NormalignConfig, NormalignForConditionalGeneration, grid_of

    torch.set_num_threads(threads)
    profile = load_profile(name)
    cuda = torch.cuda.is_available()
    vision = published()["vision"][profile.weights.vision.source]
    language = dict(published()["language"][profile.weights.language.source])
    language["vocab_size"] = max(language["vocab_size"], language.pop("tokens"))
    config = NormalignConfig(
        vision_config=AutoConfig.for_model(**vision).to_dict(),
        text_config=AutoConfig.for_model(**language).to_dict(),
        image_token_index=language["vocab_size"] - 1,
        vision_feature_layer=profile.model.feature_layer,
        vision_feature_select_strategy="full",
        feature_norm=profile.model.feature_norm,
        aligner={"aligner": "layernorm", "gwc": True},
    )
    visual = config.image_seq_length = grid_of(config, profile.model.image_size) ** 2
    config.tie_word_embeddings = bool(language["tie_word_embeddings"])
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = NormalignForConditionalGeneration(config)
        size = profile.model.image_size
        pixels = torch.randn(micro_batch, 3, size, size)
    model.model.language_model.set_attn_implementation("sdpa" if cuda else "eager")
    generator = torch.Generator().manual_seed(0)
    supervised = text_tokens // 2

    def encode(index: int) -> Encoded:
        text = torch.randint(5, config.image_token_index, (text_tokens,), generator=generator).tolist()
        sample = Encoded(str(index), image="random")
        ids = [config.image_token_index] * visual + text
        sample.add(ids, [IGNORE] * (len(ids) - supervised) + ids[len(ids) - supervised :])
        return sample

    options = replace(
        profile.stage2, global_batch=micro_batch, micro_batch=micro_batch, pack=False, gradient_checkpointing=recompute
    )
    ends: list[float] = []
    half = precision() == "bf16"
    with tempfile.TemporaryDirectory() as work:
        train(
            model,
            Samples(micro_batch * steps, encode, lambda _: Visual(pixels=pixels)),
            options,
            accelerator=Accelerator(cpu=not cuda, mixed_precision="bf16" if half else "no"),
            pad_id=0,
            work=Path(work),
            description="mfu",
            watch=lambda _: ends.append(time.perf_counter()),
        )
    seconds = statistics.median(b - a for a, b in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False))
    towers = vision_tower(vision, "published"), language_model(language, "published", language["vocab_size"])
    shape = Model(*towers, profile.model, counts(*towers, profile.model, options))
    step = Workload(micro_batch, visual, text_tokens, supervised, 1, micro_batch, micro_batch, 1)
    operations = training_flops(shape, step, cached=False).total
    peak = PEAK_TFLOPS["cuda"] if cuda else PEAK_TFLOPS["cpu"] * threads
    return {
        "profile": name,
        "device": torch.cuda.get_device_name() if cuda else f"cpu, {threads} threads",
        "precision": precision(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "visual_tokens": visual,
        "tokens_per_step": micro_batch * (visual + text_tokens),
        "tflop_per_step": operations / 1e12,
        "seconds_per_step": seconds,
        "tokens_per_second": micro_batch * (visual + text_tokens) / seconds,
        "peak_tflops": peak,
        "mfu": operations / seconds / (peak * 1e12),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
    }
