"""Call the learner's update on shards of four matrices, for exercise 5.2a.

torchrun shared_orthogonalization.py FOLDER FILE

FILE defines update(parameters, lr, orthogonalize). The parameters are DTensors, cut along their rows. One of them has
fewer rows than there are ranks. Each rank writes to FOLDER/RANK.json for each of two steps: the shapes of the matrices
that it has orthogonalized, and for each parameter the largest difference of its own rows from those of one process.
"""

import json
import runpy
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shared import distributed

SHAPES, LR = ((6, 4), (5, 8), (1, 4), (4, 4)), 0.1


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of a matrix near 1, and note its shape."""
    shapes.append(list(matrix.shape))
    matrix = matrix / matrix.norm()
    for _ in range(5):
        gram = matrix @ matrix.T
        matrix = 3.4445 * matrix + (-4.7750 * gram + 2.0315 * gram @ gram) @ matrix
    return matrix


folder, path = sys.argv[1:]
worker, shapes, reports = distributed.join(timeout_s=10), [], []
mesh = init_device_mesh("cpu", (worker.world_size,))
update = runpy.run_path(path)["update"]
generator = torch.Generator().manual_seed(7)
expected = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
parameters = [torch.nn.Parameter(distribute_tensor(matrix, mesh, [Shard(0)])) for matrix in expected]
for _ in range(2):
    gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
    shapes.clear()
    with torch.no_grad():
        update(parameters, LR, orthogonalize)
    done, gaps = list(shapes), []
    for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        expected[number] = expected[number] - LR * orthogonalize(gradient)
        own = distribute_tensor(expected[number], mesh, [Shard(0)]).to_local()
        gaps.append((parameter.to_local() - own).abs().max().item() if len(own) else 0.0)
    reports.append({"shapes": done, "gaps": gaps})
Path(folder, f"{worker.rank}.json").write_text(json.dumps(reports))
distributed.leave()
