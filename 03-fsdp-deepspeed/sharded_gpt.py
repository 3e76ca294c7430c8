"""Shard, train and gather the small GPT of lesson 3.2 on the ranks of torchrun, or load it in one process."""

import logging
import re
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shared import datasets, models
from shared.distributed import Worker, global_sum

CONFIG = models.GPT_PRESETS["nano"]
BATCH_SIZE = 12  # windows of text per step over all ranks: 1, 2, 3 and 4 ranks share them evenly


def build(seed: int) -> tuple[models.GPT, torch.optim.AdamW]:
    """Return the sharded model and its optimizer: laid out on meta, sharded by block, then filled slice by slice."""
    with torch.device("meta"):
        model = models.GPT(CONFIG)
    for part in (*model.blocks, model):
        fully_shard(part)
    model.to_empty(device="cpu")
    models.init_weights(model, seed)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: models.GPT, optimizer: torch.optim.Optimizer, step: int, worker: Worker) -> float:
    """Take one optimizer step on the `step`-th batch, and return the mean loss over all ranks. Collective."""
    windows = datasets.text(CONFIG.context).train
    tokens, targets = windows[BATCH_SIZE * step + worker.rank : BATCH_SIZE * (step + 1) : worker.world_size]
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return global_sum(loss).item() / worker.world_size


def held_out() -> torch.Tensor:
    """Return four windows of text (4, context) that no step trains on."""
    return datasets.text(CONFIG.context).val[:4][0]


@torch.no_grad()
def gather(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return whole copies of weights, moments and step counts, and the logits of `held_out`. Collective if sharded.

    Only this lesson's comparisons need it. A real model may be too large for one rank's memory.
    """
    gathered = {}
    for name, parameter in model.named_parameters():
        gathered[name] = _whole(parameter)
        for key, value in optimizer.state[parameter].items():
            gathered[f"{name}.{key}"] = _whole(value)
    gathered["logits"] = model(held_out())  # last, because the root keeps its parameters gathered after a forward pass
    return gathered


def write_gathered(model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker, path: str | Path) -> None:
    """Call `gather`, and let rank 0 write what it returns to `path`. Collective."""
    gathered = gather(model, optimizer)
    if worker.rank == 0:
        torch.save(gathered, path)


def load_alone(folder: str | Path) -> dict[str, torch.Tensor]:
    """Load a checkpoint in this process alone, into a model that is not sharded, and return what `gather` returns.

    Raises ValueError with the file's name if a file is missing.
    """
    model = models.GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    logging.disable(logging.WARNING)  # DCP would log two tracebacks if there is no index
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # there are no ranks
            dcp.load(state, checkpoint_id=folder)
    except dcp.CheckpointException as error:
        missing = re.search(r"No such file or directory: '[^']*/([^'/]+)'", str(error.failures[0][0]))
        if missing is None:
            raise
        raise ValueError(f"{Path(folder).name} cannot be loaded: {missing[1]} is missing") from None
    finally:
        logging.disable(logging.NOTSET)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return gather(model, optimizer)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()
