"""NormWatch: the norms at the merge, logged while anybody's Trainer trains.

Shape suffixes: B batch, L sequence length, D width of the language model.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from normalign.anatomy import Anatomy, find_anatomy, visual_mask
from normalign.attach.merge import text_norm_as_used
from normalign.diagnosis.tokens import exact

FIRST_LAYERS = 8  # where the paper sees the gap, and where it must be read


class NormWatch(TrainerCallback):
    """Adds to every log of transformers.Trainer what the norms did since the last one; no extra forward passes.

    ``norm_visual`` and ``norm_text`` (mean L2 norms at the merge), ``norm_k`` (``norm_visual`` over T, the text
    embedding's mean norm when training began), with ``gap`` also ``norm_gap_first8`` (mean over the first 8 decoder
    layers of |cos visual - cos text|, inter-layer cosines), and an attached aligner's ``norm_gain_l2``,
    ``norm_gain_mean_abs``, ``norm_gain_drift``. Logs of an evaluation during training get ``eval_norm_...``.

    The figures go into ``state.log_history`` and to the callbacks behind this one. Those of ``report_to`` stand before
    it: to have the figures there, leave ``report_to`` empty and pass its callback after this one. With several
    processes each sees its own samples, and the first one's are logged.

    Args:
        gap: also measure the gap, which costs a cosine per layer and step.
        text_norm: T, where the model's own is not wanted.
        parts: what :func:`normalign.anatomy.find_anatomy` cannot find by itself.
    """

    def __init__(self, gap: bool = False, text_norm: float | None = None, **parts: Any) -> None:
        self.gap, self.text_norm, self.parts = gap, text_norm, parts
        self.T = 0.0
        self._anatomy: Anatomy | None = None
        self._handles: list[RemovableHandle] = []
        self._sums: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}
        self._masks: dict[str, Tensor] | None = None
        self._pending: set[int] = set()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Find the model's parts and hook them."""
        self._remove()
        self._anatomy = find_anatomy(model, **self.parts)
        self.T = text_norm_as_used(self._anatomy) if self.text_norm is None else self.text_norm
        anatomy = self._anatomy
        self._handles.append(anatomy.core.register_forward_pre_hook(self._start, with_kwargs=True))
        for index, layer in enumerate(anatomy.layers[: FIRST_LAYERS if self.gap else 1]):
            self._handles.append(layer.register_forward_hook(self._layer_hook(index), with_kwargs=True))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the model as it was."""
        self._remove()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the figures to this log."""
        if self._anatomy is None or logs is None:
            return
        evaluation = any(name.startswith("eval_") for name in logs)
        if not (evaluation or "loss" in logs):  # the summary at the end of training
            return
        found = {("eval_" if evaluation else "") + name: value for name, value in self._take(not evaluation).items()}
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def _start(self, core: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A forward pass begins: which positions are visual, and which layers have yet to be seen in it.

        Gradient checkpointing runs layers again in the backward pass; by then they are no longer pending.
        """
        assert self._anatomy is not None
        given = inspect.signature(core.forward).bind_partial(*args, **keywords).arguments
        ids_BL = given.get("input_ids")
        self._pending = set()
        if ids_BL is None:
            return
        visual_BL = visual_mask(self._anatomy, ids_BL)
        if ids_BL.shape[1] == 1 or not visual_BL.any():  # a step of generation; a batch of text
            return
        text_BL = ~visual_BL
        padding = given.get("attention_mask")
        if isinstance(padding, Tensor) and padding.shape == ids_BL.shape:
            text_BL = text_BL & padding.bool()
        self._masks = {"visual": visual_BL, "text": text_BL}
        self._pending = set(range(FIRST_LAYERS if self.gap else 1))

    def _layer_hook(self, index: int) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            if index not in self._pending or self._masks is None:
                return
            self._pending.discard(index)
            with torch.no_grad():
                before_BLD = args[0] if args else keywords["hidden_states"]
                after_BLD = output[0] if isinstance(output, tuple) else output
                self._see(index, before_BLD.detach(), after_BLD.detach())

        return hook

    def _see(self, index: int, before_BLD: Tensor, after_BLD: Tensor) -> None:
        assert self._anatomy is not None and self._masks is not None
        training = self._anatomy.core.training
        for modality, mask_BL in self._masks.items():
            mask_BL = mask_BL.to(before_BLD.device)
            before = before_BLD[mask_BL].float()
            if index == 0:
                self._add(training, f"norm_{modality}", before.norm(dim=-1))
            if self.gap:
                after = after_BLD[mask_BL].float()
                self._add(training, f"cosine_{modality}_{index}", torch.cosine_similarity(before, after, dim=-1))

    def _add(self, training: bool, name: str, values_N: Tensor) -> None:
        """Sum and count stay on the device: nothing waits for it before a log."""
        new = exact(torch.stack([values_N.sum(), values_N.new_tensor(values_N.numel())]))
        sums = self._sums[training]
        sums[name] = sums[name] + new if name in sums else new

    def _take(self, training: bool) -> dict[str, float]:
        assert self._anatomy is not None
        sums, self._sums[training] = self._sums[training], {}
        means = {name: (pair[0] / pair[1]).item() for name, pair in sums.items() if pair[1] > 0}
        found: dict[str, float] = {}
        if "norm_visual" in means:
            found = {"norm_k": means["norm_visual"] / self.T}
            found |= {name: means[name] for name in ("norm_visual", "norm_text") if name in means}
            gaps = [
                abs(means[f"cosine_visual_{i}"] - means[f"cosine_text_{i}"])
                for i in range(FIRST_LAYERS)
                if f"cosine_visual_{i}" in means and f"cosine_text_{i}" in means
            ]
            if gaps:
                found["norm_gap_first8"] = sum(gaps) / len(gaps)
        for module in self._anatomy.projector.modules():
            statistics: Any = getattr(module, "gain_statistics", dict)  # an aligner's, also of a checkpoint's own code
            found |= {f"norm_{name}": value for name, value in statistics().items()}
        return found

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._anatomy, self._masks, self._pending = [], None, None, set()
        self._sums = {True: {}, False: {}}
