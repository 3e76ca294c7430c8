"""Write checkpoints as the workshop's scripts wrote them in November 2026, to test later code on them.

    python old_checkpoints.py FOLDER

FOLDER gets one run per kind, each with one checkpoint of a tiny model that has been trained for two steps:

    ddp/        train_ddp.py: one file
    ray/        train_ray_ddp.py: a folder of Ray's with one file
    fsdp2/      train_ray_fsdp2.py: a folder with torch.distributed.checkpoint's files and a small state of our own
    deepspeed/  train_ray_deepspeed.py: the same with DeepSpeed's files
    program/    chapter 4's program, local_training: one file

Frozen: it uses torch, NumPy and DeepSpeed, and nothing of the workshop, so that it stays as it is when the workshop
changes. Do not bring it up to date; write another file for a new layout.
"""

import os
import random
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

FORMAT = "distributed-training-workshop checkpoint 1"
STEPS, LR = 2, 1e-3


def digits_mlp() -> nn.Module:
    """The scripts' `--model mlp` for 8x8 images, whose parameters are called layers.1.weight and so on."""
    model = nn.Module()
    model.layers = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(512, 10),
    )  # fmt: skip
    model.forward = model.layers.forward
    return model


def tiny() -> nn.Module:
    """A model of 76 parameters, for the sharded kinds: their files depend on names and shapes alone."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    """Two optimizer steps on random numbers."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, width, generator=generator)).square().mean().backward()
        optimizer.step()


def random_state() -> dict:
    """The generators of Python, NumPy and torch in this process."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": None,
    }


def progress_after_an_epoch(options: dict, **measured: object) -> dict:
    """Where a run is after one epoch of two steps, with the epoch's metrics."""
    line = {
        "epoch": 1, "train_loss": 2.25, "val_loss": 2.125, "val_accuracy": 0.5, **measured, "world_size": 1,
        "step_losses": [2.5, 2.0], "samples_seen": 1280, "samples_per_second": 1000.0,
    }  # fmt: skip
    return {
        "step": STEPS, "epoch": 1, "position": 0, "seconds": 0.0, "loss_sum": 0.0, "step_losses": [], "metrics": [line],
        "options": options,
    }  # fmt: skip


def training_state(model: nn.Module, width: int, options: dict) -> dict:
    """The whole state of a data-parallel run on one rank."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    steps(model, optimizer, width)
    scheduler.step()
    return {
        "format": FORMAT,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": [random_state()],
        "progress": progress_after_an_epoch(options),
    }


IMAGE_OPTIONS = {
    "model": "mlp", "dataset": "digits", "precision": "fp32", "batch_size": 640, "lr": LR, "lr_step_size": 2, "seed": 0,
}  # fmt: skip
GPT_OPTIONS = {
    "model": "gpt", "preset": "nano", "dataset": "text", "text_file": None, "precision": "fp32", "batch_size": 640,
    "lr": LR, "lr_step_size": 2, "seed": 0,
}  # fmt: skip
GPT_MEASURED = {"tokens_per_second": 64000.0, "state_bytes_per_rank": 1216, "peak_memory_bytes": 2048}
NAME = f"checkpoint-{STEPS:08d}"


def write_ddp(folder: Path) -> None:
    """A file, as train_ddp.py writes it."""
    torch.manual_seed(0)
    torch.save(training_state(digits_mlp(), 64, IMAGE_OPTIONS), folder / f"{NAME}.pt")


def write_ray(folder: Path) -> None:
    """The same file in a folder that Ray Train has named and stored."""
    torch.manual_seed(0)
    (folder / f"{NAME}-0a1b2c3d").mkdir()
    torch.save(training_state(digits_mlp(), 64, IMAGE_OPTIONS), folder / f"{NAME}-0a1b2c3d/state.pt")


def write_state_of_shards(folder: Path, state: dict) -> None:
    """state.pt next to the shards of a checkpoint, with the size and the CRC-32 of each of their files."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    sums = {name: [len(content), zlib.crc32(content)] for name, content in files.items()}
    torch.save({"format": FORMAT, **state, "files": sums}, folder / "state.pt")


