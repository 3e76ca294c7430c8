"""The training function of lesson 4.5's job. Every worker runs it."""

import os
from pathlib import Path

import ray.train
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from shared import checkpoint, distributed


def train(config: dict) -> dict[int, float]:
    """Train from the saved step to the last one, and return the loss of each step."""
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    images, labels = torch.load(Path(__file__).with_name("digits.pt"))
    files = [Path(folder).expanduser() / "newest.pt" for folder in config["save_to"]]
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10, dtype=torch.float64)
    done = 0
    if rank == 0 and files[0].exists():
        state = checkpoint.load(files[0])
        model.load_state_dict(state["model"])
        done = state["step"]
    done = distributed.from_rank_zero(done)
    print(f"rank {rank} on machine {os.environ['MACHINE']} continues after step {done}")

    ddp_model = DistributedDataParallel(model)  # sends rank 0's weights to all ranks
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.5)
    losses = {}
    for step in range(done + 1, config["steps"] + 1):
        batch = torch.arange(64 * step + rank, 64 * (step + 1), world_size) % len(images)  # this rank's part
        loss = cross_entropy(ddp_model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = float(distributed.global_sum(loss)) / world_size
    if rank == 0:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.save_atomically({"model": model.state_dict(), "step": config["steps"]}, file)
    return losses
