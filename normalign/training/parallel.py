"""How training is spread over processes: the wrapped model, and figures that are the same in all of them.

With several processes the model is replicated (DDP), or, where accelerate is configured for FSDP, sharded with
``fully_shard`` (FSDP2). Sharding is done here and not by accelerate, which on a CPU falls back to replication.
"""

import contextlib
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from normalign.norms.aligner import whole
from normalign.vlm.forward import SupervisedLoss
from normalign.vlm.model import vision_layers


class Parallel:
    """The processes of one training stage."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.rank, self.count = accelerator.process_index, accelerator.num_processes
        self.device = accelerator.device
        # On a CPU the accelerator forgets that it was told to shard; the environment it was launched with does not.
        self.sharded = self.count > 1 and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"

    @property
    def half(self) -> bool:
        """Whether matrix products are computed in bfloat16."""
        return self.accelerator.mixed_precision == "bf16"

    @property
    def main(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def wrap(self, loss: SupervisedLoss) -> nn.Module:
        """The module to call in place of ``loss``; when sharded, its parameters are replaced by sharded ones."""
        if not self.sharded:
            return self.accelerator.prepare_model(loss)
        # The model stays in main memory until `fully_shard` moves a layer to the device and keeps its shard there.
        mesh = init_device_mesh(self.device.type, (self.count,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.half else MixedPrecisionPolicy()
        model = loss.model.model
        for layer in (*vision_layers(model.vision_tower), *model.language_model.layers):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        # The rest (embeddings, projector, aligner, norms) is gathered as one group, in float32: a gain needs it.
        fully_shard(loss, mesh=mesh)
        return loss

    def accumulate(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Within it a backward pass of a replicated model exchanges gradients only if it is a step's ``last``.

        A sharded one exchanges them in every pass, or each device would keep the gradients of the whole model.
        """
        return contextlib.nullcontext() if last or self.sharded else self.accelerator.no_sync(wrapped)

    def sum(self, *values: float) -> list[float]:
        """Each of ``values`` summed over processes, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, value: float) -> float:
        """The largest ``value`` of any process."""
        return self._reduce((value,), dist.ReduceOp.MAX)[0]

    def _reduce(self, values: Iterable[float], operation: Any) -> list[float]:
        numbers = list(values)
        if self.count == 1:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, operation)
        return tensor.tolist()


def total_norm(tensors: list[Tensor]) -> float:
    """L2 norm of all ``tensors`` together, sharded or not; 0 for none."""
    return whole(torch.nn.utils.get_total_norm(tensors)).item() if tensors else 0.0


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """A copy of ``tensor``, which is whole, in the shape that ``model`` has in this process."""
    if isinstance(model, DTensor):
        return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements)
    return tensor.clone()
