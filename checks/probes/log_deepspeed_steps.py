"""Train with DeepSpeed, runs A to E on two ranks, and print each step's log: the recording of exercise 3.4a.

    torchrun --standalone --nproc-per-node 2 log_deepspeed_steps.py > ../data/deepspeed_step_logs.txt

Four of the runs contain one mistake each. `MISTAKES` below names them, so solve the exercise before you read on.
"""

import logging
import os
from functools import partial

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")  # before DeepSpeed is imported

import deepspeed
import torch
import torch.nn.functional as F

from shared import datasets, distributed, models

CONFIG = models.GPTConfig(num_layers=2, num_heads=2, dim=32, context=16)
NUM_STEPS, GLOBAL_BATCH, NUM_PARTS, MAX_NORM, LR, SEED = 6, 8, 2, 0.5, 1e-2, 7
ZERO_3 = {  # DeepSpeed's own sizes are for large models, and it allocates the bucket at once
    "stage": 3,
    "reduce_bucket_size": 100_000,
    "stage3_prefetch_bucket_size": 100_000,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 100_000,
    "stage3_max_reuse_distance": 0,
}
MISTAKES = {"A": "step once", "B": "divided twice", "C": "none", "D": "not gathered", "E": "clipped by hand"}


def loss_of(model, tokens, targets):
    """Return the mean loss over a batch of windows."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train_plainly(windows, max_norm):
    """Train in this process with plain PyTorch. Return each step's loss and gradient norm before clipping."""
    model = models.GPT(CONFIG)
    models.init_weights(model, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        first = step * GLOBAL_BATCH
        loss = loss_of(model, *windows[first : first + GLOBAL_BATCH])
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def build_engine(mistake):
    """Return a stage 3 engine that accumulates `NUM_PARTS` parts per step and clips at `MAX_NORM`."""
    settings = {
        "train_batch_size": GLOBAL_BATCH,
        "gradient_accumulation_steps": NUM_PARTS,
        "gradient_clipping": 0.0 if mistake == "clipped by hand" else MAX_NORM,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": LR}},
        "zero_optimization": ZERO_3,
    }
    torch.manual_seed(SEED)  # for the run that keeps the values it was built with
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = models.GPT(CONFIG)
    gathered = partial(deepspeed.zero.GatheredParameters, modifier_rank=0, enabled=mistake != "not gathered")
    models.init_weights(model, SEED, gathered)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]


def train_engine(windows, worker, mistake):
    """Train on this rank's windows with one mistake. Return its losses, gradient norms and numbers of updates."""
    engine = build_engine(mistake)
    losses, norms, updates = [], [], []
    for step in range(NUM_STEPS):
        first = step * GLOBAL_BATCH
        batch = windows[first + worker.rank : first + GLOBAL_BATCH : worker.world_size]
        own_loss = 0.0
        for part, (tokens, targets) in enumerate(zip(*(half.tensor_split(NUM_PARTS) for half in batch), strict=True)):
            loss = loss_of(engine, tokens, targets)
            own_loss += loss.item() / NUM_PARTS
            engine.backward(loss / NUM_PARTS if mistake == "divided twice" else loss)
            last = part == NUM_PARTS - 1
            if last and mistake == "clipped by hand":
                torch.nn.utils.clip_grad_norm_(engine.module.parameters(), MAX_NORM)
            if last or mistake != "step once":
                engine.step()
        losses.append(own_loss)
        norms.append(float(engine.get_global_grad_norm() or 0))
        updates.append(engine.global_steps)
    engine.destroy()
    return losses, norms, updates


def log_line(losses, norms, updates=()):
    """Return one line with the numbers of all steps."""
    columns = [f"loss {' '.join(f'{x:.4f}' for x in losses)}", f"norm {' '.join(f'{x:.3f}' for x in norms)}"]
    if updates:
        columns.append(f"updates {' '.join(map(str, updates))}")
    return " | ".join(columns)


if __name__ == "__main__":
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    worker = distributed.join()
    deepspeed.ops.__compatible_ops__ = {}  # compile nothing
    deepspeed.init_distributed(dist_init_required=False)
    windows = datasets.text(CONFIG.context).train
    if worker.rank == 0:
        print(f"clipped at {MAX_NORM}   one process  {log_line(*train_plainly(windows, MAX_NORM))}")
        print(f"never clipped    one process  {log_line(*train_plainly(windows, float('inf')))}")
    for run, mistake in MISTAKES.items():
        logs = distributed.gather_objects(log_line(*train_engine(windows, worker, mistake)))
        if worker.rank == 0:
            print(*(f"run {run}   rank {rank}  {line}" for rank, line in enumerate(logs)), sep="\n")
    distributed.leave()
