"""Save or load sharded training states under torchrun, for test_train_ray_gpt.py.

torchrun ... sharded_states.py save FOLDER    trains two steps with FSDP2 and with ZeRO-3, and writes both checkpoints
torchrun ... sharded_states.py load FOLDER    reads them with this number of ranks, and takes one more step of each

Each writes FOLDER/NAME-WORLD_SIZE.pt: the gathered weights right after saving or loading, the next step's loss, and
the bytes of state that rank 0 keeps; ZeRO-1 and 2 only take two steps, for their losses and bytes.
"""

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from shared import checkpoint, data, distributed, measure, models

CHAPTER = Path(__file__).parents[1] / "03-fsdp-deepspeed"
CONFIG = models.GPT_PRESETS["nano"]
BATCH = 8


def loss_of_step(number: int, model, worker: distributed.Worker) -> torch.Tensor:
    """This rank's share of the mean loss over the same eight windows for every number of ranks."""
    tokens, targets = data.text(CONFIG.context).train[
        number * BATCH + worker.rank : (number + 1) * BATCH : worker.world_size
    ]
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * CONFIG.context)


def sharded_gpt(seed: int) -> models.GPT:
    with torch.device("meta"):
        model = models.GPT(CONFIG)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    models.init_weights(model, seed)
    return model


def whole_weights(model: models.GPT) -> dict[str, torch.Tensor]:
    """Gathered on rank 0; the others get an empty dict."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: value.clone() for name, value in weights.items()}


def fsdp2(action: str, folder: Path, worker: distributed.Worker) -> None:
    model = sharded_gpt(0 if action == "save" else 1)
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
    weights = whole_weights(model)
    # Lesson 3.2: how pretrained weights get in. The dict is filled with what each rank keeps, hence a copy.
    other = sharded_gpt(2)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, dict(weights), options=options)
    taken = whole_weights(other)
    assert all(torch.equal(taken[name], value) for name, value in weights.items())
    loss = loss_of_step(2, model, worker)
    (loss * worker.world_size).backward()
    state_bytes = measure.state_bytes(model, optimizer)
    write(folder, "fsdp2", worker, weights=weights, loss=distributed.global_sum(loss).item(), state_bytes=state_bytes)


def build_engine(stage: int, load_universal: bool, seed: int, worker: distributed.Worker):
    spec = importlib.util.spec_from_file_location("train_ray_deepspeed", CHAPTER / "train_ray_deepspeed.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    args = Namespace(
        ds_config=CHAPTER / "ds_config.json", zero_stage=stage, batch_size=BATCH, precision="fp32", offload=False,
        lr=1e-3, lr_step_size=2, seed=seed, activation_checkpointing=False,
    )  # fmt: skip
    args.settings = script.read_settings(args, worker.world_size)
    if load_universal:
        args.settings["checkpoint"] = {"load_universal": True}
    return script.build_engine(CONFIG, lambda step: 1.0, args, worker)


def step_of_engine(number: int, engine, worker: distributed.Worker) -> tuple[float, int]:
    """One step; its loss, and the bytes of state between its backward pass and its end."""
    loss = loss_of_step(number, engine, worker)
    engine.backward(loss * worker.world_size)
    state_bytes = measure.storage_bytes(measure.zero_state(engine))
    engine.step()
    return distributed.global_sum(loss).item(), state_bytes


def zero3(action: str, folder: Path, worker: distributed.Worker) -> None:
    if action == "load":
        checkpoint.make_universal(folder, worker)
    engine = build_engine(3, action == "load", 0 if action == "save" else 1, worker)
    import deepspeed

    if action == "save":
        for number in range(2):
            step_of_engine(number, engine, worker)
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
    loss, state_bytes = step_of_engine(2, engine, worker)
    write(folder, "zero3", worker, weights=weights, loss=loss, state_bytes=state_bytes)


def write(folder: Path, name: str, worker: distributed.Worker, **values: object) -> None:
    if worker.rank == 0:
        torch.save(values, folder / f"{name}-{worker.world_size}.pt")


if __name__ == "__main__":
    action, folder = sys.argv[1], Path(sys.argv[2])
    worker = distributed.join()
    fsdp2(action, folder, worker)
    zero3(action, folder, worker)
    for stage in (1, 2):
        engine = build_engine(stage, False, 0, worker)
        losses, (_, state_bytes) = zip(*(step_of_engine(number, engine, worker) for number in range(2)), strict=True)
        write(folder, f"zero{stage}", worker, losses=list(losses), state_bytes=state_bytes)
    distributed.leave()
