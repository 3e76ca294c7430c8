"""Run an unchanged training script, and log each optimizer step of rank 0 to the file STEPS_LOG.

    STEPS_LOG=steps.txt torchrun --standalone --nproc-per-node 2 log_steps.py SCRIPT OPTIONS...
    STEPS_LOG=steps.txt python log_steps.py SCRIPT OPTIONS...            # including scripts for Ray Train

Each line contains the time in seconds since 1970, the step and the number of ranks.
"""

import os
import runpy
import sys
import time
from collections.abc import Callable

import ray.train.torch
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

log_path = os.environ["STEPS_LOG"]
original_init = ray.train.torch.TorchTrainer.__init__


def log_steps(rank: int, num_ranks: int) -> None:
    """Log the optimizer steps of this process from now on, if it is rank 0."""

    def log_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if all(group["lr"] == 0 for group in optimizer.param_groups):
            return  # not a training step: this is how PyTorch creates a sharded optimizer's state before loading it
        step = int(next(iter(optimizer.state.values()))["step"])
        with open(log_path, "a") as file:
            file.write(f"{time.time()} {step} {num_ranks}\n")

    if rank == 0:
        register_optimizer_step_post_hook(log_step)


def init_with_log(trainer: object, train: Callable[[dict], object], **options: object) -> None:
    """Initialize a TorchTrainer whose workers log their steps. Replaces TorchTrainer.__init__."""

    def train_with_log(config: dict) -> object:
        context = ray.train.get_context()
        log_steps(context.get_world_rank(), context.get_world_size())
        return train(config)

    original_init(trainer, train_with_log, **options)


ray.train.torch.TorchTrainer.__init__ = init_with_log
if "RANK" in os.environ:
    log_steps(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # as if the script had been started by itself
runpy.run_path(sys.argv[0], run_name="__main__")
