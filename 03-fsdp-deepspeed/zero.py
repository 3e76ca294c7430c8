"""List what DeepSpeed's engine keeps on a rank, and save and restore its checkpoints."""

import io
import os
import shutil
import socket
import uuid
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from shared.checkpoint import check_finite
from shared.distributed import Worker, fail_together, from_rank_zero, gather_objects, local_first, wait_for_all
from shared.errors import UsageError
from shared.on_ray import storage


def state_by_kind(engine: object) -> dict[str, list[torch.Tensor]]:
    """Return the tensors that a DeepSpeed engine keeps on this rank, without its communication buckets.

    The kinds are weights, gradients, master copy (float32, from stage 1 on, or in mixed precision) and Adam's moments.
    Each stage keeps them in different attributes.
    """
    parameters, optimizer = list(engine.module.parameters()), engine.optimizer
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for name in ("averaged_gradients", "all_grad_tensors"):  # all_grad_tensors while gradients are accumulated
        gradients += [part for parts in getattr(optimizer, name, {}).values() for part in parts or []]
    gradients += [buffer for buffer in [getattr(optimizer, "grad_partitions_flat_buffer", None)] if buffer is not None]
    master = list(getattr(optimizer, "single_partition_of_fp32_groups", []))  # stages 1 and 2
    master += [part for group in getattr(optimizer, "fp32_groups", []) for part in group]  # stage 0, mixed precision
    master += getattr(optimizer, "fp32_partitioned_groups_flat", [])  # stage 3
    inner = getattr(optimizer, "optimizer", optimizer)
    moments = [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    weights = [getattr(parameter, "ds_tensor", parameter) for parameter in parameters]
    return {"weights": weights, "gradients": gradients, "master copy": master, "moments": moments}


def state_tensors(engine: object) -> list[torch.Tensor]:
    """Return all tensors of `state_by_kind` in one list."""
    return [tensor for tensors in state_by_kind(engine).values() for tensor in tensors]


def undo_first_step(engine: object) -> None:
    """Undo the step that stage 0 takes in bf16 and fp16 when it is built, with zeros for gradients.

    DeepSpeed 0.19 makes the optimizer's state by it (`FP16_UnfusedOptimizer.initialize_optimizer_states`). Otherwise
    Adam's bias corrections would be one step ahead, and the weights decayed once too often.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    wrapper = engine.optimizer
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        for state in wrapper.optimizer.state.values():
            state["step"] *= 0  # a tensor or an integer
        for copies, weights in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
            for copy, weight in zip(copies, weights, strict=True):
                copy.data.copy_(weight)


def save_zero(folder: str | Path, engine: object) -> None:
    """Write this rank's slices of a DeepSpeed engine, in DeepSpeed's own format. Collective.

    The rest is as in `save_sharded`.
    """
    with fail_together():
        weights = dict(engine.module.named_parameters())
        check_finite({name: getattr(weight, "ds_tensor", weight) for name, weight in weights.items()})
    (Path(folder) / "zero").mkdir()  # DeepSpeed makes this folder on the first rank's node only
    engine.save_checkpoint(str(folder), tag="zero", save_latest=False)


@contextmanager
def universal_format(folder: str | Path, worker: Worker) -> Iterator[Path]:
    """Yield a temporary folder with the slices of `save_zero`, converted for any number of ranks. Collective.

    A stored checkpoint is never changed, so each node converts its own copy. Every start with a different number of
    ranks reads and writes the checkpoint once, and for a moment needs as much disk space again.
    """
    from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal  # takes seconds to import

    # A node's folder is named after its first process, so that it can be found and deleted if that is killed.
    processes = gather_objects((socket.gethostname(), worker.local_rank, os.getpid()))
    owner = next(pid for host, rank, pid in processes if (host, rank) == (socket.gethostname(), 0))
    converted = Path(f"{storage.temporary_prefix()}{owner}_{from_rank_zero(uuid.uuid4().hex)}")
    with local_first(worker):
        if not converted.exists():
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # hide its progress bars
                ds_to_universal(Namespace(
                    input_folder=str(Path(folder, "zero")), output_folder=str(converted / "universal"),
                    num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
                    inject_missing_state=True,
                ))  # fmt: skip
    try:
        yield converted
        wait_for_all()
    finally:
        if worker.local_rank == 0:
            shutil.rmtree(converted, ignore_errors=True)  # several nodes on one machine share the folder


def restore_zero(folder: str | Path, engine: object, universal: bool = False) -> None:
    """Read this rank's slices of a DeepSpeed engine. Collective.

    As in `restore_sharded`, they are unpickled, which may run code.
    universal: `folder` is in `universal_format`, and the engine's settings say `load_universal`.
    Raises UsageError if `folder` holds no DeepSpeed checkpoint.
    """
    loaded, _ = engine.load_checkpoint(str(folder), tag="universal" if universal else "zero")
    if loaded is None:
        raise UsageError(f"{folder} holds no DeepSpeed checkpoint")
