"""Measure how long saving a sharded checkpoint stops training, synchronously and asynchronously.

torchrun --standalone --nproc-per-node 2 sharded_save.py PRESET STEPS OUT
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from shared import datasets, distributed, models


def main(preset: str, steps: str, out: str) -> None:
    worker = distributed.join()
    config = models.GPT_PRESETS[preset]
    with torch.device("meta"):
        model = models.GPT(config)
    for part in (*model.blocks, model):
        fully_shard(part)
    model.to_empty(device=worker.device)
    models.init_weights(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = (tensor[:8].to(worker.device) for tensor in datasets.text(config.context).train.tensors)
    # A separate group, since gloo would mix up the messages of saving and training in the same one.
    group = dist.new_group(backend="gloo")

    def train() -> float:
        started = time.perf_counter()
        for _ in range(int(steps)):
            F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - started

    def state() -> dict:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    train()
    seconds = {"steps_alone": [], "sync_still": [], "async_still": [], "steps_meanwhile": []}
    with tempfile.TemporaryDirectory() as rank_folder:
        folders = [rank_folder]
        dist.broadcast_object_list(folders)
        (folder,) = folders
        for number in range(5):
            seconds["steps_alone"].append(train())
            started = time.perf_counter()
            dcp.save(state(), checkpoint_id=f"{folder}/sync-{number}")
            seconds["sync_still"].append(time.perf_counter() - started)
            started = time.perf_counter()
            future = dcp.async_save(state(), checkpoint_id=f"{folder}/async-{number}", process_group=group)
            seconds["async_still"].append(time.perf_counter() - started)
            seconds["steps_meanwhile"].append(train())
            future.result()
    if worker.rank == 0:
        Path(out).write_text(json.dumps(seconds))
    distributed.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
