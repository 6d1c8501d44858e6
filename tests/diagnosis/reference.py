"""The usual way: all states kept, and everything computed from them in float64 with NumPy.

Shape suffixes: B samples, L length, D width, N tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Array = npt.NDArray[np.float64]


@dataclass
class Kept:
    """States before and after every layer, and what attention and MLP added, of one or several forward passes."""

    before: list[list[Tensor]] = field(default_factory=list)
    after: list[list[Tensor]] = field(default_factory=list)
    attention: list[list[Tensor]] = field(default_factory=list)
    mlp: list[list[Tensor]] = field(default_factory=list)


def keep(kept: Kept, layers: Any, halves: list[tuple[nn.Module, nn.Module]]) -> list[Any]:
    """Hook everything; returns the handles."""
    handles = []
    for layer, (attention, mlp) in zip(layers, halves, strict=True):
        for store in (kept.before, kept.after, kept.attention, kept.mlp):
            store.append([])
        handles.append(layer.register_forward_pre_hook(_first_input(kept.before[-1]), with_kwargs=True))
        for module, stored in ((layer, kept.after[-1]), (attention, kept.attention[-1]), (mlp, kept.mlp[-1])):
            handles.append(module.register_forward_hook(_output(stored)))
    return handles


def _first_input(store: list[Tensor]) -> Any:
    def hook(_module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        store.append((inputs[0] if inputs else keywords["hidden_states"]).clone())

    return hook


def _output(store: list[Tensor]) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        store.append((output[0] if isinstance(output, tuple) else output).clone())

    return hook


def statistics(
    before: list[Array], after: list[Array], attention: list[Array], mlp: list[Array]
) -> dict[str, list[float]]:
    """All curves of one modality, from its tokens (N, D) per layer."""
    states = [before[0], *after]
    norms = [np.linalg.norm(state, axis=1) for state in states]
    sink = [n > 10 * np.sort(n)[(len(n) - 1) // 2] for n in norms]
    result: dict[str, list[float]] = {
        "norm_mean": [n.mean() for n in norms],
        "norm_median": [float(np.median(n)) for n in norms],
        "norm_without_sinks": [n[~s].mean() for n, s in zip(norms, sink, strict=True)],
        "sinks": [int(s.sum()) for s in sink],
    }
    for name in ("cosine", "angle", "relative_update", "relative_update_attention", "relative_update_mlp"):
        result[name] = []
    for index, (b, a) in enumerate(zip(before, after, strict=True)):
        size = np.linalg.norm(b, axis=1)
        ordinary = ~(_sinks(size) | _sinks(np.linalg.norm(a, axis=1)))
        cosine = (b * a).sum(1) / size / np.linalg.norm(a, axis=1)
        # Half the angle from the chord between the directions: exact for small angles, unlike an arc cosine.
        chord = np.linalg.norm(b / size[:, None] - a / np.linalg.norm(a, axis=1)[:, None], axis=1)
        angle = np.degrees(2 * np.arcsin(np.clip(chord / 2, 0, 1)))
        result["cosine"].append(cosine[ordinary].mean())
        result["angle"].append(angle[ordinary].mean())
        result["relative_update"].append(_lower_median(np.linalg.norm(a - b, axis=1) / size))
        result["relative_update_attention"].append(_lower_median(np.linalg.norm(attention[index], axis=1) / size))
        result["relative_update_mlp"].append(_lower_median(np.linalg.norm(mlp[index], axis=1) / size))
    return result


def rank(x_ND: Array) -> float:
    """exp of the entropy of the normalised singular values."""
    singular = np.linalg.svd(x_ND, compute_uv=False)
    share = singular / singular.sum()
    share = share[share > 1e-6 * share.max()]
    share = share / share.sum()
    return float(np.exp(-(share * np.log(share)).sum()))


def rows(states: list[Tensor], masks_BL: list[Tensor]) -> Array:
    """Tokens (N, D) of one modality over all batches, in float64."""
    chosen = [state.flatten(0, -2)[mask.flatten()] for state, mask in zip(states, masks_BL, strict=True)]
    return torch.cat(chosen).double().numpy()


def _sinks(norms: Array) -> npt.NDArray[np.bool_]:
    return norms > 10 * _lower_median(norms)


def _lower_median(values: Array) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])
