"""Save a whole training state atomically, read it safely, and find the newest readable one again."""

import os
import pickle
import random
import re
import uuid
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
    """Write `state` to `path`, so that the file holds either its old or its new content, never half of one.

    The bytes go to a temporary file in the same folder and are flushed to the disk. Then the file is renamed, which is
    atomic on a POSIX file system. The temporary name is new each time: a process that is frozen here may wake up when
    another one has written the same checkpoint. Returns the path.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # is left only if saving has failed
    return path


def save_safely(state: dict, path: str | Path) -> Path:
    """Write `state` as `save_atomically` does, and delete what killed saves of earlier checkpoints have left.

    Raises OSError with the system's reason.
    """
    try:
        written = save_atomically(state, path)
    except (OSError, RuntimeError) as error:
        # On a full disk torch raises an error of its own while it handles the system's.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"cannot save {path}: {getattr(cause, 'strerror', None) or cause}") from error
    for left in written.parent.glob(".checkpoint-*.partial"):
        if left.name < f".{written.name}":
            left.unlink(missing_ok=True)
    return written


def load(path: str | Path) -> dict:
    """Return the state in `path`, with its tensors on the CPU.

    Raises ValueError with the reason if the file is truncated, damaged, not a checkpoint, or holds weights that are not
    finite. `weights_only=True` makes sure that reading runs no code from the file. The checksums inside the file are
    verified first, because torch.load does not notice a flipped bit.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            # If an attribute bit marks an entry as a folder, torch returns uninitialized memory for it.
            damaged = damaged or next((entry.filename for entry in archive.infolist() if entry.external_attr), None)
        if damaged:
            raise ValueError(f"damaged: {damaged} has changed since it was written")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError("truncated, or not a checkpoint") from error
    except (RuntimeError, pickle.UnpicklingError, OSError) as error:
        raise ValueError(str(error).splitlines()[0]) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError("not a checkpoint of this workshop")
    if name := first_not_finite(state.get("model", {})):
        raise ValueError(f"diverged: {name} is not finite")
    if not state.get("finite", True):  # of a sharded checkpoint, whose weights are in other files
        raise ValueError("diverged: its weights were not finite")
    return state


def first_not_finite(weights: dict[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor that holds an infinity or a NaN, or None.

    For a DTensor only this rank's local shard is checked.
    """
    for name, tensor in weights.items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if not local.isfinite().all():
            return name
    return None


def check_finite(weights: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if weights are not finite: saving them would push out a good checkpoint."""
    if name := first_not_finite(weights):
        raise ValueError(f"diverged: {name} is not finite (not saved): start a new run with a smaller --lr")


def path_for_step(folder: str | Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` optimizer steps, in a run's folder."""
    return Path(folder) / f"checkpoint-{step:08d}.pt"


def list_newest_first(folder: str | Path) -> list[Path]:
    """Return the paths of the checkpoints in a run's folder, readable or not, newest first."""
    folder = Path(folder)
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, reverse=True)


def first_readable(paths: list, load: Callable[[Path], dict] = load) -> tuple[Path | None, dict | None, list[str]]:
    """Return (path, state, skipped) for the first of `paths` that `load` can read.

    skipped: one line for each path that could not be read, with the reason. If none can be read, path and state are
    None.
    """
    skipped = []
    for path in paths:
        try:
            return path, load(path), skipped
        except (ValueError, OSError) as error:
            skipped.append(f"{Path(path).name} ({error})")
    return None, None, skipped


def keep_newest(written: Path, keep: int = 2) -> None:
    """Keep `written` and the `keep - 1` checkpoints before it; delete the older ones.

    Newer checkpoints stay. They are files that a resumed run could not read, has skipped, and will overwrite.
    """
    older = [path for path in list_newest_first(written.parent) if path.name < written.name]
    for path in older[keep - 1 :]:
        path.unlink()


def random_state() -> dict:
    """Return the state of this process's Python, NumPy and torch generators, as plain data and tensors."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # None in a run on CPUs
    }


def set_random_state(state: dict) -> None:
    """Set this process's generators to a state that `random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def training_state(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, progress: dict) -> dict:
    """Return everything that a run needs to continue as if nothing had happened. Collective.

    model: the bare module, not its DDP wrapper, so that one process can load it too.
    progress: plain data. It holds epoch, step, the sampler's position and the metrics so far.
    """
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": gather_objects(random_state()),  # every rank draws its own numbers for dropout
        "progress": progress,
    }


def restore(state: dict, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, worker: Worker) -> dict:
    """Load a `training_state`, even at a different world size, and return its progress.

    A rank that the saved run did not have keeps its own generators. Raises ValueError if `state` belongs to a different
    model.
    """
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the checkpoint is of a different model: {str(error).splitlines()[0]}") from error
    scheduler.load_state_dict(state["scheduler"])
    if worker.rank < len(state["random"]):
        set_random_state(state["random"][worker.rank])
    return state["progress"]
