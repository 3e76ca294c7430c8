"""Compare two ranks with one process for GroupNorm, BatchNorm and a BatchNorm with global statistics.

Lesson 1.3 starts it with torchrun on two ranks. Rank 0 writes the differences to the JSON file named on the command
line. `GlobalBatchNorm` shows what `torch.nn.SyncBatchNorm`, which runs only on GPUs, does.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared import datasets, distributed, models


class GlobalSum(torch.autograd.Function):
    """Sum a tensor over all ranks, in the forward and in the backward pass.

    Each rank's tensor enters the loss of every rank, so its gradient is the sum of all ranks' gradients. The gradient
    of an all-reduce is an all-reduce.
    """

    @staticmethod
    def forward(ctx, local):
        return distributed.global_sum(local)

    @staticmethod
    def backward(ctx, gradient):
        return distributed.global_sum(gradient)


class GlobalBatchNorm(nn.BatchNorm2d):
    """Normalize with mean and variance over the samples of all ranks."""

    def forward(self, x):  # (samples, channels, height, width)
        if not self.training:
            return super().forward(x)
        count = x.new_full((x.shape[1],), x.numel() / x.shape[1])  # values per channel, on this rank
        totals = torch.stack([count, x.sum(dim=(0, 2, 3)), x.square().sum(dim=(0, 2, 3))])
        count, total, squares = GlobalSum.apply(totals)
        mean = total / count
        variance = squares / count - mean.square()
        with torch.no_grad():  # the running averages, for evaluation
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = self.weight / torch.sqrt(variance + self.eps)
        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


def convert(module):
    """Replace every BatchNorm2d of an untrained model with a new GlobalBatchNorm."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, GlobalBatchNorm(child.num_features))
        convert(child)


def build(norm, seed, global_statistics=False):
    """Build ResNet-18 in float64, with the same weights on every rank."""
    distributed.seed_everything(seed)
    model = models.resnet18(norm=norm)
    if global_statistics:
        convert(model)
    return model.double()


def loss_and_gradient(network, model, images, labels):
    """Return the mean loss, and its gradient as one vector."""
    model.zero_grad()
    loss = nn.functional.cross_entropy(network(images), labels)
    loss.backward()
    return loss.detach(), nn.utils.parameters_to_vector(parameter.grad for parameter in model.parameters())


def compare(worker, seed, images, labels, norm, global_statistics=False):
    """Return how far two ranks' loss and gradient are from one process's, on one batch.

    The gradient's error is relative to the gradient's length.
    """
    model = build(norm, seed)
    loss, gradient = loss_and_gradient(model, model, images, labels)  # one process with the whole batch
    model = build(norm, seed, global_statistics)
    own, own_labels = images[worker.rank :: 2], labels[worker.rank :: 2]
    rank_loss, averaged = loss_and_gradient(DistributedDataParallel(model), model, own, own_labels)
    loss_error = (distributed.global_sum(rank_loss) / 2 - loss).abs().item()
    return loss_error, ((averaged - gradient).norm() / gradient.norm()).item()


@torch.no_grad()
def loss_error(worker, seed, images, labels, norm, per_rank):
    """Return how far two ranks' mean loss is from one process's, averaged over batches.

    Each batch has `per_rank` images per rank.
    """
    model, errors = build(norm, seed), []
    for x, y in zip(images.split(2 * per_rank), labels.split(2 * per_rank), strict=True):
        whole = nn.functional.cross_entropy(model(x), y)
        half = nn.functional.cross_entropy(model(x[worker.rank :: 2]), y[worker.rank :: 2])
        errors.append((distributed.global_sum(half) / 2 - whole).abs().item())
    return sum(errors) / len(errors)


def difference_to_next_batch(seed, images, labels, size):
    """Return how far the loss and gradient of the second `size` images are from those of the first, in one process."""
    model = build("batch", seed)
    loss, gradient = loss_and_gradient(model, model, images[:size], labels[:size])
    next_loss, next_gradient = loss_and_gradient(model, model, images[size : 2 * size], labels[size : 2 * size])
    return (next_loss - loss).abs().item(), ((next_gradient - gradient).norm() / gradient.norm()).item()


@torch.no_grad()
def buffer_gaps(worker, seed, images):
    """Return how far any rank's buffers are from rank 0's after a forward pass in DDP, and after `broadcast_buffers`.

    Each rank gets its own half of the images.
    """
    model, gaps = build("batch", seed), []
    DistributedDataParallel(model)(images[worker.rank :: 2])
    for _ in range(2):
        buffers = torch.cat([buffer.flatten().double() for buffer in model.buffers()])
        gaps.append(distributed.global_max((buffers - distributed.from_rank_zero(buffers)).abs().max().item()))
        distributed.broadcast_buffers(model)
    return gaps


def main(path: Path) -> None:
    worker, seed = distributed.join(), int(os.getenv("SEED", "7"))
    images, labels = datasets.load("digits").train.tensors
    images, labels = images[:64].double(), labels[:64]
    by_size = {
        f"BatchNorm, {size} images per rank": loss_error(worker, seed, images, labels, "batch", size)
        for size in (32, 8, 2)
    }
    by_size["GroupNorm, 2 images per rank"] = loss_error(worker, seed, images, labels, "group", 2)
    batch = images[:32], labels[:32]
    results = {
        "GroupNorm": compare(worker, seed, *batch, "group"),
        "BatchNorm": compare(worker, seed, *batch, "batch"),
        "global BatchNorm": compare(worker, seed, *batch, "batch", global_statistics=True),
        "the next batch": difference_to_next_batch(seed, images, labels, 32),
    }
    gaps = buffer_gaps(worker, seed, images[:32])
    try:
        DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(models.resnet18(norm="batch")))
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    if worker.rank == 0:
        path.write_text(json.dumps({"by size": by_size, "errors": results, "refusal": refusal, "buffers": gaps}))
    distributed.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
