"""Our model for lmms-eval: option likelihoods and greedy answers, with matched or with shuffled images."""

import contextlib
import hashlib
import logging
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lmms_eval import evaluator
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from lmms_eval.tasks import TaskManager
from loguru import logger
from PIL import Image, ImageFile
from transformers import LlavaProcessor

from normalign.vlm.generate import answer
from normalign.vlm.model import NormalignForConditionalGeneration
from normalign.vlm.scoring import Question, score

DEFAULT_NEW_TOKENS = 64

# Importing lmms-eval tells Pillow, for the whole process, to pad truncated images in silence; its own tasks may have
# that while they run (quiet_lmms_eval), everything else must see a truncated file as what it is.
ImageFile.LOAD_TRUNCATED_IMAGES = False


class LmmsAdapter(lmms):
    """Answers lmms-eval's requests with a live model.

    With ``shuffled`` set, every document of a visual task is shown the image of another: distinct images are put in
    a seeded random order and each gives its place to the next, so that no question keeps its own image, also where
    several questions share one.
    """

    is_simple = True

    def __init__(
        self,
        model: NormalignForConditionalGeneration,
        processor: LlavaProcessor,
        batch_tokens: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.model, self.processor = model, processor
        self.batch_tokens, self.seed = batch_tokens, seed
        self.shuffled = False
        self.image_keys: dict[tuple[str, int], str | None] = {}
        self._images: dict[str, Image.Image] = {}

    @property
    def device(self) -> torch.device:
        return self.model.device

    def clean(self) -> None:
        """lmms-eval would delete the model's attributes after a task; this one is used again."""

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Summed negative log-likelihood (lmms-eval takes the smallest) and greediness of each request's option."""
        self._load_images(requests)
        groups: dict[tuple[str, str, int], list[int]] = {}
        for index, request in enumerate(requests):
            context, _, _, doc_id, task, _ = request.args
            groups.setdefault((context, task, doc_id), []).append(index)
        questions = [
            Question(
                context.strip(),
                tuple(requests[i].args[1].strip() for i in members),
                self.image_keys[task, doc_id],
            )
            for (context, task, doc_id), members in groups.items()
        ]
        scored = score(self.model, self.processor, questions, self._images, self.batch_tokens)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for members, result in zip(groups.values(), scored, strict=True):
            for place, index in enumerate(members):
                results[index] = (result.nll[place], result.greedy[place])
        return results

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Greedy answers, cut at the first stop string."""
        self._load_images(requests)
        answers = []
        for request in requests:
            context, options, _, doc_id, task, _ = request.args
            key = self.image_keys[task, doc_id]
            image = None if key is None else self._images[key]
            text = answer(
                self.model,
                self.processor,
                image,
                context.replace(self.processor.image_token, "").strip(),
                options.get("max_new_tokens") or DEFAULT_NEW_TOKENS,
            )
            stops = options.get("until") or []
            for stop in [stops] if isinstance(stops, str) else stops:
                text = text.split(stop)[0] if stop else text
            answers.append(text.strip())
        return answers

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise NotImplementedError("multi-round tasks are not supported; choose another task")

    def _load_images(self, requests: list[Instance]) -> None:
        """Fill ``image_keys`` (task and document → key of the image shown) and ``_images`` (key → image)."""
        own: dict[tuple[str, int], str | None] = {}
        self._images = {}
        for request in requests:
            doc_to_visual, doc_id, task, split = request.args[-4:]
            if (task, doc_id) in own:
                continue
            # Text tasks have no doc_to_visual, or one that returns None.
            visuals = (doc_to_visual(self.task_dict[task][split][doc_id]) if doc_to_visual else None) or []
            if len(visuals) > 1:
                raise ValueError(f"task {task}, document {doc_id}: {len(visuals)} images; one at most is supported")
            own[task, doc_id] = self._keep(visuals[0]) if visuals else None
        self.image_keys = self._derange(own) if self.shuffled else own

    def _keep(self, image: Image.Image) -> str:
        image = image.convert("RGB")
        key = hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()
        self._images[key] = image
        return key

    def _derange(self, own: dict[tuple[str, int], str | None]) -> dict[tuple[str, int], str | None]:
        distinct = sorted({key for key in own.values() if key is not None})
        if len(distinct) < 2:
            raise ValueError("shuffling images needs at least two different ones")
        random.Random(self.seed).shuffle(distinct)
        following = dict(zip(distinct, distinct[1:] + distinct[:1], strict=True))
        return {doc: None if key is None else following[key] for doc, key in own.items()}


def _pass_likelihoods(unwrap: Any) -> Any:
    """lmms-eval 0.7.3 turns ``(float, bool)`` likelihood results into text before it unpacks them."""

    def unwrap_generation_output(output: Any) -> Any:
        if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], bool):
            return output, None
        return unwrap(output)

    return unwrap_generation_output


@contextlib.contextmanager
def quiet_lmms_eval() -> Iterator[None]:
    """lmms-eval with its likelihood fault mended and its log silenced; random state and warnings are put back."""
    original = evaluator.unwrap_generation_output
    evaluator.unwrap_generation_output = _pass_likelihoods(original)
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    logger.disable("lmms_eval")
    level = logging.getLogger().level
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        logging.getLogger().setLevel(level)
        logger.enable("lmms_eval")
        evaluator.unwrap_generation_output = original
        ImageFile.LOAD_TRUNCATED_IMAGES = False


def run_task(adapter: LmmsAdapter, task: str, task_folders: list[Path]) -> list[dict[str, Any]]:
    """One task, or group of tasks, through lmms-eval: its samples in order, each with its ``task``.

    Args:
        task_folders: folders with the task's definition; lmms-eval's own tasks are found only if their folder is named.

    Raises:
        ValueError: the task's data cannot be had; the message says why.
    """
    with quiet_lmms_eval():
        manager = TaskManager("ERROR", include_path=[str(f) for f in task_folders], include_defaults=False)
        try:
            output = evaluator.simple_evaluate(
                model=adapter,
                tasks=[task],
                batch_size=1,
                device=str(adapter.device),
                log_samples=True,
                task_manager=manager,
                verbosity="ERROR",
                bootstrap_iters=0,
            )
        except Exception as error:
            cause = getattr(error, "last_attempt", None)
            reason = cause.exception() if cause is not None else error
            hint = ""
            if isinstance(reason, ConnectionError):
                hint = (
                    "; it is fetched from the hub: connect this machine, or fill the hub's cache (HF_HOME) on another"
                )
            raise ValueError(f"lmms-eval task {task!r}: {type(reason).__name__}: {reason}{hint}") from error
    return [
        {**sample, "task": name}
        for name in sorted(output["samples"])
        for sample in sorted(output["samples"][name], key=lambda sample: sample["doc_id"])
    ]
