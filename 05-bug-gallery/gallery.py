"""The exhibits of the bug gallery: each a function with a mistake, and the same without it, run by two ranks.

    torchrun --standalone --nproc-per-node 2 gallery.py FOLDER            all that end; FOLDER gets results.json
    torchrun --standalone --nproc-per-node 2 gallery.py FOLDER late_a     one of those that hang: late_a or late_b

Every function gets the rank's `Worker` and a folder that both ranks see, and returns what is to be seen, for JSON.
"""

import io
import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from shared import datasets, distributed, models, sampling
from shared.distributed import Worker

SEED, EPOCHS = 7, 4
TIMEOUT = timedelta(seconds=float(os.environ.get("TIMEOUT_S", 3)))  # of the two that are meant to hang


def new_model(dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(SEED)
    return models.MLP(input_dim=64, hidden_dim=64, dropout=dropout).double()


def new_loader(worker: Worker, batch_size: int) -> DataLoader:
    images, labels = datasets.load("digits").train.tensors
    dataset = TensorDataset(images.double(), labels)
    sampler = sampling.UnpaddedDistributedSampler(dataset, worker.world_size, worker.rank, shuffle=True, seed=SEED)
    return DataLoader(dataset, batch_size, sampler=sampler)


def train(model: torch.nn.Module, loader: DataLoader, lr: float = 0.05) -> list[float]:
    """EPOCHS epochs of SGD; the global mean loss of each."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr), []
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
    return losses


def accuracy(model: torch.nn.Module, images: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(dim=1) == datasets.load("digits").val.tensors[1]).double().mean().item()


def val_images() -> torch.Tensor:
    return datasets.load("digits").val.tensors[0].double()


# --- 1. Slower with every rank ---------------------------------------------------------------------------------------


def steps_broken(worker, folder):
    loader = new_loader(worker, batch_size=64)
    return {"losses": train(DistributedDataParallel(new_model()), loader), "steps": EPOCHS * len(loader)}


def steps_mended(worker, folder):
    loader = new_loader(worker, batch_size=64 // worker.world_size)
    return {"losses": train(DistributedDataParallel(new_model()), loader), "steps": EPOCHS * len(loader)}


# --- 2. A large batch that learns less -------------------------------------------------------------------------------


def large_broken(worker, folder):
    loader = new_loader(worker, batch_size=320 // worker.world_size)  # as large as the memory allows: five times 64
    return {"losses": train(DistributedDataParallel(new_model()), loader, lr=0.05)}


def large_mended(worker, folder):
    loader = new_loader(worker, batch_size=320 // worker.world_size)
    return {"losses": train(DistributedDataParallel(new_model()), loader, lr=0.05 * 320 / 64)}


# --- 3. It works on my machine ---------------------------------------------------------------------------------------

CONTENT = io.BytesIO()
torch.save(torch.arange(100_000), CONTENT)


def download(path, meanwhile=lambda: None):
    """From a slow network: half of the file, some time, the other half."""
    half = len(CONTENT.getvalue()) // 2
    with open(path, "wb") as file:
        file.write(CONTENT.getvalue()[:half])
        file.flush()
        meanwhile()
        file.write(CONTENT.getvalue()[half:])


def first_broken(worker, folder):
    path, problem = folder / "first.pt", None
    if worker.rank == 1:
        distributed.wait_for_all()  # rank 1 comes a moment later than rank 0, that is all
    if not path.exists():
        download(path, meanwhile=lambda: (distributed.wait_for_all(), distributed.wait_for_all()))
    try:
        loaded = len(torch.load(path))
    except Exception as error:
        loaded, problem = None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if worker.rank == 1:
        distributed.wait_for_all()
    return {"loaded": loaded, "problem": problem}


def first_mended(worker, folder):
    path = folder / "first-mended.pt"
    with distributed.local_first(worker):
        if not path.exists():
            download(path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
    return {"loaded": len(torch.load(path)), "problem": None}


# --- 4. Half precision, no progress ----------------------------------------------------------------------------------


TOKENS = 4_000_000  # of a global batch, as large language models have it; the loss is the mean over them


def small_gradients(worker, scaler):
    """Ten steps with fp16 on a part of such a batch: losses, and the share of the gradients that are exactly zero."""
    model, losses = DistributedDataParallel(new_model().float()), []
    images, labels = (part[worker.rank :: worker.world_size] for part in datasets.load("digits").train.tensors)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003, eps=1e-12)  # far below such gradients; no mistake
    for _ in range(10):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(images), labels, reduction="sum")
        optimizer.zero_grad()
        scaler.scale(loss / TOKENS).backward()
        scaler.unscale_(optimizer)
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
        losses.append(distributed.global_sum(loss).item() / 1280)
    return {"losses": losses, "zeros": (gradients == 0).double().mean().item()}


def half_broken(worker, folder):
    return small_gradients(worker, torch.amp.GradScaler("cpu", enabled=False))


def half_mended(worker, folder):
    return small_gradients(worker, torch.amp.GradScaler("cpu"))


# --- 5. Good in training, bad in the product -------------------------------------------------------------------------


def served_broken(worker, folder):
    model = DistributedDataParallel(new_model())
    train(model, new_loader(worker, 32))
    pixels = (val_images() + 1) * 8  # what the scanner sends: 0 to 16
    return {"validated": accuracy(model.module, val_images()), "served": accuracy(model.module, pixels)}


def served_mended(worker, folder):
    model = DistributedDataParallel(new_model())
    train(model, new_loader(worker, 32))
    pixels = datasets.normalize((val_images() + 1) * 8, largest=16).double()  # the function that training has used
    return {"validated": accuracy(model.module, val_images()), "served": accuracy(model.module, pixels)}


# --- 6. Loaded, and knows nothing ------------------------------------------------------------------------------------


def loaded_broken(worker, folder):
    model = DistributedDataParallel(new_model())
    train(model, new_loader(worker, 32))
    weights, fresh = model.state_dict(), models.MLP(input_dim=64, hidden_dim=64).double().eval()
    report = fresh.load_state_dict(weights, strict=False)  # strict=True said something about keys
    found = {"unexpected": report.unexpected_keys, "missing": report.missing_keys}
    return {"trained": accuracy(model, val_images()), "loaded": accuracy(fresh, val_images()), **found}


def loaded_mended(worker, folder):
    model = DistributedDataParallel(new_model())
    train(model, new_loader(worker, 32))
    weights, fresh = model.module.state_dict(), models.MLP(input_dim=64, hidden_dim=64).double().eval()
    report = fresh.load_state_dict(weights)
    found = {"unexpected": report.unexpected_keys, "missing": report.missing_keys}
    return {"trained": accuracy(model, val_images()), "loaded": accuracy(fresh, val_images()), **found}


# --- 7. Half of the augmentation is missing --------------------------------------------------------------------------


def noise_broken(worker, folder):
    distributed.seed_everything(SEED)  # to make the run repeatable
    return {"shifts": torch.randint(-2, 3, (8,)).tolist()}  # by how much the next eight images are moved


def noise_mended(worker, folder):
    distributed.seed_everything(SEED + worker.rank)
    return {"shifts": torch.randint(-2, 3, (8,)).tolist()}


# --- 8. Every picture twice ------------------------------------------------------------------------------------------


class Shifted(Dataset):
    """Eight images; all that matters is by how much each is moved."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return int(self.generator.integers(-9, 10))


class ShiftedOnItsOwn(Shifted):
    def __getitem__(self, index):
        if not hasattr(self, "own"):  # the first time in this process
            info = get_worker_info()  # None in the main process, without workers
            self.own = np.random.default_rng(info.seed if info else torch.initial_seed())
        return int(self.own.integers(-9, 10))


def workers_broken(worker, folder):
    loader = DataLoader(Shifted(seed=SEED + worker.rank), batch_size=2, num_workers=2)
    return {"epochs": [torch.cat(list(loader)).tolist() for _ in range(2)]}


def workers_mended(worker, folder):
    torch.manual_seed(SEED + worker.rank)  # what the workers' own seeds are drawn from, anew in each epoch
    loader = DataLoader(ShiftedOnItsOwn(seed=None), batch_size=2, num_workers=2)
    return {"epochs": [torch.cat(list(loader)).tolist() for _ in range(2)]}


# --- 9. A loss like a ruler ------------------------------------------------------------------------------------------


def ten_steps(worker, model, optimizer):
    """The losses, and what kinds of parameters optimizer and model hold."""
    (images, labels), losses = next(iter(new_loader(worker, 32))), []
    for _ in range(10):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(distributed.global_sum(loss).item() / worker.world_size)
    places = {"in the optimizer": optimizer.param_groups[0]["params"], "in the model": model.parameters()}
    kinds = {place: sorted({type(each).__name__ for each in held}) for place, held in places.items()}
    return {"losses": losses, **kinds}


def order_broken(worker, folder):
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    fully_shard(model, mesh=init_device_mesh("cpu", (worker.world_size,)))
    return ten_steps(worker, model, optimizer)


def order_mended(worker, folder):
    model = new_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (worker.world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return ten_steps(worker, model, optimizer)


# --- 10. Two models by the name of one -------------------------------------------------------------------------------


def drift_broken(worker, folder):
    model = DistributedDataParallel(new_model())
    if worker.rank == 0:  # one reader is enough for a file of pretrained weights
        with torch.no_grad():
            model.module.layers[1].bias.copy_(torch.linspace(-1, 1, 64))
    losses = train(model, new_loader(worker, 32))
    return {"losses": losses, "accuracy": accuracy(model, val_images()), "sum": sum_of(model)}


def drift_mended(worker, folder):
    module = new_model()
    if worker.rank == 0:
        with torch.no_grad():
            module.layers[1].bias.copy_(torch.linspace(-1, 1, 64))
    model = DistributedDataParallel(module)  # sends rank 0's weights to all, now and never again
    losses = train(model, new_loader(worker, 32))
    return {"losses": losses, "accuracy": accuracy(model, val_images()), "sum": sum_of(model)}


def sum_of(model):
    return sum(parameter.double().sum().item() for parameter in model.parameters())


# --- 11. A checkpoint that loads, and is wrong ----------------------------------------------------------------------


def written_broken(worker, folder):
    path, content = folder / "checkpoint.pt", io.BytesIO()
    torch.save({"rank": worker.rank, "seen": torch.arange(worker.rank, 100_000 + 18_000 * worker.rank, 2)}, content)
    half = len(content.getvalue()) // 2
    with open(path, "wb") as file:
        distributed.wait_for_all()
        for part in (content.getvalue()[:half], content.getvalue()[half:]):
            for rank in range(worker.world_size):  # one order of events
                if rank == worker.rank:
                    file.write(part)
                    file.flush()
                distributed.wait_for_all()
    return {"wrong": wrong_numbers(path)}


def written_mended(worker, folder):
    path = folder / "checkpoint-mended.pt"
    if worker.rank == 0:
        torch.save({"rank": worker.rank, "seen": torch.arange(worker.rank, 100_000, 2)}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    distributed.wait_for_all()
    return {"wrong": wrong_numbers(path)}


def wrong_numbers(path):
    """How many of a rank's ids, every second one from its rank on, are not what it has saved."""
    loaded = torch.load(path)
    return (loaded["seen"] != loaded["rank"] + 2 * torch.arange(len(loaded["seen"]))).sum().item()


# --- 12. It validates badly, and never twice the same ----------------------------------------------------------------


def validated_broken(worker, folder):
    model = DistributedDataParallel(new_model(dropout=0.5))
    train(model, new_loader(worker, 32))
    return {"accuracies": [accuracy(model, val_images()) for _ in range(3)]}


def validated_mended(worker, folder):
    model = DistributedDataParallel(new_model(dropout=0.5))
    train(model, new_loader(worker, 32))
    model.eval()
    accuracies = [accuracy(model, val_images()) for _ in range(3)]
    model.train()
    return {"accuracies": accuracies}


# --- Two that hang ---------------------------------------------------------------------------------------------------


def late_a(worker, folder):
    distributed.wait_for_all()
    dist.set_timeout(TIMEOUT)  # only now: how long the ranks take to meet is another matter
    loss = torch.tensor(1.0 + worker.rank)
    for step in range(3):
        if step == 2 and worker.rank == 0:
            dist.all_reduce(loss)
            worker.log(f"mean loss {loss.item() / worker.world_size}")
    distributed.wait_for_all()


def late_b(worker, folder):
    images, labels = datasets.load("digits").train.tensors
    mine = slice(worker.rank, 641, worker.world_size)  # every second image
    loader = DataLoader(TensorDataset(images[mine].double(), labels[mine]), batch_size=32)
    model = DistributedDataParallel(new_model())
    distributed.wait_for_all()
    dist.set_timeout(TIMEOUT)
    for inputs, targets in loader:
        F.cross_entropy(model(inputs), targets).backward()
    distributed.wait_for_all()


def late_b_mended(worker, folder):
    images, labels = datasets.load("digits").train.tensors
    mine = slice(worker.rank, 641, worker.world_size)
    loader = DataLoader(TensorDataset(images[mine].double(), labels[mine]), batch_size=32)
    model, seen = DistributedDataParallel(new_model()), 0
    with model.join():  # who is done answers the others' all-reduces with zeros
        for inputs, targets in loader:
            F.cross_entropy(model(inputs), targets).backward()
            seen += len(targets)
    return {"batches": len(loader), "seen": seen}


HANG = (late_a, late_b)


def note_where(path):
    """Write down twice a second which calls the main thread is in: (file, line, function), the innermost first.

    faulthandler.dump_traceback_later would do it in one line. But it reads the stack while the thread may be changing
    it, and one day that is a segmentation fault. This thread holds the lock that the main thread runs by.
    """
    while True:
        time.sleep(0.5)
        frame = sys._current_frames()[threading.main_thread().ident]
        calls = [(Path(at.filename).name, at.lineno, at.name) for at in reversed(traceback.extract_stack(frame))]
        if any(file == "gallery.py" for file, *_ in calls):  # not when it is ending
            path.with_suffix(".part").write_text(json.dumps(calls))
            path.with_suffix(".part").replace(path)


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    worker = distributed.join(timeout_s=120)
    known = {name: value for name, value in globals().items() if name.endswith(("_broken", "_mended"))}
    known |= {function.__name__: function for function in HANG}
    results = {}
    for name in names or [name for name in known if known[name] not in HANG]:
        distributed.seed_everything(SEED)
        if known[name] in HANG:
            place = folder / f"{name}-{worker.rank}.json"
            threading.Thread(target=note_where, args=(place,), daemon=True).start()
        results[name] = distributed.gather_objects(known[name](worker, folder))
    if worker.rank == 0:
        part = folder / "results.part"
        part.write_text(json.dumps(results))
        os.replace(part, folder / "results.json")
    distributed.leave()


if __name__ == "__main__":
    main()
