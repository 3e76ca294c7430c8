"""One rank of bench_network.py: it works through a list of orders, and rank 0 writes the measurements.

    network_ranks.py ORDERS.json RESULTS.json

An order is {"do": "train", "mbit", "way", "steps", "bucket_mb"} for two nodes with one rank each, or
{"do": "sum", "mbit", "numbers", "times", "way": "flat" or "hierarchical"} for two nodes with two ranks each.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from shared import datasets, distributed, models

WIRE = os.environ.get("GLOO_SOCKET_IFNAME") == "wire"  # two_nodes.sh sets it
WARMUP, PERIOD, BATCH_SIZE = 8, 4, 64  # the batch size is over both ranks


def main(orders: str, results: str) -> None:
    worker = distributed.join()
    groups = None
    if worker.world_size == 4:
        within_node, _ = dist.new_subgroups(group_size=2)
        across_nodes, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        groups = within_node, across_nodes
    done = []
    for order in json.loads(Path(orders).read_text()):
        set_rate(order["mbit"])
        measured = train(order) if order["do"] == "train" else time_sum(order, *groups)
        done.append({**order, **measured})
        if worker.rank == 0:
            print(f"{order['mbit']} Mbit/s, {order['way']}: {measured['ms']:.1f} ms", flush=True)
            Path(results).write_text(json.dumps(done))
    distributed.leave()


def set_rate(mbit: int) -> None:
    """Limit this node's end of the wire to `mbit` Mbit/s."""
    if WIRE:
        limit = f"tbf rate {mbit}mbit burst 64kb latency 1s"
        subprocess.run(["tc", "qdisc", "replace", "dev", "wire", "root", *limit.split()], check=True)


def sent_bytes() -> int:
    """Return the bytes that this node has sent over the wire, by the kernel's count. Collective."""
    dist.barrier()  # everything before it has been sent by now
    lines = Path("/proc/net/dev").read_text().splitlines() if WIRE else []
    return sum(int(line.split()[9]) for line in lines if line.strip().startswith("wire:"))


def comm_hook(way: str) -> tuple:
    """Return the arguments of `register_comm_hook` for this way of sending gradients."""
    if way == "local SGD 4":
        single_rank, _ = dist.new_subgroups(group_size=1)
        return PostLocalSGDState(None, single_rank, start_localSGD_iter=WARMUP), post_localSGD_hook
    if "PowerSGD" in way:
        state = PowerSGDState(None, matrix_approximation_rank=int(way[-1]), start_powerSGD_iter=WARMUP)
        return state, default_hooks.fp16_compress_wrapper(powerSGD_hook) if way.startswith("fp16") else powerSGD_hook
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    return None, hooks.get(way, default_hooks.allreduce_hook)


def train(order: dict) -> dict:
    """Train, and return milliseconds and bytes per batch after the warm-up."""
    way, steps = order["way"], order["steps"]
    distributed.seed_everything(0)
    images, labels = datasets.digits().train.tensors
    # PowerSGD needs one bucket: its hook waits inside a callback, and gloo has two threads for all buckets' callbacks.
    model = DistributedDataParallel(models.MLP(64, 768, dropout=0), bucket_cap_mb=order["bucket_mb"])
    model.register_comm_hook(*comm_hook(way))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15)
    if way == "local SGD 4":
        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(PERIOD, warmup_steps=WARMUP))
    accumulation = PERIOD if way == "accumulate 4" else 1
    for step in range(WARMUP + steps):
        if step == WARMUP:
            before, started = sent_bytes(), time.perf_counter()
        rows = torch.randperm(len(images))[:BATCH_SIZE][dist.get_rank() :: 2]
        is_last = (step + 1) % accumulation == 0
        with nullcontext() if is_last else model.no_sync():
            (F.cross_entropy(model(images[rows]), labels[rows]) / accumulation).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    wire = (sent_bytes() - before) / steps
    return {"ms": 1e3 * (time.perf_counter() - started) / steps, "wire": wire}


def time_sum(order: dict, within_node: dist.ProcessGroup, across_nodes: dist.ProcessGroup) -> dict:
    """Sum float32 numbers over all ranks, and return milliseconds and the bytes that the first node sent."""
    total = torch.randn(order["numbers"])
    part = total.new_empty(len(total) // 2)

    def hierarchical() -> None:
        dist.reduce_scatter_tensor(part, total, group=within_node)
        dist.all_reduce(part, group=across_nodes)
        dist.all_gather_into_tensor(total, part, group=within_node)

    reduce = hierarchical if order["way"] == "hierarchical" else lambda: dist.all_reduce(total)
    reduce()  # opens the connections
    before, started = sent_bytes(), time.perf_counter()
    for _ in range(order["times"]):
        reduce()
    wire = (sent_bytes() - before) / order["times"]
    return {"ms": 1e3 * (time.perf_counter() - started) / order["times"], "wire": wire}


if __name__ == "__main__":
    main(*sys.argv[1:])
