"""Join process groups, seed generators, sum over ranks, and raise errors on every rank.

Every rank must call a function that is marked "Collective".
"""

import atexit
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from shared.errors import StorageError, UsageError
from shared.rendezvous import choose_gloo_interface, name_this_attempt

FROM_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The number of processes that other launchers have started: Slurm's srun, Open MPI, Hydra (MPICH, Intel MPI).
FROM_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
MAX_WAIT = timedelta(hours=12)  # while one rank reads, copies or downloads, and the others wait


@dataclass(frozen=True)
class Worker:
    """Who this process is: its rank among `world_size`, its rank on this node, and its device.

    label: replaces the rank at the beginning of its log lines.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    label: str | None = None

    def log(self, message: str) -> None:
        """Print one line that says which process it comes from."""
        # The newline is part of the string: a single write keeps the lines of two ranks apart.
        print(f"[{self.label or f'rank {self.rank}/{self.world_size}'}] {message}\n", end="", flush=True)


def rank_from_environment() -> int:
    """Return the RANK that torchrun has set for this process, or 0 if torchrun did not start it.

    Rank 0 is also the answer if some of torchrun's variables are missing. Such a process has to report its own error,
    because `join` will refuse it.
    """
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() and all(name in os.environ for name in FROM_TORCHRUN) else 0


def check_environment() -> None:
    """Raise UsageError if the environment does not describe a complete process group.

    That is the case if some of torchrun's variables are missing or wrong, and if a launcher such as srun has started
    many processes without connecting them.
    """
    numbers = {name: os.environ[name] for name in FROM_TORCHRUN if name in os.environ and name != "MASTER_ADDR"}
    for name, value in numbers.items():
        if not value.isdigit():
            raise UsageError(f"{name}={value} is not a whole number: start with torchrun, or unset {name}")
    if "RANK" in numbers:
        if missing := [name for name in FROM_TORCHRUN if name not in os.environ]:
            raise UsageError(f"RANK is set without {', '.join(missing)}: start with torchrun, or unset RANK")
        for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
            if int(numbers[rank]) >= int(numbers[size]):
                raise UsageError(f"{rank}={numbers[rank]} is too large for {size}={numbers[size]}: start with torchrun")
    elif int(numbers.get("WORLD_SIZE", 1)) > 1:
        raise UsageError(
            f"WORLD_SIZE={numbers['WORLD_SIZE']} is set without RANK: start with torchrun, or unset WORLD_SIZE"
        )
    else:
        for name in FROM_LAUNCHERS:
            if os.environ.get(name, "1").isdigit() and int(os.environ.get(name, "1")) > 1:
                raise UsageError(
                    f"this is one of {os.environ[name]} processes ({name}) that do not know of each other: let the "
                    "launcher start one torchrun per node (srun --ntasks-per-node 1 torchrun --nnodes ...), which "
                    "starts the processes"
                )


def join(timeout_s: float = 600) -> Worker:
    """Join the process group that torchrun describes in the environment: nccl on GPUs, gloo on CPUs.

    Under plain `python` there is no group, and the worker is rank 0 of 1. If a rank does not reach a collective within
    `timeout_s` seconds, the collective raises on the others. Raises UsageError if a node has more processes than GPUs,
    or if `check_environment` raises it.
    """
    check_environment()
    if "RANK" not in os.environ:
        return Worker(device=torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_world_size > torch.cuda.device_count():
            raise UsageError(
                f"{local_world_size} processes on a node with {torch.cuda.device_count()} GPU(s): "
                "start one process per GPU, or set CUDA_VISIBLE_DEVICES= to use the CPU"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    choose_gloo_interface(os.environ["MASTER_ADDR"])
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    prefix = name_this_attempt(store, rank, world_size, timeout_s)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(prefix, store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        # Binding the device makes NCCL connect now, so a network problem shows here and not in the first step.
        device_id=device if device.type == "cuda" else None,
    )
    # A rank that leaves while another is still connecting would break the other's start.
    dist.barrier()
    return Worker(rank, local_rank, world_size, device)


def join_alone(device: torch.device) -> None:
    """Make a process group of this process alone, unless there is one: FSDP2 and DeepSpeed need a group."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it


