"""Train with DDP's own all-reduce and with the learner's communication hook, for exercise 4.8a.

torchrun --nproc-per-node 2 hook_on_trial.py FOLDER FILE

FILE defines make_state() and hook(state, bucket). Both runs start from the same weights and see the same batches. DDP
uses two buckets or more, and regroups them after the first step. Each rank writes to FOLDER/RANK.json, for both runs,
the loss of the global batch in each step, the bytes that it sent per step and how far its weights are from rank 0's,
and for the hook how much arrives of a gradient that is the same in each step.
"""

import json
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shared import datasets, distributed, measure, models

WIDTH, STEPS, BATCH_SIZE, REPEATS = 384, 60, 64, 40


def train(make_state, hook) -> dict:
    """Train for STEPS steps, and return this rank's report."""
    images, labels = datasets.digits().train.tensors
    distributed.seed_everything(7)
    ddp_model = DistributedDataParallel(models.MLP(64, WIDTH, dropout=0), bucket_cap_mb=0.2)
    ddp_model.register_comm_hook(make_state(), hook)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.15)
    losses = []
    dist.barrier()
    sent = measure.tcp_bytes_sent()
    for _ in range(STEPS):
        rows = torch.randperm(len(images))[:BATCH_SIZE][dist.get_rank() :: dist.get_world_size()]
        loss = F.cross_entropy(ddp_model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dist.barrier()
    sent = (measure.tcp_bytes_sent() - sent) / STEPS
    losses = (distributed.global_sum(torch.tensor(losses)) / dist.get_world_size()).tolist()
    weights = torch.nn.utils.parameters_to_vector(ddp_model.parameters()).detach()
    apart = (weights - distributed.from_rank_zero(weights)).abs().max().item()
    return {"losses": losses, "sent": sent, "apart": apart}


def arriving_part(make_state, hook) -> float:
    """Average what arrives of one gradient in REPEATS steps, and return how much of the gradient this is.

    That is the scalar product with the gradient's mean over the ranks, divided by its squared norm: 1 for DDP's own
    all-reduce, less for a hook that still remembers a part, and the world size for a hook that adds up.
    """
    own_rows = slice(dist.get_rank(), BATCH_SIZE, dist.get_world_size())
    images, labels = datasets.digits().train[own_rows]
    distributed.seed_everything(7)
    model = models.MLP(64, WIDTH, dropout=0)
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=0.2)
    ddp_model.register_comm_hook(make_state(), hook)
    arrived = []
    for _ in range(REPEATS):
        model.zero_grad()
        F.cross_entropy(ddp_model(images), labels).backward()
        arrived.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    own = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    mean = distributed.global_sum(own) / dist.get_world_size()
    return (torch.stack(arrived).mean(dim=0) @ mean / (mean @ mean)).item()


if __name__ == "__main__":
    folder, path = sys.argv[1:]
    worker = distributed.join(timeout_s=30)
    answer = runpy.run_path(path)
    report = {"float32": train(lambda: None, allreduce_hook), "hook": train(answer["make_state"], answer["hook"])}
    report["hook"]["arrives"] = arriving_part(answer["make_state"], answer["hook"])
    Path(folder, f"{worker.rank}.json").write_text(json.dumps(report))
    distributed.leave()
