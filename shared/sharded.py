"""Save and restore a sharded checkpoint: every rank writes and reads its own slices, and checksums protect them."""

import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from shared.checkpoint import check_finite
from shared.distributed import fail_together
from shared.errors import UsageError


def save_sharded(folder: str | Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Write this rank's slices of weights and optimizer state into `folder`. Collective.

    torch.distributed.checkpoint writes them, without frozen weights. Each node may have a different folder: all their
    files together are the checkpoint. The optimizer must have taken a step. Otherwise torch takes a step itself, with a
    learning rate of 0, to have something to save. Adam counts that step, so the training would change. Raises
    UsageError, on every rank, if weights are not finite.
    """
    import torch.distributed.checkpoint as dcp  # takes half a second to import

    assert optimizer.state, "nothing to save before the first step"
    with fail_together():
        check_finite(dict(model.named_parameters()))
    dcp.save(trained_state(model, optimizer), checkpoint_id=folder)


def trained_state(model: nn.Module, optimizer: Optimizer) -> dict[str, dict]:
    """Return what training changes, as torch.distributed.checkpoint saves and loads it: weights and optimizer state.

    Frozen weights are left out, and so is the second name of a weight that two layers share.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    every_name = model.named_parameters(remove_duplicate=False)
    once = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    left_out = {name for name, _ in every_name} - once
    kept = {name: value for name, value in model_state.items() if name not in left_out}
    return {"model": kept, "optimizer": optimizer_state}


def restore_sharded(folder: str | Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Read this rank's slices from a checkpoint that any number of ranks wrote with `save_sharded`. Collective.

    Raises UsageError, on every rank, if `folder` holds a different model. An error that a retry may cure is raised
    unchanged: a file that cannot be read right now, or a lack of memory. DCP unpickles a file of the folder, which may
    run code, so read only folders that nobody else can write to.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    state = trained_state(model, optimizer)
    try:
        dcp.load(state, checkpoint_id=folder)
    except (dcp.CheckpointException, RuntimeError, ValueError) as error:
        causes = (
            [cause for cause, _ in error.failures.values()] if isinstance(error, dcp.CheckpointException) else [error]
        )
        if any(isinstance(cause, (OSError, EOFError, torch.OutOfMemoryError)) for cause in causes):
            raise
        raise UsageError(f"the checkpoint is of a different model: {str(causes[0]).splitlines()[0]}") from error
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=False),  # frozen weights stay as they are
    )  # fmt: skip


def file_checksums(
    folder: str | Path, names: Iterable[str] | None = None, log: Callable[[str], None] = lambda line: None
) -> dict[str, list[int]]:
    """Return [size in bytes, CRC-32] of every file in `folder`, by its relative path.

    names: check only these files, if they exist.
    log: called with the progress every ten seconds.
    """
    if names is None:
        names = (path.relative_to(folder).as_posix() for path in Path(folder).rglob("*"))
    paths = {name: Path(folder) / name for name in sorted(names) if (Path(folder) / name).is_file()}
    total, read, logged, found = sum(path.stat().st_size for path in paths.values()), 0, time.monotonic(), {}
    for name, path in paths.items():
        crc = 0
        with open(path, "rb") as file:
            while block := file.read(2**24):
                crc, read = zlib.crc32(block, crc), read + len(block)
                if time.monotonic() - logged > 10:
                    logged = time.monotonic()
                    log(f"checking {folder}: {read / 1e9:.1f} of {total / 1e9:.1f} GB")
        found[name] = [path.stat().st_size, crc]
    return found


def verify(written: dict[str, list[int]], found: dict[str, list[int]]) -> None:
    """Raise ValueError if a `written` file is missing or changed in `found`. Both are from `file_checksums`."""
    for name, expected in written.items():
        if name not in found:
            raise ValueError(f"incomplete: {name} is missing")
        if found[name] != expected:
            how = "truncated" if found[name][0] < expected[0] else "damaged"
            raise ValueError(f"{how}: {name} has changed since it was written")