def write_fsdp2(folder: Path) -> None:
    """The slices of weights and AdamW's state, by torch.distributed.checkpoint. Needs a process group."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, path = tiny(), folder / f"{NAME}-0a1b2c3d"
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    steps(model, optimizer, 4)
    scheduler.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    progress = progress_after_an_epoch(GPT_OPTIONS, **GPT_MEASURED)
    write_state_of_shards(path, {"scheduler": scheduler.state_dict(), "progress": progress})


def engine(model: nn.Module) -> nn.Module:
    """A DeepSpeed engine in ZeRO stage 2 around `model`. Needs a process group."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed(dist_init_required=False)
    settings = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]


def write_deepspeed(folder: Path) -> None:
    """The slices of an engine, by DeepSpeed. Needs a process group."""
    path, trained = folder / f"{NAME}-0a1b2c3d", engine(tiny())
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        trained.backward(trained(torch.randn(8, 4, generator=generator)).square().mean())
        trained.step()
    (path / "zero").mkdir(parents=True)
    trained.save_checkpoint(str(path), tag="zero", save_latest=False)
    progress = progress_after_an_epoch({**GPT_OPTIONS, "zero_stage": 2}, **GPT_MEASURED)
    write_state_of_shards(path, {"progress": progress, "world_size": 1})


def write_program(folder: Path) -> None:
    """A file of chapter 4's program: an MLP with one hidden layer of 8 on 200 synthetic samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 10))
    state = training_state(model, 784, {})
    state["progress"]["correct"] = 0
    state["progress"]["metrics"] = [{
        "epoch": 1, "step": STEPS, "train_loss": 2.25, "train_accuracy": 0.5, "val_loss": 2.125, "val_accuracy": 0.5,
        "lr": LR, "seconds": 1.0, "samples_per_second": 160.0, "world_size": 1, "step_losses": [2.5, 2.0],
    }]  # fmt: skip
    config = {
        "paths": {"processed_data_dir": "data", "model_save_dir": "runs", "log_dir": "logs"},
        "cluster": {"num_workers": [2, 2], "use_gpu": None, "resources_per_worker": None, "timeout_s": 600.0,
                    "max_failures": 3},
        "dataset": {"kind": "synthetic", "file": None, "text_column": "text", "label_column": "label",
                    "vocab_size": 2000, "max_length": 64, "num_samples": 200, "loader_workers": 0},
        "model": {"kind": "mlp", "cell": "gru", "embedding_dim": 64, "hidden_dim": 8, "n_layers": 1,
                  "bidirectional": False, "dropout": 0.3},
        "training": {"batch_size": 80, "accumulation_steps": 1, "epochs": 1, "lr": LR, "lr_step_size": 2,
                     "lr_gamma": 0.5, "max_grad_norm": 1.0, "precision": "fp32", "early_stopping_patience": None,
                     "log_every": 10, "seed": 7},
        "checkpoint": {"every_epochs": 1, "every_steps": None, "keep_best": 3},
        "tuning": {"num_samples": 10, "lr": {"lowest": 0.0001, "highest": 0.01}, "epochs": [5, 10, 20],
                   "scheduler": "none", "grace_epochs": 2, "resources_per_trial": None},
    }  # fmt: skip
    state |= {"scaler": {}, "config": config, "data": "synthetic-200", "vocabulary": None, "score": 0.5}
    torch.save(state, folder / f"{NAME}.pt")


KINDS = {
    "ddp": write_ddp, "ray": write_ray, "fsdp2": write_fsdp2, "deepspeed": write_deepspeed, "program": write_program,
}  # fmt: skip


def main(folder: str) -> None:
    """Write all kinds."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.environ.update(LOCAL_RANK="0", DS_ACCELERATOR="cpu")
    for kind, write in KINDS.items():
        run = Path(folder, kind)
        run.mkdir(parents=True)
        write(run)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
