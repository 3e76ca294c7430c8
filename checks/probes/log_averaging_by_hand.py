"""Train with gradients averaged by hand, runs A to D on two ranks, and print each step's log, for exercise 1.2a.

    torchrun --standalone --nproc-per-node 2 log_averaging_by_hand.py

Some of the runs have a fault, and `FAULTS` below names it. Solve the exercise before you read on.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shared import datasets, distributed

FAULTS = {"A": "weights", "B": "summed", "C": "samples", "D": "correct"}
NUM_SAMPLES, BATCH_SIZE, LR = 16, 8, 0.1


def train(name: str, fault: str, rank: int, world_size: int) -> list[str]:
    """Train a linear model with the fault, and return one line per step. A world size of 1 needs no process group."""
    images, labels = datasets.load("digits").train[:NUM_SAMPLES]
    torch.manual_seed(rank if fault == "weights" else 0)
    model = torch.nn.Linear(64, 10).double()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    shuffle = torch.Generator().manual_seed(rank if fault == "samples" else 0)
    shard = torch.randperm(NUM_SAMPLES, generator=shuffle)[rank::world_size]
    lines = []
    for step, batch in enumerate(shard.split(BATCH_SIZE // world_size), start=1):
        before = torch.nn.utils.parameters_to_vector(model.parameters()).norm().item()
        loss = F.cross_entropy(model(images[batch].flatten(1).double()), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        if world_size > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                if fault != "summed":
                    parameter.grad /= world_size
        optimizer.step()
        after = torch.nn.utils.parameters_to_vector(model.parameters()).norm().item()
        numbers = " ".join(f"{sample:2}" for sample in batch.tolist())
        lines.append(f"{name:11}  step {step}  weights {before:.4f} -> {after:.4f}  loss {loss:.4f}  samples {numbers}")
    return lines


def main() -> None:
    """Print the log of one process, then the log of each run, ordered by step and rank."""
    worker = distributed.join()
    if worker.rank == 0:
        print(*train("one process", "correct", 0, 1), sep="\n")
    for run, fault in FAULTS.items():
        lines = train(f"{run}, rank {worker.rank}", fault, worker.rank, worker.world_size)
        logs = distributed.gather_objects(lines)
        if worker.rank == 0:
            print()
            for of_one_step in zip(*logs, strict=True):
                print(*of_one_step, sep="\n")
    distributed.leave()


if __name__ == "__main__":
    main()
