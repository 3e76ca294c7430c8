"""Count the all-reduces made by three ways of accumulating gradients: for lesson 1.4.

torchrun --standalone --nproc-per-node 2 count_all_reduces.py ACCUMULATE.py RESULT.pt

ACCUMULATE.py defines accumulate(ddp_model, images, labels, parts, sync_each). RESULT.pt gets, for each way, rank 0's
gradients and the number of all-reduces. The model computes in float64, where its gradients fill two buckets.
"""

import runpy
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shared import datasets, distributed, models

WAYS = {"one batch": (1, True), "four parts, no_sync": (4, False), "four parts, sync each": (4, True)}


def count(calls: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Note the bucket, then do what DDP does without a hook: one all-reduce."""
    calls.append(bucket.index())
    return allreduce_hook(None, bucket)


def main(accumulate_path: str, result_path: str) -> None:
    accumulate = runpy.run_path(accumulate_path)["accumulate"]
    worker = distributed.join()
    distributed.seed_everything(7)
    model = models.resnet8().to(worker.device, torch.float64)
    ddp_model = DistributedDataParallel(model)
    calls = []
    ddp_model.register_comm_hook(calls, count)
    shard = slice(worker.rank, 32, worker.world_size)
    images, labels = (tensor[shard].to(worker.device) for tensor in datasets.digits().train.tensors)
    images = images.double()
    # DDP regroups its buckets once, after its first backward pass. Do that before counting.
    distributed.warm_up_ddp_buckets(ddp_model, lambda: ddp_model(images[:0]).sum())
    results = {}
    for way, (parts, sync_each) in WAYS.items():
        calls.clear()
        model.zero_grad()
        accumulate(ddp_model, images, labels, parts, sync_each)
        results[way] = [parameter.grad.clone() for parameter in model.parameters()], len(calls)
    if worker.rank == 0:
        torch.save(results, result_path)
    distributed.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
