"""Train a sharded GPT, runs A to F on two ranks, and print how much memory each rank holds, for exercise 3.1b.

    torchrun --standalone --nproc-per-node 2 log_sharded_memory.py

Five of the runs contain one mistake each. `MISTAKES` below names them, so solve the exercise before you read on.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from shared import datasets, distributed, models

CONFIG = models.GPT_PRESETS["nano"]
NUM_STEPS = 3
MISTAKES = {"A": "gradients", "B": "graph", "C": "none", "D": "moments", "E": "copy", "F": "weights"}


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all tensors that were made in the `with` block and still exist."""

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and not leaf.is_meta)
        storages = [tensor.untyped_storage() for tensor in tensors]
        self.sizes |= {StorageWeakRef(storage): storage.nbytes() for storage in storages}
        return result

    def megabytes(self):
        """Return the megabytes of the tensors that exist now."""
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
        return sum(self.sizes.values()) / 1e6


def collect(collective, tensor, numel):
    """Return what a collective writes into `numel` numbers. Collective.

    gloo releases its tensors a moment after it is done, so it gets copies that nobody counts.
    """
    with _disable_current_modes():
        result = torch.empty(numel)
        collective(result, tensor.detach().clone())
    return result.clone()


class ShardedGPT:
    """A GPT of which each rank keeps an equal slice, `shard`, of all weights in a row."""

    def __init__(self, worker):
        self.worker = worker
        with torch.device("meta"):
            self.model = models.GPT(CONFIG)
        self.shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        total = sum(shape.numel() for shape in self.shapes.values())
        self.shard = nn.Parameter(0.02 * torch.randn(math.ceil(total / worker.world_size)))

    def gather(self):
        """Return the weights of all ranks in a row. Collective."""
        return collect(dist.all_gather_single, self.shard, self.worker.world_size * self.shard.numel())

    def loss(self, whole, tokens, targets):
        """Compute the loss with the gathered weights."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = whole[: sum(sizes)].split(sizes)
        weights = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        return F.cross_entropy(functional_call(self.model, weights, tokens).flatten(0, 1), targets.flatten())

    def slice_of(self, whole):
        """Return this rank's slice, a view."""
        return whole.chunk(self.worker.world_size)[self.worker.rank]


def train(worker, mistake):
    """Train with this mistake. Return the megabytes that this rank holds at four points of each step."""
    batch = [tensor.clone() for tensor in datasets.text(CONFIG.context).train[worker.rank : worker.rank + 1]]
    distributed.seed_everything(worker.rank)
    held, validation_loss = [], 0.0
    with LiveBytes() as live:
        gpt = ShardedGPT(worker)
        everything = nn.Parameter(torch.empty(0))  # what a rank with the mistake "moments" updates
        optimizer = torch.optim.AdamW([everything if mistake == "moments" else gpt.shard])
        for _ in range(NUM_STEPS):
            held.append(live.megabytes())
            whole = gpt.gather().requires_grad_()
            gpt.loss(whole, *batch).backward()
            reduce_gradients(gpt, whole, mistake)
            keeps_weights = mistake == "weights" or (mistake == "copy" and worker.rank == 0)
            whole = whole.detach() if keeps_weights else None
            held.append(live.megabytes())
            take_step(gpt, optimizer, everything, mistake)
            held.append(live.megabytes())
            gpt.shard.grad = None
            with torch.set_grad_enabled(mistake == "graph"):
                validation_loss += gpt.loss(gpt.gather().requires_grad_(mistake == "graph"), *batch)
            held.append(live.megabytes())
    return held


def reduce_gradients(gpt, whole, mistake):
    """Leave this rank's slice of the mean gradient in `shard.grad`. Collective."""
    gpt.shard.grad = collect(dist.reduce_scatter_single, whole.grad, gpt.shard.numel())
    if mistake == "gradients":
        whole.grad = collect(dist.all_gather_single, gpt.shard.grad, whole.numel())
        gpt.shard.grad = gpt.slice_of(whole.grad)  # a view, which keeps the whole gradient
    gpt.shard.grad /= gpt.worker.world_size


def take_step(gpt, optimizer, everything, mistake):
    """Update this rank's slice of the weights. With the mistake "moments" each rank updates all of them."""
    if mistake == "moments":
        everything.data = gpt.gather()
        everything.grad = collect(dist.all_gather_single, gpt.shard.grad, everything.numel())
    optimizer.step()
    if mistake == "moments":
        gpt.shard.data.copy_(gpt.slice_of(everything.data))
        everything.data, everything.grad = torch.empty(0), None


if __name__ == "__main__":
    worker = distributed.join()
    if worker.rank == 0:
        print(" |".join(["MB on each rank", *[" start  back  step   end"] * NUM_STEPS]))
    for run, mistake in MISTAKES.items():
        for rank, held in enumerate(distributed.gather_objects(train(worker, mistake))):
            if worker.rank == 0:
                numbers = [f"{megabytes:6.1f}" for megabytes in held]
                steps = ["".join(numbers[start : start + 4]) for start in range(0, len(numbers), 4)]
                print(" |".join([f"run {run}, rank {rank}  ", *steps]))
    distributed.leave()
