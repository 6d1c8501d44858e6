"""Samples for a model that makes its inputs itself: its own code has a method for it, its checkpoint no processor.

Shape suffixes: none, tensors are only handed on.
"""

import ast
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image

from normalign.anatomy.source import definition

METHOD = "preprocess_inputs"


class OwnInputs:
    """Stands where a processor would: makes samples by ``model.preprocess_inputs(messages=...)``."""

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model, self.tokenizer = model, tokenizer

    def sample(self, image: Image.Image, prompt: str) -> dict[str, Any]:
        """A user's turn with ``image`` and ``prompt``, as the model's forward takes it (batch of one).

        Raises:
            ValueError: what the method returned has no names.
        """
        content = [{"type": "image", "image": image}, {"type": "text", "text": prompt}]
        made = getattr(self.model, METHOD)(messages=[{"role": "user", "content": content}])
        inputs = dict(made) if isinstance(made, Mapping) else dict(zip(self._names(made), made, strict=True))
        if "attention_mask" in inspect.signature(self.model.forward).parameters:
            inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
        return {name: value for name, value in inputs.items() if value is not None}

    def __call__(self, images: list[Image.Image], **_: Any) -> dict[str, Any]:
        """What the sample of one image holds: an image processor's answer, and the tokens' ids beside it."""
        (image,) = images
        return self.sample(image, "")

    def _names(self, made: Any) -> list[str]:
        """The names under which the method's source returns a tuple; they are those of forward's parameters."""
        parsed = definition(getattr(type(self.model), METHOD))
        values = [node.value for node in ast.walk(parsed) if isinstance(node, ast.Return)] if parsed else []
        for value in values:
            parts = value.elts if isinstance(value, ast.Tuple) else []
            names = [part.id for part in parts if isinstance(part, ast.Name)]
            if len(names) == len(made):
                return names
        raise ValueError(f"what {type(self.model).__name__}.{METHOD} returns has no names")


def makes_own_inputs(model: Any) -> bool:
    """Whether the model's class has a method that makes inputs from the messages of a chat."""
    method = getattr(type(model), METHOD, None)
    return method is not None and "messages" in inspect.signature(method).parameters
