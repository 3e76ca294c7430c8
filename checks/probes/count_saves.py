"""Run a script and print how often each rank has called torch.save, for exercise 5.1b.

torchrun count_saves.py SCRIPT ARGUMENT...

Each rank's last line is `saves N`.
"""

import runpy
import sys

import torch

really_save, saves = torch.save, []


def save(*args, **kwargs) -> None:
    saves.append(1)
    really_save(*args, **kwargs)


torch.save = save
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("saves", len(saves))
