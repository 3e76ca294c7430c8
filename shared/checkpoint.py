"""A whole training state on disk: written atomically, read safely, and the newest readable one found again."""

import io
import os
import pickle
import random
import re
import time
import uuid
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shared.distributed import UsageError, Worker, gather_objects, local_first

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


def load(path: str | Path) -> dict:
    """The state in `path`, tensors on the CPU. Raises ValueError, saying why, for a file that cannot be trusted.

    Reads with `weights_only=True`: a checkpoint is data, and cannot run code. The check sums inside the file are
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
        raise ValueError("truncated or no checkpoint at all") from error
    except (RuntimeError, pickle.UnpicklingError, OSError) as error:
        raise ValueError(str(error).splitlines()[0]) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError("not a checkpoint of this workshop")
    return state


def path_for_step(folder: str | Path, step: int) -> Path:
    """Where the state after `step` optimizer steps lies in a run's folder."""
    return Path(folder) / f"checkpoint-{step:08d}.pt"


def list_newest_first(folder: str | Path) -> list[Path]:
    """The checkpoints in a run's folder, readable or not, newest first."""
    folder = Path(folder)
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, reverse=True)


def load_newest(folder: str | Path) -> tuple[Path | None, dict | None, list[str]]:
    """(path, state, what was skipped and why) of the newest readable checkpoint; (None, None, ...) without one."""
    return first_readable(list_newest_first(folder), load)


def first_readable(paths: list, load: Callable[[str | Path], dict]) -> tuple[str | Path | None, dict | None, list[str]]:
    """(path, state, what was skipped and why) of the first path that `load` can read; (None, None, ...) without one."""
    skipped = []
    for path in paths:
        state, problem = tried(load, path)
        if problem is None:
            return path, state, skipped
        skipped.append(problem)
    return None, None, skipped


def tried(action: Callable, path: str | Path, *more: object) -> tuple[object, str | None]:
    """(what action(path, *more) returns, None), or (None, the problem that it has with this checkpoint, in words)."""
    try:
        return action(path, *more), None
    except (ValueError, OSError) as error:
        return None, f"{Path(path).name} ({error})"


def make_folder(folder: str | Path) -> None:
    """Make a run's folder where it is missing. Raises OSError where it cannot be written to."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".writable").touch()
    (folder / ".writable").unlink()


def keep_newest(written: Path, keep: int = 2) -> None:
    """Delete what is older than `written` but for `keep - 1` of them.

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
    """Everything a run needs to go on as if nothing had happened. Collective: every rank calls it.

    model: the bare module, not its DDP wrapper, so that one process can load it too.
    progress: plain data of the script's own (epoch, step, position of the sampler, metrics so far).
    """
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": gather_objects(random_state()),  # dropout draws on every rank, so every rank's generators are kept
        "progress": progress,
    }


def restore(state: dict, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, worker: Worker) -> dict:
    """Put a `training_state` back, also at another world size, and return its progress.

    A rank that the saved run did not have keeps its own generators. Raises ValueError when `state` is of another model.
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


# --- sharded: every rank writes what it holds ------------------------------------------------------------------------


def save_sharded(folder: str | Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Write this rank's slices of weights and optimizer state into `folder`, with torch.distributed.checkpoint.

    Collective. The folder may be a different one on each node: their files together are the checkpoint. The optimizer
    must have taken a step: to have something to save, torch would take one of its own, with a rate of 0, which Adam
    counts like any other, and the training would be another one.
    """
    import torch.distributed.checkpoint as dcp  # half a second, for those who need it
    from torch.distributed.checkpoint.state_dict import get_state_dict

    assert optimizer.state, "nothing to save before the first step"
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def restore_sharded(folder: str | Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Read this rank's slices from what any number of ranks have written with `save_sharded`. Collective.

    Raises UsageError where `folder` holds another model: every rank meets the same error. One that trying again may
    cure (a file that cannot be read just now, memory) comes as it is. DCP unpickles a file of the folder, which may run
    code: read only what nobody else can write.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    try:
        dcp.load(state, checkpoint_id=folder)
    except (dcp.CheckpointException, RuntimeError, ValueError) as error:
        causes = (
            [cause for cause, _ in error.failures.values()] if isinstance(error, dcp.CheckpointException) else [error]
        )
        if any(isinstance(cause, (OSError, EOFError, torch.OutOfMemoryError)) for cause in causes):
            raise
        raise UsageError(f"the checkpoint is of another model: {str(causes[0]).splitlines()[0]}") from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def save_zero(folder: str | Path, engine: object) -> None:
    """Write this rank's slices of a DeepSpeed engine, in DeepSpeed's own format. Collective; folders as above."""
    (Path(folder) / "zero").mkdir()  # DeepSpeed makes it on the first rank's node only
    engine.save_checkpoint(str(folder), tag="zero", save_latest=False)


def make_universal(folder: str | Path, worker: Worker) -> None:
    """Convert what `save_zero` has written for any number of ranks, once on each node. Collective."""
    from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal  # takes seconds to import

    folder = Path(folder)
    with local_first(worker):
        if not (folder / "universal").exists():
            partial = folder / f"universal.{uuid.uuid4().hex}.partial"
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # it draws progress bars
                ds_to_universal(Namespace(
                    input_folder=str(folder / "zero"), output_folder=str(partial), num_extract_workers=1,
                    num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
                ))  # fmt: skip
            partial.rename(folder / "universal")


def restore_zero(folder: str | Path, engine: object, universal: bool = False) -> None:
    """Read this rank's slices of a DeepSpeed engine. Collective. DeepSpeed unpickles them, as in `restore_sharded`.

    universal: read what `make_universal` has made, for an engine whose settings say `load_universal`.
    """
    loaded, _ = engine.load_checkpoint(str(folder), tag="universal" if universal else "zero")
    if loaded is None:
        raise UsageError(f"{folder} holds no checkpoint of DeepSpeed")


def check_sums(
    folder: str | Path, names: Iterable[str] | None = None, log: Callable[[str], None] = lambda line: None
) -> dict[str, list[int]]:
    """Size in bytes and CRC-32 of every file in `folder`, by its path in it.

    names: of these alone, where they are there. log: told how far it is, every ten seconds.
    """
    if names is None:
        names = (path.relative_to(folder).as_posix() for path in Path(folder).rglob("*"))
    paths = {name: Path(folder) / name for name in sorted(names) if (Path(folder) / name).is_file()}
    total, read, said, found = sum(path.stat().st_size for path in paths.values()), 0, time.monotonic(), {}
    for name, path in paths.items():
        crc = 0
        with open(path, "rb") as file:
            while block := file.read(2**24):
                crc, read = zlib.crc32(block, crc), read + len(block)
                if time.monotonic() - said > 10:
                    said = time.monotonic()
                    log(f"checking {folder}: {read / 1e9:.1f} of {total / 1e9:.1f} GB")
        found[name] = [path.stat().st_size, crc]
    return found


def verify(written: dict[str, list[int]], found: dict[str, list[int]]) -> None:
    """Raises ValueError where one of the files that were `written` is not `found` as it was; both from `check_sums`."""
    for name, expected in written.items():
        if name not in found:
            raise ValueError(f"incomplete: {name} is missing")
        if found[name] != expected:
            how = "truncated" if found[name][0] < expected[0] else "damaged"
            raise ValueError(f"{how}: {name} in it is not as it was written")
