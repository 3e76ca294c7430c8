"""Train a GPT with FSDP2, runs A to E on two ranks, and print the ranks' logs, for exercise 3.2a.

    torchrun --standalone --nproc-per-node 2 log_fsdp2_steps.py

Four of the runs contain one mistake each. `MISTAKES` below names them, so solve the exercise before you read on.
"""

import warnings

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from shared import datasets, distributed, measure, models

MISTAKES = {"A": "blocks only", "B": "own norm", "C": "none", "D": "root only", "E": "optimizer first"}
CONFIG = models.GPT_PRESETS["nano"]
NUM_STEPS, BATCH_SIZE, MAX_NORM = 3, 8, 0.5


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of `tensor` that is on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(worker: distributed.Worker, mistake: str) -> str:
    """Train on one batch, again and again, with this mistake. Return this rank's log."""
    model = models.GPT(CONFIG)
    models.init_weights(model, seed=7)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if mistake == "optimizer first":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = {"blocks only": [*model.blocks], "root only": [model]}.get(mistake, [*model.blocks, model])
    for part in parts:
        fully_shard(part)
    if mistake != "optimizer first":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = datasets.text(CONFIG.context).train[:BATCH_SIZE]
    tokens, targets = (part[worker.rank :: worker.world_size].clone() for part in batch)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = None  # even where the optimizer does not know the parameter
        with CommDebugMode() as communication:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        losses.append(loss.item())
        own_squares = sum(local(parameter.grad).square().sum() for parameter in model.parameters())
        squares = own_squares if mistake == "own norm" else distributed.global_sum(own_squares)
        factor = min(1.0, MAX_NORM / squares.sqrt().item())
        for parameter in model.parameters():
            local(parameter.grad).mul_(factor)
        optimizer.step()
    gathers = sum(number for call, number in communication.get_comm_counts().items() if "allgather" in str(call))
    state = measure.state_bytes(model, optimizer) / num_parameters
    weight = model.tokens.weight
    checksum = (weight.full_tensor() if isinstance(weight, DTensor) else weight).sum().item()
    return (
        f"rank {worker.rank}  losses {' '.join(f'{loss:.3f}' for loss in losses)}  gradients x {factor:.3f}  "
        f"state {state:.1f} B/parameter  all-gathers {gathers:2}  embedding {checksum:.4f}"
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # CommDebugMode makes the output a view
    worker = distributed.join()
    for run, mistake in MISTAKES.items():
        logs = distributed.gather_objects(train(worker, mistake))
        if worker.rank == 0:
            print("\n  ".join([f"run {run}", *logs]))
    distributed.leave()
