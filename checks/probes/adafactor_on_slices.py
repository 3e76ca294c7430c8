"""Call the learner's update on slices of four matrices, for exercise 5.2b.

torchrun adafactor_on_slices.py FOLDER FILE

FILE defines update(weights, gradients, lr). Each rank has some rows of each matrix, as plain tensors, and rank 1 has no
row of the third one. Each rank writes to FOLDER/RANK.json for each of two steps: how many numbers it has passed to
collectives, and for each matrix its rows, their largest difference from one process (relative to the largest change of
the matrix), and in what their change is a multiple of one process's (see `factor`).
"""

import json
import math
import runpy
import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared import distributed

SHAPES, LR = ((12, 4), (9, 8), (1, 6), (7, 5)), 0.1


class Count(TorchDispatchMode):
    """Counts the numbers in the tensors that this rank passes to collectives."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            leaves = tree_leaves((args, kwargs))
            self.numbers += sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))


def rms(matrix: torch.Tensor) -> float:
    return matrix.square().mean().sqrt().item()


def update_whole(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the weights after one update of a simple Adafactor (https://arxiv.org/abs/1804.04235)."""
    squares = gradient.square()
    of_rows, of_columns = squares.mean(dim=1, keepdim=True), squares.mean(dim=0, keepdim=True)
    change = gradient / (of_rows * of_columns / of_rows.mean()).sqrt()
    return weight - LR * max(1e-3, rms(weight)) * change / max(1.0, rms(change))


def factor(change: torch.Tensor, expected: torch.Tensor) -> str:
    """Say in what a change is a multiple of the expected one: "nothing", "all", "columns", "rows", or else "none"."""
    if not change.any():
        return "nothing"
    ratio = change / expected
    for name, same in (("all", ratio[:1, :1]), ("columns", ratio[:1]), ("rows", ratio[:, :1])):
        if ((ratio - same).abs() < 1e-6 * same.abs()).all():
            return name
    return "none"


folder, path = sys.argv[1:]
worker, reports = distributed.join(timeout_s=10), []
update = runpy.run_path(path)["update"]
generator = torch.Generator().manual_seed(3)


def draw(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def own_rows(matrix: torch.Tensor) -> torch.Tensor:
    rows = math.ceil(len(matrix) / worker.world_size)
    return matrix[worker.rank * rows : (worker.rank + 1) * rows]


expected = [draw(shape) for shape in SHAPES]
expected[3].zero_()
weights = [own_rows(matrix).clone() for matrix in expected]
for _ in range(2):
    gradients = [draw(shape) ** 3 for shape in SHAPES]
    before = [weight.clone() for weight in weights]
    with torch.no_grad(), Count() as count:
        update(weights, [own_rows(gradient).clone() for gradient in gradients], LR)
    matrices = []
    for number, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        old, expected[number] = expected[number], update_whole(expected[number], gradient)
        own = own_rows(expected[number])
        gap = ((weight - own).abs().max() / (expected[number] - old).abs().max()).item() if len(own) else 0.0
        matrices.append({
            "rows": len(own), "gap": gap, "factor": factor(weight - before[number], own - before[number]),
        })  # fmt: skip
    reports.append({"numbers": count.numbers, "matrices": matrices})
Path(folder, f"{worker.rank}.json").write_text(json.dumps(reports))
distributed.leave()
