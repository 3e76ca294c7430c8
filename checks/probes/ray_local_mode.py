"""Run the learner's training function in Ray Train's local mode, for exercise 2.1a.

python ray_local_mode.py FILE RESULT.pt, or under torchrun: one worker, or one per rank

FILE defines train_function(config). Rank 0 saves what the function returns to RESULT.pt.
"""

import os
import runpy
import sys

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

path, result_path = sys.argv[1:]
train_function = runpy.run_path(path)["train_function"]
result = TorchTrainer(train_function, scaling_config=ScalingConfig(num_workers=0)).fit()
if os.environ.get("RANK", "0") == "0":
    torch.save(result.return_value, result_path)
