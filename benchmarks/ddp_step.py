"""One process of a pair that bench_ddp.py starts. It trains on its half of each batch when it gets an order.

    torchrun --standalone --nproc-per-node 2 ddp_step.py PORT ddp      two ranks that average their gradients
    python ddp_step.py PORT independent INDEX                          INDEX 0 and 1: two that do not communicate

Both kinds run the same code below. Ranks with DDP also time all-reduces on request. Orders and results go through the
key-value store of bench_ddp.py at PORT. A process without an order sleeps.
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
    worker = distributed.join()  # without torchrun there is no process group to join
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
        order = json.loads(store.get(key))  # blocks until the order arrives
        if order is None:
            break
        if "all_reduce" in order:
            for num_bytes in order["all_reduce"]:
                seconds = time_all_reduce(num_bytes, order["times"], device)
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
    """Take one optimizer step on `accumulation` random batches. Only the last one averages gradients over the ranks."""
    optimizer.zero_grad()
    for number in range(1, accumulation + 1):
        rows = torch.randint(len(labels), (batch_size,), device=labels.device)
        skip_sync = isinstance(model, DistributedDataParallel) and number < accumulation
        with model.no_sync() if skip_sync else nullcontext():
            (F.cross_entropy(model(images[rows]), labels[rows]) / accumulation).backward()
    optimizer.step()


def time_all_reduce(num_bytes: int, times: int, device: torch.device) -> float:
    """Return the median seconds of an all-reduce of `num_bytes`, after one to warm up."""
    tensor, seconds = torch.zeros(num_bytes // 4, device=device), []
    for _ in range(times + 1):
        dist.barrier()
        started = clock(device)
        dist.all_reduce(tensor)
        seconds.append(clock(device) - started)
    return median(seconds[1:])


def clock(device: torch.device) -> float:
    """Return the time in seconds, after all work on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
