"""Run a training script, note each step of rank 0, and after chosen steps wait to be killed, for lesson 2.4.

    python pause_after.py NOTES STEPS SCRIPT OPTIONS...

NOTES: a file. Rank 0 appends a line [process ID, step, its share of the step's loss] after each step.
STEPS: for example 470,850. When a rank has done one of these steps for the first time, it makes the file
NOTES-STEP-RANK and waits. The ranks that replace it do not wait there again.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch

from shared.running import progress

LONGEST_PAUSE_S = 3600
notes, pauses = sys.argv[1], [int(step) for step in sys.argv[2].split(",")]


class PausingProgress(progress.Progress):
    """The script's Progress, which notes steps and pauses. Ray sends this class to the workers."""

    def add_step(self, loss: torch.Tensor, count: int) -> None:
        """Record a step, note it, and wait if it is one of `pauses`."""
        super().add_step(loss, count)
        step = self.step + len(self.losses)
        if self.worker.rank == 0:
            with open(notes, "a") as file:
                file.write(json.dumps([os.getpid(), step, loss.item()]) + "\n")
        paused = Path(f"{notes}-{step}-{self.worker.rank}")
        if step in pauses and not paused.exists():
            paused.touch()
            time.sleep(LONGEST_PAUSE_S)


progress.Progress = PausingProgress
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
