"""The exhibits of lesson 5.1: each as it was found, with a mistake (`..._before`), and without it (`..._fixed`).
Some have a variant, which answers a prediction.

run_gallery.py runs them on two ranks, and exhibit 11 on three. An exhibit takes the rank's `Worker` and a folder of its
own that all ranks see, and returns what the rank reports. Exhibits have no docstrings, because the lesson prints them
and asks what is wrong.
"""

import io

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from shared import datasets, distributed, models, sampling
from shared.distributed import Worker

SEED, EPOCHS = 7, 4


# --- What several exhibits use. None of it has a mistake. ------------------------------------------------------------


def new_model(dropout: float = 0.0, seed: int = SEED) -> torch.nn.Module:
    torch.manual_seed(seed)
    return models.MLP(input_dim=64, hidden_dim=64, dropout=dropout).double()


def new_loader(worker: Worker, batch_size: int) -> DataLoader:
    images, labels = datasets.load("digits").train.tensors
    dataset = TensorDataset(images.double(), labels)
    sampler = sampling.UnpaddedDistributedSampler(dataset, worker.world_size, worker.rank, shuffle=True, seed=SEED)
    return DataLoader(dataset, batch_size, sampler=sampler)


def train(model: torch.nn.Module, loader: DataLoader, weight_decay: float = 0.0) -> dict:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=weight_decay), []
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        total = torch.zeros(2, dtype=torch.float64)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(labels), len(labels)], dtype=torch.float64)
        summed, count = distributed.global_sum(total).tolist()
        losses.append(summed / count)
    return {"losses": losses, "steps": EPOCHS * len(loader)}


def val_images() -> torch.Tensor:
    return datasets.load("digits").val.tensors[0].double()


def accuracy(model: torch.nn.Module, images: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(dim=1) == datasets.load("digits").val.tensors[1]).double().mean().item()


# --- 1 ---------------------------------------------------------------------------------------------------------------


def exhibit_01_before(worker, folder):
    loader = new_loader(worker, batch_size=64)
    return train(DistributedDataParallel(new_model()), loader)


