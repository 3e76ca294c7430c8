"""Save or load sharded training states under torchrun, for test_train_ray_gpt.py.

torchrun ... sharded_states.py save FOLDER    trains two steps with FSDP2 and with ZeRO-3, and writes both checkpoints
torchrun ... sharded_states.py load FOLDER    reads them with this number of ranks, and takes one more step of each

Each writes FOLDER/NAME-WORLD_SIZE.pt: the gathered weights right after saving or loading, the next step's loss, and
the bytes of state that rank 0 keeps; ZeRO-1 and 2 only take two steps, for their losses and bytes.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from shared import datasets, distributed, measure, models, sharded, tasks
from shared.on_ray import options

CHAPTER = Path(__file__).parents[1] / "03-fsdp-deepspeed"
sys.path.append(str(CHAPTER))
import ds_settings  # noqa: E402
import train_ray_deepspeed  # noqa: E402

import zero  # noqa: E402

CONFIG = models.GPT_PRESETS["nano"]
BATCH = 8


def loss_of_step(number: int, model, worker: distributed.Worker) -> torch.Tensor:
    """This rank's share of the mean loss over the same eight windows for every number of ranks."""
    tokens, targets = datasets.text(CONFIG.context).train[
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
        sharded.save_sharded(folder / "fsdp2", model, optimizer)
    else:
        sharded.restore_sharded(folder / "fsdp2", model, optimizer)
    weights = whole_weights(model)
    # How weights from one file get in (chapter 3's README). The dict is filled with what each rank keeps, hence a copy.
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
    parser = options.ray_parser("", train_ray_deepspeed.TASKS)
    parser.set_defaults(ds_config=CHAPTER / "ds_config.json", zero_stage=stage, offload=False)
    args = parser.parse_args(["--num-workers", "0", "--batch-size", str(BATCH), "--seed", str(seed)])
    args, settings = ds_settings.read_settings(args, worker.world_size, worker)
    if load_universal:
        settings["checkpoint"] = {"load_universal": True}
    task = tasks.TextTask(args, tasks.TextTask.load(args), worker.device)
    return train_ray_deepspeed.build_engine(task, settings, lambda step: 1.0, worker)


def step_of_engine(number: int, engine, worker: distributed.Worker) -> tuple[float, int]:
    """One step; its loss, and the bytes of state between its backward pass and its end."""
    loss = loss_of_step(number, engine, worker)
    engine.backward(loss * worker.world_size)
    state_bytes = measure.storage_bytes(zero.state_tensors(engine))
    engine.step()
    return distributed.global_sum(loss).item(), state_bytes


def zero3(action: str, folder: Path, worker: distributed.Worker) -> None:
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
        stored = sorted(folder.rglob("*"))
        with zero.universal_format(folder, worker) as converted:
            zero.restore_zero(converted, engine, universal=True)
        assert sorted(folder.rglob("*")) == stored  # a stored checkpoint is never written to
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
