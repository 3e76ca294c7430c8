"""Record the losses of two ranks, uninterrupted and after each of five resumes, for exercise 2.4a.

    torchrun --standalone --nproc-per-node 2 record_resumed_runs.py ../data/resumed_run_losses.json

Each resume starts from the same checkpoint after step 9. `RUNS` below names what each leaves out, so solve the exercise
before you read on.
"""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from shared import checkpoint, datasets, distributed, models

RUNS = {  # run -> what it does not restore, as the learner is to name it
    "A": "scheduler",
    "B": "random on rank 1",
    "C": "nothing",
    "D": "optimizer on rank 1",
    "E": "progress",
}
SAVED_AFTER, STEPS = 9, 10
STEPS_PER_EPOCH, LOCAL_BATCH_SIZE = 6, 16


def new_run(rank: int) -> tuple:
    """Return model, optimizer, scheduler and progress before the first step."""
    distributed.seed_everything(7)
    model = models.MLP(input_dim=64, hidden_dim=32, dropout=0.5).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)
    distributed.seed_everything(7 + rank)
    return model, optimizer, scheduler, {"step": 0}


def train(run: tuple, num_steps: int, worker: distributed.Worker) -> dict[str, list]:
    """Train for some steps. Return for each step the first three samples of this rank's batch, and its loss."""
    model, optimizer, scheduler, progress = run
    images, labels = datasets.load("digits").train.tensors
    ddp_model, log = DistributedDataParallel(model), {"samples": [], "loss": []}
    for _ in range(num_steps):
        epoch, position = divmod(progress["step"], STEPS_PER_EPOCH)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))[worker.rank :: 2]
        batch = order[LOCAL_BATCH_SIZE * position :][:LOCAL_BATCH_SIZE]
        loss = F.cross_entropy(ddp_model(images[batch].double()), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        progress["step"] += 1
        log["samples"].append(batch[:3].tolist())
        log["loss"].append(round(loss.item(), 8))
    return log


def resume(state: dict, left_out: str, worker: distributed.Worker) -> tuple:
    """Return a run that continues from `state`, without the part that is left out, on this rank or on both."""
    model, optimizer, scheduler, progress = run = new_run(worker.rank)
    part, _, only_rank = left_out.partition(" on rank ")
    left_out_here = part if only_rank in ("", str(worker.rank)) else "nothing"
    state = copy.deepcopy(state)
    model.load_state_dict(state["model"])
    if left_out_here != "optimizer":
        optimizer.load_state_dict(state["optimizer"])
    if left_out_here != "scheduler":
        scheduler.load_state_dict(state["scheduler"])
    # The usual mistake: every rank gets the generators of rank 0.
    checkpoint.set_random_state(state["random"][0 if left_out_here == "random" else worker.rank])
    # Without its progress the run starts the epoch again.
    step = state["progress"]["step"]
    progress["step"] = step - step % STEPS_PER_EPOCH if left_out_here == "progress" else step
    return run


def main(path: Path) -> None:
    """Train, resume five times, and let rank 0 write what all ranks saw."""
    worker = distributed.join()
    uninterrupted = new_run(worker.rank)
    train(uninterrupted, SAVED_AFTER, worker)
    state = copy.deepcopy(checkpoint.training_state(*uninterrupted))
    logs = {"uninterrupted": train(uninterrupted, STEPS, worker)}
    for name, left_out in RUNS.items():
        logs[name] = train(resume(state, left_out, worker), STEPS, worker)
    ranks = distributed.gather_objects(logs)
    if worker.rank == 0:
        runs = (
            f'"{name}": {{\n'
            + ",\n".join(
                f'  "rank {rank}": {{\n    "samples": {json.dumps(ranks[rank][name]["samples"])},\n'
                f'    "loss": {json.dumps(ranks[rank][name]["loss"])}\n  }}'
                for rank in range(worker.world_size)
            )
            + "\n}"
            for name in logs
        )
        path.write_text("{\n" + ",\n".join(runs) + "\n}\n")
    distributed.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