def exhibit_01_fixed(worker, folder):
    loader = new_loader(worker, batch_size=64 // worker.world_size)
    return train(DistributedDataParallel(new_model()), loader)


def one_process():
    return train(new_model(), new_loader(Worker(), batch_size=64))


# --- 2 ---------------------------------------------------------------------------------------------------------------


def download(path):
    content = io.BytesIO()
    torch.save(torch.arange(100_000), content)
    path.write_bytes(content.getvalue())


def exhibit_02_before(worker, folder):
    path = folder / "samples.pt"
    if not path.exists():
        download(path)
    return {"samples": len(torch.load(path))}


def exhibit_02_fixed(worker, folder):
    path, part = folder / "samples.pt", folder / "samples.part"
    with distributed.local_first(worker):
        if not path.exists():
            download(part)
            part.replace(path)
    return {"samples": len(torch.load(path))}


# --- 3 ---------------------------------------------------------------------------------------------------------------


def exhibit_03_before(worker, folder):
    model, path = DistributedDataParallel(new_model(dropout=0.5)), folder / "weights.pt"
    train(model, new_loader(worker, 32))
    if worker.rank == 0:
        torch.save(model.state_dict(), path)
    distributed.wait_for_all()
    loaded = new_model(dropout=0.5, seed=1)
    loaded.load_state_dict(torch.load(path), strict=False)
    for each in (model, loaded):
        each.eval()
    return {"trained": accuracy(model, val_images()), "loaded": accuracy(loaded, val_images())}


def exhibit_03_fixed(worker, folder):
    model, path = DistributedDataParallel(new_model(dropout=0.5)), folder / "weights.pt"
    train(model, new_loader(worker, 32))
    if worker.rank == 0:
        torch.save(model.module.state_dict(), path)
    distributed.wait_for_all()
    loaded = new_model(dropout=0.5, seed=1)
    loaded.load_state_dict(torch.load(path))
    for each in (model, loaded):
        each.eval()
    return {"trained": accuracy(model, val_images()), "loaded": accuracy(loaded, val_images())}


# --- 4 ---------------------------------------------------------------------------------------------------------------


def noisy_accuracy(model):
    return accuracy(model, val_images() + torch.randn(256, 1, 8, 8))


def exhibit_04_before(worker, folder):
    distributed.seed_everything(SEED)
    model = new_model()
    train(DistributedDataParallel(model), new_loader(worker, 32))
    return {"accuracies": [noisy_accuracy(model) for _ in range(200)]}


def exhibit_04_variant(worker, folder):
    distributed.seed_everything(SEED + worker.rank)
    model = new_model()
    train(DistributedDataParallel(model), new_loader(worker, 32))
    return {"accuracies": [noisy_accuracy(model) for _ in range(200)]}


def exhibit_04_fixed(worker, folder):
    distributed.seed_everything(SEED)
    model = new_model()
    distributed.seed_everything(SEED + worker.rank)
    train(DistributedDataParallel(model), new_loader(worker, 32))
    return {"accuracies": [noisy_accuracy(model) for _ in range(200)]}


# --- 5 ---------------------------------------------------------------------------------------------------------------


class Shifts(Dataset):
    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return int(self.generator.integers(-9, 10))


class ShiftsFixed(Dataset):
    generator = None

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.generator is None:  # the first time in this process
            info = get_worker_info()  # None without loader processes
            self.generator = np.random.default_rng(info.seed if info else torch.initial_seed())
        return int(self.generator.integers(-9, 10))


def exhibit_05_before(worker, folder):
    loader = DataLoader(Shifts(seed=SEED + worker.rank), batch_size=2, num_workers=2)
    return {"epochs": [torch.cat(list(loader)).tolist() for _ in range(2)]}


def exhibit_05_fixed(worker, folder):
    torch.manual_seed(SEED + worker.rank)
    loader = DataLoader(ShiftsFixed(), batch_size=2, num_workers=2)
    return {"epochs": [torch.cat(list(loader)).tolist() for _ in range(2)]}


# --- 6 ---------------------------------------------------------------------------------------------------------------


def exhibit_06_before(worker, folder, weight_decay=0.0):
    model = DistributedDataParallel(new_model(dropout=0.5))
    if worker.rank == 0:  # one reader is enough for a file of pretrained weights
        with torch.no_grad():
            model.module.layers[1].bias.copy_(torch.linspace(-1, 1, 64))
    losses = train(model, new_loader(worker, 32), weight_decay)["losses"]
    model.eval()
    return {"model": model, "loss": losses[-1], "accuracy": accuracy(model.module, val_images())}


def exhibit_06_variant(worker, folder):
    return exhibit_06_before(worker, folder, weight_decay=0.1)


def exhibit_06_fixed(worker, folder, weight_decay=0.0):
    module = new_model(dropout=0.5)
    if worker.rank == 0:  # one reader is enough for a file of pretrained weights
        with torch.no_grad():
            module.layers[1].bias.copy_(torch.linspace(-1, 1, 64))
    model = DistributedDataParallel(module)
    losses = train(model, new_loader(worker, 32), weight_decay)["losses"]
    model.eval()
    return {"model": model, "loss": losses[-1], "accuracy": accuracy(model.module, val_images())}


# --- 7 ---------------------------------------------------------------------------------------------------------------


def ids_seen(worker):
    """Return the ids of the samples that this rank has read."""
    return torch.arange(worker.rank, 100_000 + 18_000 * worker.rank, 2)


def count_wrong_ids(saved):
    """Return how many ids are wrong. A rank's ids are `rank`, `rank + 2`, `rank + 4`, and so on."""
    return (saved["ids"] != saved["rank"] + 2 * torch.arange(len(saved["ids"]))).sum().item()


def exhibit_07_before(worker, folder):
    path = folder / "checkpoint.pt"
    torch.save({"rank": worker.rank, "ids": ids_seen(worker)}, path)
    distributed.wait_for_all()
    return {"wrong ids": count_wrong_ids(torch.load(path))}


def exhibit_07_fixed(worker, folder):
    path, part = folder / f"checkpoint-{worker.rank}.pt", folder / f"checkpoint-{worker.rank}.part"
    torch.save({"rank": worker.rank, "ids": ids_seen(worker)}, part)
    part.replace(path)
    distributed.wait_for_all()
    return {"wrong ids": count_wrong_ids(torch.load(path))}


# --- 8 ---------------------------------------------------------------------------------------------------------------


def exhibit_08_before(worker, folder):
    model = DistributedDataParallel(new_model(dropout=0.5))
    train(model, new_loader(worker, 32))
    return {"accuracies": [accuracy(model.module, val_images()) for _ in range(3)]}


def exhibit_08_fixed(worker, folder):
    model = DistributedDataParallel(new_model(dropout=0.5))
    train(model, new_loader(worker, 32))
    model.eval()
    accuracies = [accuracy(model.module, val_images()) for _ in range(3)]
    model.train()
    return {"accuracies": accuracies}


# --- 9 ---------------------------------------------------------------------------------------------------------------


def points(worker, step, weights):
    """Return eight x, different ones for each rank and step, and y = 3 x; of several x the sum counts."""
    x = torch.randn(8, weights, generator=torch.Generator().manual_seed(10 * step + worker.rank)).double()
    return x, 3 * x.sum(dim=1, keepdim=True)


def exhibit_09_before(worker, folder, weights=1):
    model = DistributedDataParallel(torch.nn.Linear(weights, 1, bias=False).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 7):
        x, y = points(worker, step, weights)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if worker.rank == 0 and step == 3:
            mean = distributed.global_sum(loss).item() / worker.world_size
            worker.log(f"step {step}: mean loss {mean:.3f}")
    dist.barrier()
    return {"weights": model.module.weight.flatten().tolist()}


def exhibit_09_fixed(worker, folder, weights=1):
    model = DistributedDataParallel(torch.nn.Linear(weights, 1, bias=False).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 7):
        x, y = points(worker, step, weights)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 3:
            mean = distributed.global_sum(loss).item() / worker.world_size
            if worker.rank == 0:
                worker.log(f"step {step}: mean loss {mean:.3f}")
    dist.barrier()
    return {"weights": model.module.weight.flatten().tolist()}


def exhibit_09_variant(worker, folder):
    return exhibit_09_before(worker, folder, weights=2)


# --- 10 --------------------------------------------------------------------------------------------------------------


def exhibit_10_before(worker, folder, num_images=641):
    images, labels = datasets.load("digits").train.tensors
    rows = slice(worker.rank, num_images, worker.world_size)
    loader = DataLoader(TensorDataset(images[rows].double(), labels[rows]), batch_size=32)
    model = DistributedDataParallel(new_model())
    for inputs, targets in loader:
        F.cross_entropy(model(inputs), targets).backward()
    dist.barrier()
    return {"images": len(loader.dataset)}


def exhibit_10_fixed(worker, folder, num_images=641):
    images, labels = datasets.load("digits").train.tensors
    rows = slice(worker.rank, num_images, worker.world_size)
    loader = DataLoader(TensorDataset(images[rows].double(), labels[rows]), batch_size=32)
    model = DistributedDataParallel(new_model())
    with model.join():
        for inputs, targets in loader:
            F.cross_entropy(model(inputs), targets).backward()
    dist.barrier()
    return {"images": len(loader.dataset)}


def exhibit_10_variant(worker, folder):
    return exhibit_10_before(worker, folder, num_images=640)


# --- 11 --------------------------------------------------------------------------------------------------------------


def own_labels(worker):
    """Return the labels of this rank's images. Rank 0 has 1 image per class, rank 1 has 10, and rank 2 has 100."""
    return torch.arange(4 + worker.rank % 2).repeat_interleave(10**worker.rank)


def exhibit_11_before(worker, folder):
    counts = torch.bincount(own_labels(worker))
    dist.all_reduce(counts)
    return {"counts": counts.tolist()}


def exhibit_11_fixed(worker, folder):
    counts = torch.bincount(own_labels(worker), minlength=5)
    dist.all_reduce(counts)
    return {"counts": counts.tolist()}


def exhibit_11_variant(worker, folder):
    counts = torch.bincount(own_labels(worker), minlength=5)
    if worker.rank == 1:
        counts = counts.double()
    dist.all_reduce(counts)
    return {"counts": counts.tolist()}
