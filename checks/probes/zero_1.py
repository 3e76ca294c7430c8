"""Take three steps with the learner's ZeRO-1 optimizer, next to AdamW on one process, for exercise 3.1c.

torchrun zero_1.py FOLDER FILE

FILE defines make_optimizer(model) and step(model, optimizer). Each rank writes to FOLDER/RANK.json, for each step, how
many parameters equal those of one process with the mean, the sum or its own gradient, how many are unchanged, and how
many still have a gradient; and the share of the moments that it keeps.
"""

import copy
import json
import runpy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from shared import datasets, distributed, measure, models

folder, path = sys.argv[1:]
worker = distributed.join(timeout_s=20)
learner = runpy.run_path(path)
model = models.GPT(models.GPT_PRESETS["nano"]).double()
models.init_weights(model, seed=7)
start = [parameter.detach().clone() for parameter in model.parameters()]
# Three models on one process, each updated with a different gradient: which of them does the learner's equal?
others = {kind: copy.deepcopy(model) for kind in ("mean", "sum", "own")}
adams = [torch.optim.AdamW(other.parameters(), lr=1e-3) for other in others.values()]


def set_gradients(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor, factor: int = 1) -> None:
    model.zero_grad()
    (factor * F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())).backward()


def is_equal(parameter: torch.Tensor, other: torch.Tensor) -> bool:
    return (parameter - other).abs().max().item() < 1e-9


optimizer = learner["make_optimizer"](model)
if not isinstance(optimizer, torch.optim.Optimizer):
    raise TypeError(f"make_optimizer should return an optimizer, not {optimizer!r}")
windows, steps = datasets.text(64).train, []
for step in range(3):
    first = 2 * worker.world_size * step
    tokens, targets = windows[first : first + 2 * worker.world_size]
    own = slice(worker.rank, None, worker.world_size)
    F.cross_entropy(model(tokens[own]).flatten(0, 1), targets[own].flatten()).backward()
    learner["step"](model, optimizer)
    set_gradients(others["mean"], tokens, targets)
    set_gradients(others["sum"], tokens, targets, worker.world_size)
    set_gradients(others["own"], tokens[own], targets[own])
    for adam in adams:
        adam.step()
    parameters = list(model.parameters())
    equal = {kind: sum(map(is_equal, parameters, other.parameters())) for kind, other in others.items()}
    unchanged = sum(map(torch.equal, parameters, start))
    left = sum(p.grad is not None and bool(p.grad.any()) for p in parameters)
    steps.append({"equal": equal, "unchanged": unchanged, "gradients": left, "parameters": len(parameters)})
moments = [value for state in optimizer.state.values() for value in state.values() if value.dim() > 0]
share = measure.storage_bytes(moments) / (16 * sum(parameter.numel() for parameter in model.parameters()))
Path(folder, f"{worker.rank}.json").write_text(json.dumps({"steps": steps, "share": share}))
distributed.leave()
