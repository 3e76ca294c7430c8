"""Train with DDP, runs A to E on two ranks, and print each epoch's log, for exercise 1.3a.

    torchrun --standalone --nproc-per-node 2 log_ddp_epochs.py

Four of the runs contain one mistake each. `MISTAKES` below names them, so solve the exercise before you read on.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shared import datasets, distributed, sampling

NUM_SAMPLES, GLOBAL_BATCH, NUM_EPOCHS = 101, 20, 2
MISTAKES = {"A": "own accuracy", "B": "none", "C": "bare model", "D": "padding", "E": "no set_epoch"}


def train(worker, mistake):
    """Train for two epochs with this mistake. Return the lines of this rank's log."""
    splits = datasets.load("digits")
    images, labels = (tensor[:NUM_SAMPLES] for tensor in splits.train.tensors)
    train_set = TensorDataset(images, labels, torch.arange(NUM_SAMPLES))
    val_images, val_labels = (tensor[worker.rank : 255 : 2] for tensor in splits.val.tensors)
    counts = sampling.global_batch_counts(NUM_SAMPLES, GLOBAL_BATCH)
    distributed.seed_everything(7)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    ddp_model = DistributedDataParallel(model)
    network = model if mistake == "bare model" else ddp_model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    make_sampler = DistributedSampler if mistake == "padding" else sampling.UnpaddedDistributedSampler
    sampler = make_sampler(train_set, worker.world_size, worker.rank, seed=7)
    loader, lines = DataLoader(train_set, GLOBAL_BATCH // worker.world_size, sampler=sampler), []
    for epoch in range(NUM_EPOCHS):
        if mistake != "no set_epoch":
            sampler.set_epoch(epoch)
        seen = []
        for count, (x, y, numbers) in zip(counts, sampling.even_batches(loader, len(counts)), strict=True):
            loss = F.cross_entropy(network(x), y, reduction="sum") / count * worker.world_size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += numbers.tolist()
        hit = model(val_images).argmax(dim=1) == val_labels
        totals = torch.tensor([hit.sum(), len(hit)])
        hits, samples = totals if mistake == "own accuracy" else distributed.global_sum(totals)
        weights = sum(parameter.sum().item() for parameter in model.parameters())
        first = " ".join(f"{number:2}" for number in seen[:4])
        lines.append(
            f"rank {worker.rank}  epoch {epoch}  trained on {first} ... ({len(seen)} samples)  "
            f"sum of weights {weights:9.6f}  accuracy {hits / samples:.4f}"
        )
    return lines


if __name__ == "__main__":
    worker = distributed.join()
    for run, mistake in MISTAKES.items():
        logs = distributed.gather_objects(train(worker, mistake))
        if worker.rank == 0:
            print(f"run {run}", *(line for log in logs for line in log), sep="\n  ")
    distributed.leave()
