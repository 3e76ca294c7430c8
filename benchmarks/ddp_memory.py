"""Run train_ray_ddp.py unchanged, and write to FILE the bytes per rank that chapter 3's scripts measure of themselves.

    torchrun --standalone --nproc-per-node 2 ddp_memory.py FILE --num-workers 0 --dataset text OPTIONS...

bench_sharded.py uses this for DDP. As in those scripts, the peak is that of an epoch's last step, which the tracker
slows down on a CPU. FILE is JSON: state_bytes_per_rank and peak_memory_bytes, the largest of all ranks.
"""

import json
import runpy
import sys
from pathlib import Path

import torch
from torch import nn

from shared import distributed, measure
from shared.running.progress import Progress
from shared.tasks import TextTask

SCRIPT = Path(__file__).parents[1] / "02-ddp-pytorch-ray/train_ray_ddp.py"


def main(file: str, *options: str) -> None:
    watched, memory = [], []
    build_optimizer, add_step = TextTask.build_optimizer, Progress.add_step

    def build_and_keep(task: TextTask, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = build_optimizer(task, model)
        watched[:] = [model, optimizer]
        return optimizer

    def add_and_measure(progress: Progress, loss: torch.Tensor, count: int) -> None:
        add_step(progress, loss, count)
        if progress.in_last_step:  # the next one is
            memory[:] = [measure.PeakMemory(progress.worker.device)]
            memory[0].start(*watched)
        elif len(progress.losses) == len(progress.planned):
            sizes = {"state_bytes_per_rank": measure.state_bytes(*watched), "peak_memory_bytes": memory[0].stop()}
            largest = {name: distributed.global_max(size) for name, size in sizes.items()}
            if progress.worker.rank == 0:
                Path(file).write_text(json.dumps(largest))

    TextTask.build_optimizer, Progress.add_step = build_and_keep, add_and_measure
    sys.argv = [str(SCRIPT), *options]
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
