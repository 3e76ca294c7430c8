"""One process of a pair that bench_ddp.py sets to work: it trains on its half of each batch when it is told to.

    torchrun --standalone --nproc-per-node 2 ddp_step.py PORT ddp      two ranks that average their gradients
    python ddp_step.py PORT independent INDEX                          INDEX 0 and 1: two that do not communicate

Both kinds run the same code below; ranks with DDP also time all-reduces when they are told to. Orders come, and results
go, through bench_ddp.py's key-value store at PORT; a process without an order sleeps.
"""

import json
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import count
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from shared import datasets, distributed, models


def main(port: int, side: str, index: int = 0) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(hours=1))
    worker = distributed.join()  # under plain `python` this joins nothing
    index = worker.rank if side == "ddp" else index
    device = torch.device("cuda", index) if torch.cuda.is_available() else torch.device("cpu")
    distributed.seed_everything(0)
    model = models.resnet18().to(device).train()
    if side == "ddp":  # as in train_ddp.py
        device_ids = [device] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, labels = (tensor[index::2].to(device) for tensor in datasets.digits().train.tensors)

    for turn in count():
        key = f"{side}-{turn}"
        order = json.loads(store.get(key))  # blocks until it is there
        if order is None:
            break
        if "all_reduce" in order:
            for num_bytes in order["all_reduce"]:
                seconds = all_reduce(num_bytes, order["times"], device)
                store.set(f"{key}-{num_bytes}-{index}", str(seconds))
            continue
        batch_size, accumulation, steps = order
        step(model, optimizer, images, labels, batch_size)  # warm-up
        if store.add(f"{key}-ready", 1) == 2:  # both processes of the pair start together
            store.set(f"{key}-go", "")
        store.get(f"{key}-go")
        started = clock(device)
        for _ in range(steps):
            step(model, optimizer, images, labels, batch_size, accumulation)
        store.set(f"{key}-rate-{index}", str(steps * batch_size * accumulation / (clock(device) - started)))
    distributed.leave()


def step(model, optimizer, images, labels, batch_size: int, accumulation: int = 1) -> None:
    """One optimizer step on `accumulation` random batches; gradients are averaged over the ranks in the last alone."""
    optimizer.zero_grad()
    for part in range(1, accumulation + 1):
        rows = torch.randint(len(labels), (batch_size,), device=labels.device)
        silent = isinstance(model, DistributedDataParallel) and part < accumulation
        with model.no_sync() if silent else nullcontext():
            (F.cross_entropy(model(images[rows]), labels[rows]) / accumulation).backward()
    optimizer.step()


def all_reduce(num_bytes: int, times: int, device: torch.device) -> float:
    """The median of the seconds that an all-reduce of so many bytes takes, after one that warms up."""
    tensor, seconds = torch.zeros(num_bytes // 4, device=device), []
    for _ in range(times + 1):
        dist.barrier()
        started = clock(device)
        dist.all_reduce(tensor)
        seconds.append(clock(device) - started)
    return median(seconds[1:])


def clock(device: torch.device) -> float:
    """Seconds, once all work on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
