"""A whole training state on disk: written atomically, read safely, and the newest readable one found again."""

import os
import pickle
import random
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shared.distributed import Worker, gather_objects

FORMAT = "distributed-training-workshop checkpoint 1"
NAME = re.compile(r"checkpoint-(\d{8})\.pt")


def save_atomically(state: dict, path: str | Path) -> Path:
    """Write `state` to `path` so that `path` holds either the old file or the whole new one, never a half.

    The bytes go to a temporary name in the same folder, are flushed to the disk, and are renamed, which is atomic on a
    POSIX file system.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        torch.save({"format": FORMAT, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return path


def save_safely(state: dict, path: str | Path) -> Path:
    """As `save_atomically`. If that fails, nothing is left of the new file. Raises OSError with the system's reason."""
    path = Path(path)
    try:
        return save_atomically(state, path)
    except (OSError, RuntimeError) as error:
        path.with_name(f".{path.name}.partial").unlink(missing_ok=True)
        # On a full disk torch raises an error of its own while it handles the system's.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"cannot save {path}: {getattr(cause, 'strerror', None) or cause}") from error


def load(path: str | Path) -> dict:
    """The state in `path`, tensors on the CPU. Raises ValueError, saying why, for a file that cannot be trusted.

    Reads with `weights_only=True`: a checkpoint is data, and cannot run code. The checksums inside the file are
    verified first, since torch.load does not notice a flipped bit.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            # An attribute bit makes an entry a folder for torch, which then returns whatever lies in memory.
            damaged = damaged or next((entry.filename for entry in archive.infolist() if entry.external_attr), None)
        if damaged:
            raise ValueError(f"damaged: {damaged} in it is not as it was written")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError("truncated, or not a checkpoint") from error
    except (RuntimeError, pickle.UnpicklingError, OSError) as error:
        raise ValueError(str(error).splitlines()[0]) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError("not a checkpoint of this workshop")
    if name := first_not_finite(state.get("model", {})):
        raise ValueError(f"diverged: {name} in it is not finite")
    if not state.get("finite", True):  # of a sharded checkpoint, whose weights are in other files
        raise ValueError("diverged: its weights were not finite")
    return state


def first_not_finite(weights: dict[str, torch.Tensor]) -> str | None:
    """The name of the first tensor with an infinite or undefined number in it. Of a DTensor the local shard counts."""
    for name, tensor in weights.items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if not local.isfinite().all():
            return name
    return None


def check_finite(weights: dict[str, torch.Tensor]) -> None:
    """Raises ValueError if weights are not finite: saving them would push out a good checkpoint."""
    if name := first_not_finite(weights):
        raise ValueError(f"diverged: {name} is not finite (not saved): start a new run with a smaller --lr")


def path_for_step(folder: str | Path, step: int) -> Path:
    """Where a run's folder holds the state after `step` optimizer steps."""
    return Path(folder) / f"checkpoint-{step:08d}.pt"


def list_newest_first(folder: str | Path) -> list[Path]:
    """The checkpoints in a run's folder, readable or not, newest first."""
    folder = Path(folder)
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, reverse=True)


def first_readable(paths: list, load: Callable[[Path], dict] = load) -> tuple[Path | None, dict | None, list[str]]:
    """(path, state, what was skipped and why) of the first path that `load` can read; (None, None, ...) without one."""
    skipped = []
    for path in paths:
        try:
            return path, load(path), skipped
        except (ValueError, OSError) as error:
            skipped.append(f"{Path(path).name} ({error})")
    return None, None, skipped


def keep_newest(written: Path, keep: int = 2) -> None:
    """Keep `written` and the `keep - 1` checkpoints before it; delete the older ones.

    Newer ones stay: they can only be unreadable files that a resumed run has skipped and will write again.
    """
    older = [path for path in list_newest_first(written.parent) if path.name < written.name]
    for path in older[keep - 1 :]:
        path.unlink()


def random_state() -> dict:
    """The state of Python's, NumPy's and torch's generators in this process, as plain data and tensors."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # not by a run on CPUs
    }


def set_random_state(state: dict) -> None:
    """Put the generators of this process back to what `random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def training_state(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, progress: dict) -> dict:
    """Everything a run needs to continue as if nothing had happened. Collective: every rank calls it.

    model: the bare module, not its DDP wrapper, so that one process can load it too.
    progress: plain data (epoch, step, position of the sampler, metrics so far).
    """
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": gather_objects(random_state()),  # dropout draws on every rank, so every rank's generators are kept
        "progress": progress,
    }


def restore(state: dict, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, worker: Worker) -> dict:
    """Put a `training_state` back, even at a different world size, and return its progress.

    A rank that the saved run did not have keeps its own generators. Raises ValueError if `state` is of another model.
    """
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the checkpoint is of another model: {str(error).splitlines()[0]}") from error
    scheduler.load_state_dict(state["scheduler"])
    if worker.rank < len(state["random"]):
        set_random_state(state["random"][worker.rank])
    return state["progress"]
