"""Train a GPT that the learner's function shards, and measure a step's memory and traffic, for exercise 3.5a.

torchrun sharded_gpt.py FOLDER FILE

FILE defines shard(model). Each rank writes to FOLDER/RANK.json its peak of memory, the bytes it sends, its collectives,
and how far the gradients are from those of one process.
"""

import json
import runpy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from shared import datasets, distributed, measure, models

folder, path = sys.argv[1:]
worker = distributed.join()
config = models.GPTConfig(num_layers=8, num_heads=4, dim=64, context=32)
inputs, targets = (tensor[:4] for tensor in datasets.text(config.context).train.tensors)
own = slice(worker.rank, None, worker.world_size)
plain, model = models.GPT(config).double(), models.GPT(config).double()
for each in (plain, model):
    models.init_weights(each, seed=0)
callable_model = runpy.run_path(path)["shard"](model) or model  # DistributedDataParallel returns a new module
optimizer = torch.optim.AdamW(model.parameters())


def forward_and_backward(module: torch.nn.Module, rows: slice) -> None:
    F.cross_entropy(module(inputs[rows]).flatten(0, 1), targets[rows].flatten()).backward()


forward_and_backward(plain, slice(None))
traffic, peaks = measure.Traffic(), []
with traffic:
    forward_and_backward(callable_model, own)
whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
apart = max((a - p.grad).abs().max().item() for a, p in zip(whole, plain.parameters(), strict=True))
del whole, plain
optimizer.step()  # from here on there are moments
optimizer.zero_grad()
for _ in range(5):  # the moment at which a finished gather is freed varies a little: take the lowest of five peaks
    memory = measure.PeakMemory(worker.device)
    memory.start(*measure.state_tensors(model, optimizer))
    forward_and_backward(callable_model, own)
    optimizer.step()
    optimizer.zero_grad()
    peaks.append(memory.stop())
report = {"peak": min(peaks), "sent": sum(traffic.sent.values()), "calls": traffic.calls, "apart": apart}
Path(folder, f"{worker.rank}.json").write_text(json.dumps(report))
distributed.leave()
