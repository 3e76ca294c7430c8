"""Call the learner's train_epoch with inputs of different lengths, for exercises 1.3c and 2.3b.

torchrun uneven_inputs.py FOLDER FILE SIZES [BROKEN_RANK]

FILE defines train_epoch(ddp_model, batches, optimizer). SIZES is JSON: how many rows the batches of each rank have. The
batches are a list, or a stream if BROKEN_RANK is given. The stream of that rank raises ValueError after its last batch;
-1 stands for none. Each rank writes to FOLDER/RANK.json how train_epoch ended, what it returned, the optimizer's steps
and the weights, and the weights and mean loss of one process that trains on the batches of all ranks.
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


def train_on_one_process(batches_of_ranks: list[list[Batch]]) -> tuple[list[float], float]:
    """Return the weights after one process has trained on the batches of all ranks, and the mean loss of all rows."""
    model = make_model()
    optimizer, loss_sum, rows = torch.optim.SGD(model.parameters(), lr=0.1), 0.0, 0
    for step in range(max(map(len, batches_of_ranks))):
        batches = [batches[step] for batches in batches_of_ranks if step < len(batches)]
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        loss_sum, rows = loss_sum + loss.item() * len(labels), rows + len(labels)
    return model.weight.flatten().tolist(), loss_sum / rows


def stream(batches: list[Batch], is_broken: bool) -> Iterator[Batch]:
    yield from batches
    if is_broken:
        raise ValueError("cannot read image 71")


def number(value: object) -> float | str:
    """Return what train_epoch returned as a number, or how Python shows it if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return repr(value)


folder, path, sizes, *broken_rank = sys.argv[1:]
worker, steps, returned = distributed.join(timeout_s=20), [], None
batches_of_ranks = [make_batches(rank, of_rank) for rank, of_rank in enumerate(json.loads(sizes))]
expected, expected_loss = train_on_one_process(batches_of_ranks)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.register_step_post_hook(lambda *_: steps.append(1))
train_epoch = runpy.run_path(path)["train_epoch"]
batches = batches_of_ranks[worker.rank]
if broken_rank:
    batches = stream(batches, worker.rank == int(broken_rank[0]))
try:
    returned = train_epoch(DistributedDataParallel(model), batches, optimizer)
    ending = "returns"
except ValueError:
    ending = "ValueError"
except RuntimeError as error:  # of a collective that the other rank has not joined
    ending = f"RuntimeError: {error}".partition(". ")[0]  # its first sentence
weights = model.weight.flatten().tolist()
report = {"ending": ending, "returned": number(returned), "steps": len(steps), "weights": weights}
report |= {"expected": expected, "expected_loss": expected_loss}
Path(folder, f"{worker.rank}.json").write_text(json.dumps(report))
distributed.leave()
