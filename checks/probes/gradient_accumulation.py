"""Call the learner's train_step on a sharded model, and compare its update with one process's, for exercise 3.6a.

torchrun --nproc-per-node 3 gradient_accumulation.py FOLDER FILE

FILE defines train_step(model, optimizer, passes). Each rank writes to FOLDER/RANK.json, for each case, the loss that
train_step returns, that of one process, how far the update is from the gradient of one process, and by which factor.
With SGD and a learning rate of 1, the update is the gradient.
"""

import json
import runpy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from shared import distributed

CASES = {  # answer tokens of each pass, rank by rank
    "equal": [[6, 6], [6, 6], [6, 6]],
    "ranks": [[2, 2], [4, 4], [9, 9]],
    "passes": [[1, 9], [1, 9], [1, 9]],
    "mixed": [[1, 3], [8, 2], [5, 9]],
    "empty pass": [[0, 6], [5, 4], [7, 2]],
    "empty rank": [[5, 4], [0, 0], [7, 2]],
}

folder, path = sys.argv[1:]
worker = distributed.join(timeout_s=20)
train_step = runpy.run_path(path)["train_step"]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).double()


def make_pass(answer_tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets, of which all but `answer_tokens` are -100."""
    tokens, targets = torch.randint(16, (2, 2, 6), generator=generator)
    targets.view(-1)[torch.randperm(12, generator=generator)[answer_tokens:]] = -100
    return tokens, targets


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


report = {}
for name, counts in CASES.items():
    generator = torch.Generator().manual_seed(1)
    passes = [[make_pass(count, generator) for count in of_rank] for of_rank in counts]
    plain, model = make_model(), make_model()
    fully_shard(model)
    total = sum(map(sum, counts))
    expected = sum(
        F.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum") / total
        for of_rank in passes
        for tokens, targets in of_rank
    )
    gradient = flat(torch.autograd.grad(expected, list(plain.parameters())))
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    returned = train_step(model, optimizer, passes[worker.rank])
    after = flat([parameter.detach().full_tensor() for parameter in model.parameters()])
    update = flat([parameter.detach() for parameter in plain.parameters()]) - after
    if isinstance(returned, torch.Tensor) and returned.numel() == 1:
        returned = returned.item()
    report[name] = {
        "returned": returned if isinstance(returned, int | float) else repr(returned),
        "expected": expected.item(),
        "error": ((update - gradient).norm() / gradient.norm()).item(),
        "factor": (update @ gradient / (gradient @ gradient)).item(),
    }
Path(folder, f"{worker.rank}.json").write_text(json.dumps(report))
distributed.leave()
