"""train_ray_ddp.py with the same options, whose rank 0 adds a line for each step to the file that STEPS_LOG names.

The line holds the time in seconds since 1970, the step's number and the number of workers.
"""

import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ray.train.torch
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

log = os.environ["STEPS_LOG"]
make_trainer = ray.train.torch.TorchTrainer.__init__


def log_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    context, step = ray.train.get_context(), int(next(iter(optimizer.state.values()))["step"])
    if context.get_world_rank() == 0:
        with open(log, "a") as file:
            file.write(f"{time.time()} {step} {context.get_world_size()}\n")


def with_log(trainer: object, train: Callable[[dict], object], **options: object) -> None:
    def train_with_log(config: dict) -> object:
        register_optimizer_step_post_hook(log_step)
        return train(config)

    make_trainer(trainer, train_with_log, **options)


ray.train.torch.TorchTrainer.__init__ = with_log
sys.argv[0] = str(Path(__file__).parents[1] / "02-ddp-pytorch-ray/train_ray_ddp.py")
runpy.run_path(sys.argv[0], run_name="__main__")
