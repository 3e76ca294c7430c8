"""Train with the learner's save and resume, and kill rank 0 while it writes a checkpoint, for exercise 2.4b.

torchrun --nproc-per-node 2 --max-restarts 1 kill_during_save.py FOLDER FILE

FILE defines save(path, model, optimizer, scheduler, step, rank) and resume(path, model, optimizer, scheduler, rank). In
the first attempt both ranks train without them, for reference, and then again with a checkpoint after every third step.
Rank 0 kills itself when it has written half of the one after step 9, so torchrun starts both ranks again. Each rank
adds a line [attempt, step, loss] to FOLDER/reference-RANK.jsonl or FOLDER/run-RANK.jsonl in each step.
"""

import io
import json
import os
import runpy
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from shared import datasets, distributed, models

folder, script = Path(sys.argv[1]), sys.argv[2]
path, killed = folder / "checkpoint.pt", folder / "killed"
worker = distributed.join(timeout_s=30)
attempt = 2 if killed.exists() else 1
print(f"attempt {attempt} begins", file=sys.stderr, flush=True)
learner = runpy.run_path(script)
images, labels = datasets.load("digits").train.tensors
really_save = torch.save


def new_run() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    distributed.seed_everything(7)
    model = models.MLP(input_dim=64, hidden_dim=32, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    distributed.seed_everything(7 + worker.rank)
    return model, optimizer, scheduler


def train(run: tuple, steps_done: int, name: str) -> None:
    model, optimizer, scheduler = run
    ddp_model = DistributedDataParallel(model)
    for step in range(steps_done + 1, 13):
        batch = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))[worker.rank : 32 : 2]
        loss = F.cross_entropy(ddp_model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        with open(folder / f"{name}-{worker.rank}.jsonl", "a") as file:
            file.write(json.dumps([attempt, step, loss.item()]) + "\n")
        if name == "run" and step % 3 == 0:
            if (attempt, step, worker.rank) == (1, 9, 0):
                torch.save = write_half_and_die
            learner["save"](str(path), *run, step, worker.rank)


def write_half_and_die(state, file, *args, **kwargs) -> None:
    """Do half of what torch.save does."""
    if isinstance(file, io.BytesIO):  # to pickle a tensor, as all_gather_object does, torch saves it into memory
        return really_save(state, file, *args, **kwargs)
    whole = io.BytesIO()
    really_save(state, whole)
    half = whole.getvalue()[: whole.tell() // 2]
    if hasattr(file, "write"):
        file.write(half)
        file.flush()
    else:
        Path(file).write_bytes(half)
    killed.touch()
    os.kill(os.getpid(), signal.SIGKILL)


if attempt == 1:
    train(new_run(), 0, "reference")
run, steps_done = new_run(), 0
if path.exists():
    steps_done = learner["resume"](str(path), *run, worker.rank)
    if not isinstance(steps_done, int):
        returned = f"{steps_done!r} on rank {worker.rank}"
        raise TypeError(f"resume() should return the number of steps done, and returns {returned}")
train(run, steps_done, "run")
distributed.leave()
