"""What a training process takes before it holds a model: measured in one, not assumed."""

import subprocess
import sys

# The libraries of a stage, and one tiny step, with which they allocate what they only allocate when used.
_PROBE = """
import resource, sys
import torch
import accelerate, safetensors.torch, transformers
import normalign.training.loop, normalign.vlm.build, normalign.vlm.generate
torch.set_num_threads(int(sys.argv[1]))
accelerate.Accelerator(cpu=True)
layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
layer(torch.zeros(2, 8)).sum().backward()
optimizer.step()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak if sys.platform == "darwin" else peak * 1024)
"""


def measure(threads: int) -> int:
    """Peak resident bytes of the interpreter with the training stage's libraries, measured here in a fresh process."""
    command = [sys.executable, "-c", _PROBE, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ValueError(f"what the libraries take could not be measured as a baseline: {reason}")
    return int(done.stdout.split()[-1])
