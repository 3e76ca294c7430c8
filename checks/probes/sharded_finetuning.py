"""Run the learner's fine-tuning script, and note whether a rank holds the whole model, for exercise 3.8a.

torchrun --nproc-per-node 2 sharded_finetuning.py FOLDER SCRIPT EXPORT

SCRIPT gets EXPORT as its argument. Each rank writes to FOLDER/RANK.json whether it has called from_pretrained, how many
weights its optimizer was given, and how many of these the rank keeps.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel

folder, script, export = sys.argv[1:]
report = {"whole": False, "kept": 0, "weights": 0}
make_optimizer, load_whole = torch.optim.Optimizer.__init__, PreTrainedModel.from_pretrained.__func__


def watch_optimizer(self, *args, **kwargs) -> None:
    make_optimizer(self, *args, **kwargs)
    for group in self.param_groups:
        for each in group["params"]:
            report["kept"] += each.to_local().numel() if hasattr(each, "to_local") else each.numel()
            report["weights"] += each.numel()


def watch_load(cls, *args, **kwargs) -> PreTrainedModel:
    report["whole"] = True
    return load_whole(cls, *args, **kwargs)


torch.optim.Optimizer.__init__ = watch_optimizer
PreTrainedModel.from_pretrained = classmethod(watch_load)
sys.argv = [script, export]
runpy.run_path(script, run_name="__main__")
Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(report))