def leave() -> None:
    """Leave the process group, if there is one. Call it last in a script.

    If a process group or a DistributedDataParallel is still alive while Python tears down its modules, torch 2.15 with
    gloo sometimes aborts the process ("terminate called without an active exception"). So the names in the
    script's own module are cleared earlier, while Python still runs normally. In a short script, without a function
    `main`, these objects are among them.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        atexit.register(lambda: (vars(sys.modules["__main__"]).clear(), gc.collect()))


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, on the CPU and on every GPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def global_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the element-wise sum of `values` over all ranks, the same on every rank. Collective.

    `values` itself is not changed.
    """
    total = values.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def global_max(value: float) -> float:
    """Return the largest `value` of all ranks, the same on every rank. Collective."""
    return max(gather_objects(value))


def gather_objects(value: object) -> list:
    """Return a list with one Python object from every rank, in rank order, on every rank. Collective."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank_zero(value: object) -> object:
    """Return rank 0's `value` on every rank; the values of the others are ignored. Collective."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def check_same(value: object, message: str) -> None:
    """Raise UsageError with `message` on every rank unless `value` is the same on all of them. Collective."""
    if len(set(gather_objects(value))) > 1:
        raise UsageError(message)


def broadcast_buffers(model: torch.nn.Module) -> None:
    """Copy rank 0's buffers, such as BatchNorm's running statistics, to every rank. Collective.

    They are the ones that a checkpoint holds.
    """
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def wait_for_all() -> None:
    """Wait until every rank has called this, however long one of them takes. Collective.

    An ordinary collective raises when a rank is late by the group's timeout, which is there to find hangs in training.
    Reading a large checkpoint or downloading a data set may well take longer. So this function waits through the
    group's key-value store, until the launcher ends the processes, or for MAX_WAIT.
    """
    if dist.is_initialized():
        store, world_size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
        arrived = store.add("workshop/arrived", 1)  # over all calls so far
        meeting = f"workshop/all/{(arrived + world_size - 1) // world_size}"
        if arrived % world_size == 0:
            store.set(meeting, "")
        store.wait([meeting], MAX_WAIT)


@contextmanager
def fail_together() -> Iterator[None]:
    """Raise any rank's ValueError or OSError on every rank, as a UsageError. Collective.

    It becomes a StorageError if every error is an OSError.

    Without this, one rank would leave while the others wait for it in the next collective. A rank may spend a long time
    in the block, because the others wait in `wait_for_all`. The block must not contain a collective, except
    `local_first`.
    """
    problem = None
    try:
        yield
    except (ValueError, OSError) as error:
        problem = str(error), StorageError if isinstance(error, (OSError, StorageError)) else UsageError
    wait_for_all()
    problems = gather_objects(problem)
    if failed := [rank for rank, problem in enumerate(problems) if problem is not None]:
        message = problems[failed[0]][0]
        kind = UsageError if any(problems[rank][1] is UsageError for rank in failed) else StorageError
        raise kind(f"rank {failed[0]}: {message}" if failed[0] > 0 else message)


def retry(action: Callable[[], object], seconds: float) -> object:
    """Call `action` until it raises no OSError, for at most `seconds`, and return its result.

    A new node may mount its folders late.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return action()
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(1)


@contextmanager
def local_first(worker: Worker) -> Iterator[None]:
    """Let the first process of each node run the block before the others do. Collective.

    It downloads the files, and the others find them. Rank 0 goes before all of them, because nodes may share a disk,
    and two simultaneous downloads would spoil the file.
    """
    turn = 0 if worker.rank == 0 else 1 if worker.local_rank == 0 else 2
    for _ in range(turn):
        wait_for_all()
    try:
        yield
    finally:
        for _ in range(turn, 2):
            wait_for_all()


def warm_up_ddp_buckets(ddp_model: torch.nn.Module, empty_loss: Callable[[], torch.Tensor]) -> None:
    """Run one backward pass over no samples, so that DDP regroups its gradient buckets now. Collective.

    DDP regroups them once, after its first backward pass, in the order in which the gradients became ready. With more
    than two ranks the new order changes how sums are rounded. Once the regrouping is done, a resumed run adds in the
    same order as an uninterrupted one. Weights, statistics and random generators do not change.

    empty_loss: computes the loss of `ddp_model` on a batch of no samples.
    """
    ddp_model.train()
    for module in ddp_model.modules():  # as in training, but with dropout and BatchNorm off
        if not any(module.children()):
            module.eval()
    with torch.backends.cudnn.flags(enabled=False):  # cuDNN's recurrent layers have no backward pass in eval mode
        empty_loss().backward()
    ddp_model.zero_grad()
    ddp_model.train()
