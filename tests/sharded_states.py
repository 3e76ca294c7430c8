"""Save or load sharded training states under torchrun, for test_train_ray_gpt.py.

torchrun ... sharded_states.py save FOLDER    trains two steps with FSDP2 and with ZeRO-3, and writes both checkpoints
torchrun ... sharded_states.py load FOLDER    reads them with this number of ranks, and takes one more step of each

Each writes FOLDER/NAME-WORLD_SIZE.pt: the gathered weights right after saving or loading, and the next step's loss.
"""

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from shared import checkpoint, data, distributed, models

CHAPTER = Path(__file__).parents[1] / "03-fsdp-deepspeed"
CONFIG = models.GPT_PRESETS["nano"]
BATCH = 8


def loss_of_step(number: int, model, worker: distributed.Worker) -> torch.Tensor:
    """This rank's share of the mean loss over the same eight windows for every number of ranks."""
    tokens, targets = data.text(CONFIG.context).train[
        number * BATCH + worker.rank : (number + 1) * BATCH : worker.world_size
    ]
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * CONFIG.context)


def fsdp2(action: str, folder: Path, worker: distributed.Worker) -> None:
    with torch.device("meta"):
        model = models.GPT(CONFIG)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    models.init_weights(model, 0 if action == "save" else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> float:
        loss = loss_of_step(number, model, worker)
        (loss * worker.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        return distributed.global_sum(loss).item()

    if action == "save":
        step(0), step(1)
        checkpoint.save_sharded(folder / "fsdp2", model, optimizer)
    else:
        checkpoint.restore_sharded(folder / "fsdp2", model, optimizer)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    weights = {name: value.clone() for name, value in weights.items()}
    write(folder, "fsdp2", weights, step(2), worker)


def zero3(action: str, folder: Path, worker: distributed.Worker) -> None:
    spec = importlib.util.spec_from_file_location("train_ray_deepspeed", CHAPTER / "train_ray_deepspeed.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    args = Namespace(
        ds_config=CHAPTER / "ds_config.json", zero_stage=3, batch_size=BATCH, precision="fp32", offload=False,
        lr=1e-3, seed=0 if action == "save" else 1, activation_checkpointing=False,
    )  # fmt: skip
    args.settings = script.read_settings(args, worker.world_size)
    if action == "load":
        checkpoint.make_universal(folder, worker)
        args.settings["checkpoint"] = {"load_universal": True}
    engine = script.build_engine(CONFIG, 1280, args, worker)
    import deepspeed

    def step(number: int) -> float:
        loss = loss_of_step(number, engine, worker)
        engine.backward(loss * worker.world_size)
        engine.step()
        return distributed.global_sum(loss).item()

    if action == "save":
        step(0), step(1)
        if worker.rank == 0:
            (folder / "zero").mkdir()
        dist.barrier()
        engine.save_checkpoint(str(folder), tag="zero", save_latest=False)
    else:
        checkpoint.restore_zero(folder, engine, universal=True)
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            weights[name] = parameter.detach().clone()
    write(folder, "zero3", weights, step(2), worker)


def write(folder: Path, name: str, weights: dict, loss: float, worker: distributed.Worker) -> None:
    if worker.rank == 0:
        torch.save({"weights": weights, "loss": loss}, folder / f"{name}-{worker.world_size}.pt")


if __name__ == "__main__":
    action, folder = sys.argv[1], Path(sys.argv[2])
    worker = distributed.join()
    fsdp2(action, folder, worker)
    zero3(action, folder, worker)
    distributed.leave()
