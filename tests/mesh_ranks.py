"""Build the mesh script's model on four ranks, for test_train_ray_mesh.py: its gradients, its memory, its checkpoints.

torchrun --nproc-per-node 4 mesh_ranks.py FOLDER      rank 0 writes FOLDER/found.json
"""

import json
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared import datasets, distributed, models, sampling, sharded, tasks
from shared.running.progress import Progress

CHAPTERS = Path(__file__).parents[1]
sys.path += [str(CHAPTERS / "03-fsdp-deepspeed"), str(CHAPTERS / "06-beyond-data-parallel")]
import train_ray_fsdp2  # noqa: E402
import train_ray_mesh  # noqa: E402

NANO, BATCH = models.GPT_PRESETS["nano"], 8
ARGS = Namespace(preset="nano", precision="fp64", activation_checkpointing=False, reshard_after_forward=True,
    offload=False, lr=1e-3)  # fmt: skip


class Alive(TorchDispatchMode):
    """Count the bytes of all plain tensors made in this context and still alive: now, and at most.

    A DTensor itself has no storage; the tensors inside it are plain.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self.known = 0, 0, set()

    def __torch_dispatch__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping | None = None
    ):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor calls this again, for the tensors inside
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.device.type != "meta":
                self.add(leaf.untyped_storage())
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed."""
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            weakref.finalize(storage, self.drop, storage._cdata, storage.nbytes())
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)

    def drop(self, key: int, size: int) -> None:
        """Count a storage no longer."""
        self.known.discard(key)
        self.now -= size


def build(config: models.GPTConfig, size: int, seed: int = 7, dtype: torch.dtype = torch.float64) -> tuple:
    """Return the model as the script builds it on a mesh with `size` workers per tensor group, and the mesh."""
    mesh = init_device_mesh("cpu", (worker.world_size // size, size), mesh_dim_names=("data", "tensor"))
    with torch.device("meta"):
        model = models.GPT(config).to(dtype)
    train_ray_mesh.share_matrices(model, mesh["tensor"])
    train_ray_mesh.shard(model, ARGS, mesh["data"])
    model.to_empty(device="cpu")
    models.init_weights(model, seed)
    return model, mesh


def build_fsdp2(seed: int) -> models.GPT:
    """Return the FSDP2 script's model."""
    with torch.device("meta"):
        model = models.GPT(NANO).double()
    train_ray_fsdp2.shard(model, ARGS, worker)
    model.to_empty(device="cpu")
    models.init_weights(model, seed)
    return model


def largest_difference(named: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between tensors of the same names, gathered. Collective."""
    assert named.keys() == expected.keys()
    gathered = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named.items()}
    return max((gathered[name] - value).abs().max().item() for name, value in expected.items())


def gradients(size: int) -> dict:
    """Compare the gradients after the script's own training step with one process."""
    task = tasks.TextTask(ARGS, datasets.text(NANO.context, num_windows=BATCH), worker.device)
    plain = models.GPT(NANO).double()
    models.init_weights(plain, seed=7)
    inputs, targets = task.splits.train.tensors
    (task.loss(plain(inputs), targets) / BATCH).backward()
    reference = {name: parameter.grad for name, parameter in plain.named_parameters()}

    model, mesh = build(NANO, size)
    weights = largest_difference(dict(model.named_parameters()), dict(plain.named_parameters()))
    group = replace(worker, rank=mesh.get_local_rank("data"), world_size=mesh["data"].size())
    loader = sampling.rank_loader(task.splits.train, BATCH // group.world_size, group, shuffle_seed=0)
    progress = Progress(worker, BATCH, {}, batch_size=BATCH, epochs=1, quiet=True)
    train_ray_mesh.train_epoch(model, loader, torch.optim.SGD(model.parameters(), lr=0.0), task, mesh, progress)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "weights": weights,
        "gradients": largest_difference(found, reference),
        "smallest": min(value.abs().max().item() for value in reference.values()),
    }


def memory(size: int, num_layers: int, dtype: torch.dtype) -> dict:
    """Return what building takes beyond the slices, in copies of the largest parameter, and the slices' own share."""
    config = replace(NANO, num_layers=num_layers)
    with Alive() as alive:
        model, _ = build(config, size, dtype=dtype)
    with torch.device("meta"):
        sizes = [parameter.numel() * dtype.itemsize for parameter in models.GPT(config).parameters()]
    slices = sum(parameter.to_local().untyped_storage().nbytes() for parameter in model.parameters())
    assert alive.now >= slices, "the instrument did not see the slices"
    return {"copies": (alive.most - slices) / max(sizes), "slices": slices / sum(sizes)}


def resharding(folder: Path) -> dict:
    """Save on 2 x 2, and read on 1 x 4 and in the FSDP2 script; save there, and read on 2 x 2."""

    def optimizer_of(model: models.GPT) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        return optimizer

    def whole(model: models.GPT, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        named = dict(model.named_parameters())
        moments = {f"{name}, {key}": value for name, parameter in named.items()
            for key, value in optimizer.state[parameter].items()}  # fmt: skip
        return {name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
            for name, value in (named | moments).items()}  # fmt: skip

    builders = {"2x2": lambda seed: build(NANO, 2, seed)[0], "1x4": lambda seed: build(NANO, 4, seed)[0],
        "fsdp2": build_fsdp2}  # fmt: skip
    found = {}
    for before, after in (("2x2", "1x4"), ("2x2", "fsdp2"), ("fsdp2", "2x2")):
        path = folder / f"{before} {after}"
        model = builders[before](1)
        optimizer = optimizer_of(model)
        saved = whole(model, optimizer)
        sharded.save_sharded(path, model, optimizer)
        model = builders[after](2)
        optimizer = optimizer_of(model)
        assert largest_difference(whole(model, optimizer), saved) > 1e-3
        sharded.restore_sharded(path, model, optimizer)
        found[path.name] = largest_difference(whole(model, optimizer), saved)
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    worker = distributed.join()
    found = {
        "gradients": {f"{4 // size}x{size}": gradients(size) for size in (1, 2, 4)},
        "memory": {
            f"{size} {num_layers} {dtype}": memory(size, num_layers, dtype)
            for size in (2, 4) for num_layers in (2, 6) for dtype in (torch.float32, torch.float64)
        },
        "resharding": resharding(folder),
    }  # fmt: skip
    if worker.rank == 0:
        (folder / "found.json").write_text(json.dumps(found, indent=1))
    distributed.leave()
