"""Train four steps with the learner's port to DeepSpeed under ZeRO-3, next to one process, for exercise 3.4b.

torchrun --nproc-per-node 2 zero_3_engine.py FOLDER FILE

FILE defines build_engine(config, settings) and train_step(engine, parts, loss_of). Each rank writes to FOLDER/RANK.json
which parameters have wrong start values, the losses, gradient norms and updates of each step, and the losses and norms
of one process, clipped and unclipped.
"""

import json
import logging
import os
import runpy
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported

import deepspeed
import torch
import torch.nn.functional as F

from shared import datasets, distributed, models

SETTINGS = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100000},
}

folder, path = sys.argv[1:]
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
worker = distributed.join(timeout_s=60)
deepspeed.ops.__compatible_ops__ = {}
deepspeed.init_distributed(dist_init_required=False)
config = models.GPTConfig(num_layers=2, num_heads=2, dim=32, context=16)
windows = datasets.text(config.context).train


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_on_one_process(max_norm: float) -> list[dict[str, float]]:
    model = models.GPT(config)
    models.init_weights(model, seed=7)
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(4):
        tokens, targets = windows[8 * step : 8 * step + 8]
        loss = loss_of(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        steps.append({"loss": loss.item(), "norm": norm.item()})
    return steps


def train_engine(learner: dict) -> dict:
    """Return which start values are wrong in the port's engine, and what it does in each step."""
    engine = learner["build_engine"](config, SETTINGS)
    named, steps = dict(engine.module.named_parameters()), []
    start = models.GPT(config)
    models.init_weights(start, seed=7)
    start_values = dict(start.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        wrong = [name for name, value in named.items() if not torch.equal(value, start_values[name])]
    for step in range(4):
        batch = windows[8 * step + worker.rank : 8 * step + 8 : 2]
        parts = list(zip(*(half.tensor_split(2) for half in batch), strict=True))
        with torch.no_grad():
            own = sum(loss_of(engine(tokens), targets).item() for tokens, targets in parts) / 2
        loss = learner["train_step"](engine, parts, loss_of)
        seen = {"loss": loss if loss is None else float(loss), "own": own}
        steps.append(seen | {"norm": float(engine.get_global_grad_norm() or 0), "updates": engine.global_steps})
    engine.destroy()
    return {"wrong": wrong, "parameters": len(named), "steps": steps}


report = {"clipped": train_on_one_process(0.5), "unclipped": train_on_one_process(float("inf"))}
report |= train_engine(runpy.run_path(path))
Path(folder, f"{worker.rank}.json").write_text(json.dumps(report))
distributed.leave()
