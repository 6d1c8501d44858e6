"""What trains and at which learning rate: one table, used to freeze, to build the optimizer and to check it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normalign.training.options import MODULES, TrainingOptions
from normalign.training.parallel import total_norm
from normalign.vlm.model import MODULE_PATHS, NormalignForConditionalGeneration, module_of


@dataclass(frozen=True)
class Row:
    """A module of the table: its learning rate (None: frozen) and parameters by full name."""

    module: str
    learning_rate: float | None
    parameters: dict[str, nn.Parameter]

    @property
    def size(self) -> int:
        """Number of scalars."""
        return sum(p.numel() for p in self.parameters.values())


class TrainableTable:
    """Vision tower, projector, aligner and language model with their learning rates.

    Building it sets ``requires_grad`` on every parameter of the model, so that what the table says is what trains.
    Parameters of the vision tower that visual tokens do not depend on never train; they are ``unused``.

    Raises:
        ValueError: no module that is to train has a parameter.
    """

    def __init__(self, model: NormalignForConditionalGeneration, options: TrainingOptions) -> None:
        members: dict[str, dict[str, nn.Parameter]] = {module: {} for module in MODULES}
        self.unused: dict[str, nn.Parameter] = {}
        unused = set()
        if "vision" in options.learning_rate:
            unused = {f"{MODULE_PATHS['vision']}.{name}" for name in model.model.unused_vision_parameters()}
        for name, parameter in model.named_parameters():
            (self.unused if name in unused else members[module_of(name)])[name] = parameter
        self.rows = [Row(m, options.learning_rate.get(m), members[m]) for m in MODULES]
        for parameter in self.unused.values():
            parameter.requires_grad_(False)
        for row in self.rows:
            for parameter in row.parameters.values():
                parameter.requires_grad_(row.learning_rate is not None)
        if not self.parameters():
            named, others = " and ".join(options.learning_rate), ", ".join(r.module for r in self.rows if r.parameters)
            raise ValueError(
                f"learning_rate: this variant has no parameters in {named}, so nothing would train; "
                f"name one of {others}"
            )

    def trainable(self) -> Iterator[Row]:
        """Rows that train and have parameters (an aligner may have none)."""
        return (row for row in self.rows if row.learning_rate is not None and row.parameters)

    def parameters(self) -> list[nn.Parameter]:
        """Every trainable parameter, in the table's order."""
        return [p for row in self.trainable() for p in row.parameters.values()]

    def rebind(self, model: NormalignForConditionalGeneration) -> None:
        """Take up the parameters that sharding put in the place of those that the table was built with."""
        current = dict(model.named_parameters())
        for members in (*(row.parameters for row in self.rows), self.unused):
            members.update({name: current[name] for name in members})

    def describe(self) -> str:
        """The table as lines of text, for the start of a run."""
        lines = [f"{'module':<10} {'parameters':>12}  learning rate"]
        for row in self.rows:
            rate = "frozen" if row.learning_rate is None else f"{row.learning_rate:g}"
            lines.append(f"{row.module:<10} {row.size:>12,}  {rate}")
        if self.unused:
            lines.append(f"{'unused':<10} {sum(p.numel() for p in self.unused.values()):>12,}  frozen")
        return "\n".join(lines)

    def optimizer(self, options: TrainingOptions) -> torch.optim.AdamW:
        """AdamW with one group per trainable module; gains, biases and other vectors are exempt from weight decay."""
        groups = []
        for row in self.trainable():
            for decays in (True, False):
                chosen = [p for p in row.parameters.values() if (p.ndim > 1) == decays]
                if chosen:
                    groups.append(
                        {
                            "params": chosen,
                            "lr": row.learning_rate,
                            "weight_decay": options.weight_decay if decays else 0.0,
                            "module": row.module,
                        }
                    )
        return torch.optim.AdamW(groups, betas=options.betas, eps=options.eps, fused=True)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to train unless the optimizer holds exactly the table's trainable parameters at the table's rates.

        Raises:
            ValueError: names the module that differs.
        """
        for row in self.rows:
            held = {
                id(p): group["lr"]
                for group in optimizer.param_groups
                if group["module"] == row.module
                for p in group["params"]
            }
            expected = {id(p) for p in row.parameters.values()} if row.learning_rate is not None else set()
            if held.keys() != expected or any(rate != row.learning_rate for rate in held.values()):
                raise ValueError(f"the optimizer does not train {row.module!r} as the table says; nothing was trained")
            if any(p.requires_grad != bool(expected) for p in row.parameters.values()):
                raise ValueError(f"requires_grad of {row.module!r} differs from the table; nothing was trained")


@torch.no_grad()
def update_ratio(optimizer: torch.optim.AdamW, module: str) -> float:
    """‖Δw‖ / ‖w‖ over a module's weights w, for the step just taken; 0 where all weights are 0.

    Δw follows from AdamW's moments, so that no copy of the weights is needed.
    """
    changes: list[Tensor] = []
    weights: list[Tensor] = []
    for group in (g for g in optimizer.param_groups if g["module"] == module):
        (beta1, beta2), decay = group["betas"], group["lr"] * group["weight_decay"]
        for parameter in (p for p in group["params"] if p in optimizer.state):
            state = optimizer.state[parameter]
            step = float(state["step"])
            root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
            change = (state["exp_avg"] / (1 - beta1**step)).div_(root).mul_(group["lr"])
            if decay:  # w = (1 - decay) * before - change
                change = change + decay * (parameter + change) / (1 - decay)
            changes.append(change.norm())
            weights.append(parameter.norm())
    size = total_norm(weights)
    return total_norm(changes) / size if size else 0.0
