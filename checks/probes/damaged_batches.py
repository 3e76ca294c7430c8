"""Call the learner's train_epoch with damaged batches, for exercise 5.1a.

torchrun damaged_batches.py FOLDER FILE

FILE defines train_epoch(ddp_model, batches, optimizer). A damaged batch holds NaN. Each rank writes a list to
FOLDER/RANK.json: for each case the damaged steps of each rank, how train_epoch ended, what it returned, the optimizer's
steps, and the largest difference from the weights of one process that never sees the damaged steps. The list ends after
the first case that goes wrong.
"""

import json
import runpy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from shared import distributed

NUM_STEPS, ROWS = 5, 8
CASES = ([[1], [3]], [[], []], [[0, 4], [0]], [[], [2, 3]])  # the damaged steps of each rank, counted from 0


def make_model() -> torch.nn.Linear:
    """Return the model in float64, with the same weights at each call."""
    torch.manual_seed(7)
    return torch.nn.Linear(64, 10).double()


def make_batches(rank: int, damaged: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches (images, labels) of a rank."""
    generator, batches = torch.Generator().manual_seed(rank), []
    for step in range(NUM_STEPS):
        images = torch.randn(ROWS, 64, generator=generator, dtype=torch.float64)
        batches.append((images, torch.randint(10, (ROWS,), generator=generator)))
        if step in damaged:
            images[3, 5] = torch.nan
    return batches


def train_on_one_process(case: list[list[int]]) -> torch.Tensor:
    """Return the weights after one process has trained on the batches of all ranks, without the damaged steps."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of_ranks = [make_batches(rank, damaged) for rank, damaged in enumerate(case)]
    for step in sorted(set(range(NUM_STEPS)).difference(*case)):
        images, labels = (torch.cat(parts) for parts in zip(*(batches[step] for batches in of_ranks), strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.weight


folder, path = sys.argv[1:]
worker, reports = distributed.join(timeout_s=10), []
train_epoch = runpy.run_path(path)["train_epoch"]
for case in CASES:
    model, steps, returned = make_model(), [], None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
    batches = make_batches(worker.rank, case[worker.rank])
    try:
        returned = train_epoch(DistributedDataParallel(model), batches, optimizer)
        ending = "returns"
    except RuntimeError as error:  # of a collective that the other rank has not joined
        ending = f"RuntimeError: {error}".partition(". ")[0]  # its first sentence
    gap = (model.weight - train_on_one_process(case)).abs().max().item()
    returned = returned if isinstance(returned, int) else repr(returned)
    reports.append({"case": case, "ending": ending, "returned": returned, "steps": len(steps), "gap": gap})
    Path(folder, f"{worker.rank}.json").write_text(json.dumps(reports))
    if ending != "returns" or not gap < 1e-9:
        break
distributed.leave()
