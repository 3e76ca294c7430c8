"""Take two steps with the learner's small DDP, whose hooks all-reduce each gradient, for exercise 1.3b.

torchrun --nproc-per-node 2 gradient_hooks.py FOLDER FILE

FILE defines attach(model) and finish(pending). Each rank writes to FOLDER/RANK.json, for each step, what each gradient
is, whether each all-reduce of backward() ran in the background, and how many entries are left in `pending`.
"""

import json
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shared import datasets, distributed

folder, path = sys.argv[1:]
worker = distributed.join(timeout_s=20)
images, labels = datasets.load("digits").train.tensors
really_all_reduce, in_background = dist.all_reduce, []


class Work:
    """An all-reduce in the background."""

    late = True  # whether the sum arrives as late as it may, in wait(), or as early as it may, in the call

    def __init__(self, tensor: torch.Tensor, op: dist.ReduceOp, group: dist.ProcessGroup | None) -> None:
        self.tensor, self.total = tensor, tensor.detach().clone() if self.late else None
        self.work = really_all_reduce(self.total if self.late else tensor, op, group, async_op=True)
        if not self.late:
            self.work.wait()

    def wait(self, *timeout: object) -> bool:
        self.work.wait(*timeout)
        if self.total is not None:
            self.tensor.detach().copy_(self.total)
        self.total = None
        return True

    def __getattr__(self, name: str) -> object:
        return getattr(self.work, name)


def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    in_background.append(async_op)
    return Work(tensor, op, group) if async_op else really_all_reduce(tensor, op, group)


def mean_over_ranks(gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.clone()
    really_all_reduce(total)
    return total / worker.world_size


def kind(gradient: torch.Tensor | None, own: torch.Tensor, mean: torch.Tensor) -> str:
    """Say which of the values that a mistake leads to this gradient has."""
    kinds = {
        "the mean": mean, "this rank's own": own, "the sum": 2 * mean, "half of the mean": mean / 2,
        "half of this rank's own": own / 2,
    }  # fmt: skip
    for name, value in kinds.items():
        if gradient is not None and torch.allclose(gradient, value, rtol=1e-9, atol=1e-12):
            return name
    return "something else"


def take_steps(learner: dict) -> list[dict]:
    """Return what each of two steps with the learner's functions leaves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).double()
    parameters, steps = list(model.parameters()), []
    pending = learner["attach"](model)
    for step in (0, 1):
        Work.late = step == 0
        rows = slice(64 * step + worker.rank, 64 * step + 64, 2)
        own = torch.autograd.grad(F.cross_entropy(model(images[rows].double()), labels[rows]), parameters)
        in_background.clear()
        model.zero_grad()
        F.cross_entropy(model(images[rows].double()), labels[rows]).backward()
        during_backward = list(in_background)
        learner["finish"](pending)
        means = [mean_over_ranks(gradient) for gradient in own]
        kinds = [kind(p.grad, gradient, mean) for p, gradient, mean in zip(parameters, own, means, strict=True)]
        steps.append({"kinds": kinds, "async_ops": during_backward, "left": len(pending)})
    return steps


dist.all_reduce = all_reduce
Path(folder, f"{worker.rank}.json").write_text(json.dumps(take_steps(runpy.run_path(path))))
distributed.leave()
