"""Run a training script as it is, and add a line for each optimizer step of rank 0 to the file that STEPS_LOG names.

    STEPS_LOG=steps.txt torchrun --standalone --nproc-per-node 2 log_steps.py SCRIPT OPTIONS...
    STEPS_LOG=steps.txt python log_steps.py SCRIPT OPTIONS...            # also one on Ray Train

The line holds the time in seconds since 1970, the step's number and the number of ranks.
"""

import os
import runpy
import sys
import time
from collections.abc import Callable

import ray.train.torch
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

log = os.environ["STEPS_LOG"]
make_trainer = ray.train.torch.TorchTrainer.__init__


def log_steps(rank: int, num_ranks: int) -> None:
    """From now on this process logs its steps, if it is rank 0."""

    def log_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if all(group["lr"] == 0 for group in optimizer.param_groups):
            return  # no step: torch makes the state of a sharded optimizer so, before it loads it
        step = int(next(iter(optimizer.state.values()))["step"])
        with open(log, "a") as file:
            file.write(f"{time.time()} {step} {num_ranks}\n")

    if rank == 0:
        register_optimizer_step_post_hook(log_step)


def with_log(trainer: object, train: Callable[[dict], object], **options: object) -> None:
    """What makes a TorchTrainer whose workers log."""

    def train_with_log(config: dict) -> object:
        context = ray.train.get_context()
        log_steps(context.get_world_rank(), context.get_world_size())
        return train(config)

    make_trainer(trainer, train_with_log, **options)


ray.train.torch.TorchTrainer.__init__ = with_log
if "RANK" in os.environ:
    log_steps(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
