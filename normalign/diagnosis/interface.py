"""Norms of visual and text tokens where one part of a model hands them to the next (SCIENCE §3).

Shape suffixes: B samples, L length, D width, E vision width, N tokens.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from normalign.anatomy import Anatomy
from normalign.diagnosis.capture import hook_inputs, hook_output, tokens_of_all_images
from normalign.diagnosis.layers import Masks
from normalign.diagnosis.tokens import token_norms
from normalign.norms.statistics import language_sinks, summarise_norms, vision_sinks

INTERFACES = ("vision_output", "projector_input", "projector_output", "visual_at_merge", "text_at_merge")
VISION = ("vision_output", "projector_input")  # where a vision tower's idea of a sink token applies


class InterfaceNorms:
    """Collects token norms at the interfaces of a model over any number of batches."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.norms: dict[str, list[Tensor]] = {name: [] for name in INTERFACES}

    @contextmanager
    def watching(self, masks: Masks) -> Iterator[None]:
        """Keep the norms of the forward passes made meanwhile, on batches with these ``masks``."""

        def merge(x_BLD: Tensor) -> None:
            norms = token_norms(x_BLD).flatten()
            for modality, at_N in masks.flat.items():
                self._keep(f"{modality}_at_merge", norms[at_N.to(norms.device)])

        looked_up = False  # a visual vocabulary (Ovis) also holds marks, which are no visual tokens, by their ids

        def enter(x: Tensor) -> None:
            nonlocal looked_up
            looked_up = not x.is_floating_point()
            self._add("projector_input", x)

        def leave(output: Any) -> None:
            if not looked_up:
                self._add("projector_output", output)

        with ExitStack() as stack:
            for hook in (
                hook_output(self.anatomy.tower, lambda output: self._add("vision_output", _hidden(output))),
                hook_inputs(self.anatomy.projector, enter, tokens_of_all_images),
                hook_output(self.anatomy.projector, leave),
                hook_inputs(self.anatomy.layers[0], merge),
            ):
                stack.enter_context(hook)
            yield

    def _add(self, name: str, output: Any) -> None:
        tokens = tokens_of_all_images(output)
        if tokens is not None and tokens.is_floating_point():
            self._keep(name, token_norms(tokens))

    def _keep(self, name: str, norms: Tensor) -> None:
        self.norms[name].append(norms.flatten().float().cpu())

    def mean(self, name: str) -> float:
        """Mean norm at an interface.

        Raises:
            ValueError: no token passed there.
        """
        norms_N = torch.cat(self.norms[name]) if self.norms[name] else torch.empty(0)
        if not len(norms_N):
            raise ValueError(f"no token passed {name.replace('_', ' ')}")
        return norms_N.double().mean().item()

    def summary(self) -> dict[str, Any]:
        """A summary per interface; null where nothing passed. With a visual vocabulary, one of its rows too (RQ4)."""
        result: dict[str, Any] = {}
        for name, parts in self.norms.items():
            norms_N = torch.cat(parts) if parts else torch.empty(0)
            sinks = vision_sinks if name in VISION else language_sinks
            result[name] = summarise_norms(norms_N, sinks(norms_N)) if len(norms_N) else None
        table = getattr(self.anatomy.projector, "weight", None)
        if self.anatomy.visual_vocabulary and isinstance(table, Tensor):
            rows_N = token_norms(table.detach()).cpu()
            result["visual_vocabulary"] = summarise_norms(rows_N, language_sinks(rows_N))
        return result


def _hidden(output: Any) -> Any:
    """The states of a tower's output: its last hidden state, where it has several entries."""
    states = getattr(output, "last_hidden_state", None)
    return output if states is None else states
