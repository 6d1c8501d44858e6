"""Training in processes of their own, which a fork server starts in a moment: several at once, or one to be killed."""

import multiprocessing
import os
import socket
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from normalign.training.options import TrainingOptions

from ..conftest import Tiny

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["accelerate", "normalign.training.loop", "normalign.vlm.build", "torch.distributed.fsdp"])
SECONDS = 600  # only what hangs takes that long


@dataclass(frozen=True)
class Job:
    """One training run: the tiny model on ``order`` of the conversations. Process 0 writes ``out``."""

    tiny: Tiny
    options: TrainingOptions
    work: Path
    out: Path
    aligner: dict[str, Any]
    order: tuple[int, ...]
    sharded: bool = False
    dropped: tuple[int, ...] = ()  # places of the order whose sample cannot be encoded


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(job: Job, count: int) -> list[BaseProcess]:
    """Start the job's ``count`` processes."""
    port = _free_port()
    processes: list[BaseProcess] = [FORKS.Process(target=_main, args=(job, rank, count, port)) for rank in range(count)]
    for process in processes:
        process.start()
    return processes


def finish(processes: list[BaseProcess]) -> list[int | None]:
    """Wait for processes to end; their exit codes."""
    for process in processes:
        process.join(SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def run(job: Job, count: int) -> dict[str, Any]:
    """Run the job to its end: log rows, the model's whole state, how many parameters were sharded."""
    import torch

    codes = finish(start(job, count))
    assert codes == [0] * count, codes
    return dict(torch.load(job.out, weights_only=True))


def _main(job: Job, rank: int, count: int, port: int) -> None:
    import torch
    from accelerate import Accelerator
    from torch.distributed.tensor import DTensor

    from normalign.norms.aligner import whole
    from normalign.training.loop import Samples, train
    from normalign.vlm.chat import SampleDroppedError

    from .helpers import samples_of

    torch.set_num_threads(1)
    if count > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if job.sharded else {}
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == count
    model = job.tiny.model(job.aligner)
    samples = samples_of(model, job.tiny.processor(), job.options)

    def encode(index: int) -> Any:
        if index in job.dropped:
            raise SampleDroppedError("no_supervised_token", f"place {index}")
        return samples.encode(job.order[index])

    lost: list[int] = []
    rows = train(
        model,
        Samples(len(job.order), encode, samples.visual, lost.append),
        job.options,
        accelerator=accelerator,
        pad_id=0,
        work=job.work,
        description="test",
    )
    sharded = sum(isinstance(parameter, DTensor) for parameter in model.parameters())
    state = {name: whole(value).clone() for name, value in model.state_dict().items()}
    if rank == 0:
        part = job.out.with_suffix(".part")
        torch.save({"rows": rows, "state": state, "sharded": sharded, "lost": lost}, part)
        part.replace(job.out)
    if count > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
