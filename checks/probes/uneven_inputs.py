"""Call the learner's train_epoch with streams of different lengths, of which one may fail, for exercise 2.3b.

torchrun uneven_inputs.py FOLDER FILE SIZES BROKEN_RANK

FILE defines train_epoch(ddp_model, stream, optimizer). SIZES is JSON: how many rows the batches of each rank have. The
stream of BROKEN_RANK raises ValueError after its last batch; -1 stands for none. Each rank writes to FOLDER/RANK.json
how train_epoch ended, the optimizer's steps, the weights, and those of one process that trains on the batches of all
ranks.
"""

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from shared import distributed

Batch = tuple[torch.Tensor, torch.Tensor]


def make_model() -> torch.nn.Linear:
    """Return the model in float64, with the same weights at each call."""
    torch.manual_seed(7)
    return torch.nn.Linear(64, 10).double()


def make_batches(rank: int, sizes: list[int]) -> list[Batch]:
    """Return the batches (images, labels) of a rank."""
    generator = torch.Generator().manual_seed(rank)
    images = [torch.randn(size, 64, generator=generator, dtype=torch.float64) for size in sizes]
    return [(rows, torch.randint(10, (len(rows),), generator=generator)) for rows in images]


def train_on_one_process(batches_of_ranks: list[list[Batch]]) -> list[float]:
    """Return the weights after one process has trained on the batches of all ranks."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(max(map(len, batches_of_ranks))):
        batches = [batches[step] for batches in batches_of_ranks if step < len(batches)]
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.weight.flatten().tolist()


def stream(batches: list[Batch], is_broken: bool) -> Iterator[Batch]:
    yield from batches
    if is_broken:
        raise ValueError("cannot read image 71")


folder, path, sizes, broken_rank = sys.argv[1:]
worker, steps = distributed.join(timeout_s=20), []
batches_of_ranks = [make_batches(rank, of_rank) for rank, of_rank in enumerate(json.loads(sizes))]
expected = train_on_one_process(batches_of_ranks)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.register_step_post_hook(lambda *_: steps.append(1))
train_epoch = runpy.run_path(path)["train_epoch"]
own_stream = stream(batches_of_ranks[worker.rank], worker.rank == int(broken_rank))
try:
    train_epoch(DistributedDataParallel(model), own_stream, optimizer)
    ending = "returns"
except ValueError:
    ending = "ValueError"
except RuntimeError as error:  # of a collective that the other rank has not joined
    ending = f"RuntimeError: {error}".partition(". ")[0]  # its first sentence
weights = model.weight.flatten().tolist()
report = {"ending": ending, "steps": len(steps), "weights": weights, "expected": expected}
Path(folder, f"{worker.rank}.json").write_text(json.dumps(report))
distributed.leave()
