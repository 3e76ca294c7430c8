"""The block of chapter 3's README that starts a Hugging Face model under ZeRO-3: zero3_from_readme.py BASE ROWS FILE LR

Trains two epochs of the rows in the order of train_ray_finetune.py with --batch-size 16, and writes the losses to FILE.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from pairs import Pairs, read_rows, tokenize
from pretrained import read_config, read_tokenizer
from shared import distributed, sampling

base, rows, file, lr = sys.argv[1:]
readme = Path(__file__).parents[2] / "03-fsdp-deepspeed/README.md"
(block,) = re.findall(r"^```python\n(import deepspeed.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL)
worker = distributed.join()
losses: list[float] = []
scope = {"base": base, "cross_entropy": cross_entropy, "world_size": worker.world_size}


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    data = Pairs(tokenize(read_rows(rows), read_tokenizer(base), read_config(base)))
    loader = sampling.rank_loader(data, 8, worker, shuffle_seed=0)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for tokens, targets in loader:
            yield tokens, targets, distributed.global_sum((targets != -100).sum())
            losses.append(distributed.global_sum(scope["loss"]).item())


scope["batches"] = batches()
exec(block.replace('"lr": 1e-3', f'"lr": {lr}'), scope)
if worker.rank == 0:
    Path(file).write_text(json.dumps(losses))
dist.destroy_process_group()
