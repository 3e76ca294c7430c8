"""Process groups without repetition: joining one, seeding, global sums, and errors that every rank sees."""

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
# How many processes other launchers have started: Slurm's srun, Open MPI, and Hydra (MPICH, Intel MPI).
FROM_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
MAX_WAIT = timedelta(hours=12)  # for what a rank reads, copies or downloads before the others can continue


@dataclass(frozen=True)
class Worker:
    """Who this process is: its rank among `world_size`, its rank on this node, and the device it computes on.

    label: what its lines begin with, in place of the rank.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    label: str | None = None

    def log(self, message: str) -> None:
        """Print one line that says which process it is from."""
        # The line's end is part of the string: one write, so that two ranks' lines cannot run into each other.
        print(f"[{self.label or f'rank {self.rank}/{self.world_size}'}] {message}\n", end="", flush=True)


def rank_from_environment() -> int:
    """The RANK that torchrun has set for this process; 0 under plain `python`, and where it did not set all variables.

    Such a process is on its own: it has to speak for itself, though `join` will refuse it.
    """
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() and all(name in os.environ for name in FROM_TORCHRUN) else 0


def check_environment() -> None:
    """Raises UsageError if the environment describes half a process group, or if a launcher has started many processes
    and told them nothing of each other.
    """
    numbers = {name: os.environ[name] for name in FROM_TORCHRUN if name in os.environ and name != "MASTER_ADDR"}
    for name, value in numbers.items():
        if not value.isdigit():
            raise UsageError(f"{name}={value} is not a whole number: start with torchrun, or unset {name}")
    if "RANK" in numbers:
        if missing := [name for name in FROM_TORCHRUN if name not in os.environ]:
            raise UsageError(f"RANK is set, and {', '.join(missing)} not: start with torchrun, or unset RANK")
        for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
            if int(numbers[rank]) >= int(numbers[size]):
                raise UsageError(f"{rank}={numbers[rank]} is too large for {size}={numbers[size]}: start with torchrun")
    elif int(numbers.get("WORLD_SIZE", 1)) > 1:
        raise UsageError(f"WORLD_SIZE={numbers['WORLD_SIZE']} and no RANK: start with torchrun, or unset WORLD_SIZE")
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

    Under plain `python` there is no group and the worker is rank 0 of 1. A collective that a rank does not reach
    within `timeout_s` seconds raises on the others. Raises UsageError where a node has more processes than GPUs, and
    as `check_environment` does.
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
        # Binding the device makes NCCL connect now, so that a wrong network shows here and not in the first step.
        device_id=device if device.type == "cuda" else None,
    )
    # A rank that leaves while another one is still connecting would break that one's start.
    dist.barrier()
    return Worker(rank, local_rank, world_size, device)


def join_alone(device: torch.device) -> None:
    """Make a process group of this process alone, unless there is one: FSDP2 and DeepSpeed need a group."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it


def leave() -> None:
    """Leave the process group, if there is one: the last call of a script.

    Where a DistributedDataParallel is alive while Python takes its modules apart, torch 2.15 with gloo now and then
    aborts the process ("terminate called without an active exception"). So what the script's own module holds is
    released before that, while Python still runs normally.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        atexit.register(lambda: (vars(sys.modules["__main__"]).clear(), gc.collect()))


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators (CPU and every GPU)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def global_sum(values: torch.Tensor) -> torch.Tensor:
    """The element-wise sum of `values` over all ranks, the same on every rank. `values` itself is not changed."""
    total = values.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def global_max(value: float) -> float:
    """The largest `value` of all ranks, the same on every rank. Collective."""
    return max(gather_objects(value))


def gather_objects(value: object) -> list:
    """One Python object from every rank, in the order of ranks, on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank_zero(value: object) -> object:
    """Rank 0's `value`, on every rank; what the others pass is ignored."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def check_same(value: object, message: str) -> None:
    """Raises UsageError with `message` on every rank, where they do not all have the same `value`. Collective."""
    if len(set(gather_objects(value))) > 1:
        raise UsageError(message)


def broadcast_buffers(model: torch.nn.Module) -> None:
    """Give every rank rank 0's buffers (BatchNorm's running statistics), those that a checkpoint holds. Collective."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def wait_for_all() -> None:
    """Wait until every rank has called this, however long one of them needs. Collective.

    A collective raises when a rank is late by the group's timeout, which is there to find hangs in training. Reading a
    large checkpoint or downloading a data set may well take longer: such waiting goes through the group's key-value
    store, and lasts until the launcher ends the processes, or for MAX_WAIT.
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
    """A ValueError or OSError that any rank meets in the block is raised on every rank, as a UsageError.

    If all of them are OSErrors, it is raised as StorageError.

    Without it one rank would leave while the others wait for it in the next collective. The block may take one rank
    long (`wait_for_all`). It must not hold a collective, except for `local_first`.
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
    """Call `action` until it raises no OSError, for `seconds` at most: a mounted folder may be late on a new node."""
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
    """The first process of each node runs the block before the others do: it downloads, they find the files.

    Rank 0 goes before all of them: nodes may share a disk, and two that download into one file spoil it.
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

    DDP regroups them once, after its first backward pass, into the order in which gradients became ready, and the new
    order changes how sums are rounded on more than two ranks. With the regrouping done beforehand, a resumed run adds
    in the same order as one that never stopped. Weights, statistics and random generators do not change.

    empty_loss: computes the loss that `ddp_model` has on a batch of no samples.
    """
    ddp_model.train()
    for module in ddp_model.modules():  # the forward pass of training, but with dropout and BatchNorm switched off
        if not any(module.children()):
            module.eval()
    with torch.backends.cudnn.flags(enabled=False):  # whose recurrent layers have no backward pass in eval mode
        empty_loss().backward()
    ddp_model.zero_grad()
    ddp_model.train()
