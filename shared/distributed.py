"""Process groups without repetition: joining one, seeding, global sums, and errors that every rank sees."""

import atexit
import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist

CLAIMED = "workshop/claimed"


class UsageError(ValueError):
    """The user's mistake, known to every rank: `cli.run` prints it once and ends with exit code 2."""


@dataclass(frozen=True)
class Worker:
    """Who this process is: its rank among `world_size`, its number on this node, and the device it computes on."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    restarted: bool = False
    """Whether torchrun has started this job again after it had begun a run (`claimed`); known to rank 0 only."""

    def log(self, message: str) -> None:
        """Print one line that says which rank it is from."""
        # The line's end is part of the string: one write, so that two ranks' lines cannot run into each other.
        print(f"[rank {self.rank}/{self.world_size}] {message}\n", end="", flush=True)


def rank_from_environment() -> int:
    """The RANK that torchrun has set for this process; 0 under plain `python`."""
    return int(os.environ.get("RANK", 0))


def join(timeout_s: float = 600) -> Worker:
    """Join the process group that torchrun describes in the environment: nccl on GPUs, gloo on CPUs.

    Under plain `python` there is no group and the worker is rank 0 of 1. A collective that a rank does not reach
    within `timeout_s` seconds raises on the others. Raises UsageError where a node has more processes than GPUs.
    """
    if "RANK" not in os.environ:
        return Worker(device=torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_world_size > torch.cuda.device_count():
            raise UsageError(
                f"{local_world_size} processes on a node with {torch.cuda.device_count()} GPU(s): "
                "start one process a GPU, or set CUDA_VISIBLE_DEVICES= to use the CPU"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    prefix = name_of_attempt(store, rank, world_size, timeout_s)
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
    return Worker(rank, local_rank, world_size, device, rank == 0 and store.check([CLAIMED]))


def join_alone(device: torch.device) -> None:
    """Make a process group of this process alone, where there is none: FSDP2 and DeepSpeed want one."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it


def agent_store() -> dist.Store | None:
    """The key-value store of torchrun's agents, which outlives the processes that they restart; None without one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def claimed() -> None:
    """Note that this job has a run of its own: if torchrun starts it again, it may go on with that run."""
    if (store := agent_store()) is not None:
        store.set(CLAIMED, "")


def name_of_attempt(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> str:
    """A word that all ranks of this start share, and no earlier start has used: rank 0 makes it up.

    torchrun keeps one store over all its restarts, and in it the addresses of processes that are dead: a rank that
    reads an old one waits for ever (pytorch/pytorch issue 135712). TORCHELASTIC_RESTART_COUNT does not tell the starts
    apart, because each node counts its own. So every rank calls with a random word, rank 0 answers the call with the
    name, and repeats that until the rank has confirmed this very name. Raises TimeoutError when a rank does not come.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    def until(reached: Callable[[], bool], missing: int) -> None:
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {missing} has not come within {timeout_s:.0f} s")
            time.sleep(0.01)

    def confirmed(other: int) -> bool:
        store.set(f"workshop/name/{other}", f"{mine} for {read(f'workshop/call/{other}')}")
        return read(f"workshop/confirmed/{other}") == mine

    if rank == 0:
        for other in range(1, world_size):
            until(partial(confirmed, other), missing=other)
        return mine
    store.set(f"workshop/call/{rank}", mine)
    until(lambda: read(f"workshop/name/{rank}").endswith(mine), missing=0)
    name = read(f"workshop/name/{rank}").split()[0]
    store.set(f"workshop/confirmed/{rank}", name)
    return name


def leave() -> None:
    """Leave the process group, if there is one: the last call of a script, whose process then ends well.

    Where a DistributedDataParallel is alive while Python takes its modules apart, torch 2.15 with gloo now and then
    aborts the process ("terminate called without an active exception"). So the process skips that part.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        # An exception that ends the process all the same leaves itself in `last_value`.
        atexit.register(lambda: hasattr(sys, "last_value") or end_at_once(0))


def end_at_once(code: int) -> NoReturn:
    """End this process with exit code `code`, and without the teardown of Python's modules (see `leave`)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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


@contextmanager
def fail_together() -> Iterator[None]:
    """A ValueError or OSError that any rank meets in the block is raised on every rank, as a UsageError.

    Without it one rank would leave while the others wait for it in the next collective. The block itself must not
    hold a collective, `local_first` apart.
    """
    problem = None
    try:
        yield
    except (ValueError, OSError) as error:
        problem = str(error)
    problems = gather_objects(problem)
    for rank, message in enumerate(problems):
        if message is not None:
            raise UsageError(message if message == problems[0] else f"rank {rank}: {message}")


@contextmanager
def local_first(worker: Worker) -> Iterator[None]:
    """The first process of each node runs the block before the others do: it downloads, they find the files."""
    if dist.is_initialized() and worker.local_rank != 0:
        dist.barrier()
    try:
        yield
    finally:
        if dist.is_initialized() and worker.local_rank == 0:
            dist.barrier()


def settle_buckets(ddp_model: torch.nn.Module, empty_batch: torch.Tensor) -> None:
    """Run one backward pass over no samples, so that DDP regroups its gradient buckets now. Collective.

    DDP regroups them once, after its first backward pass, into the order in which gradients became ready, and the new
    order changes how sums are rounded on more than two ranks. Settled beforehand, a resumed run adds in the same order
    as one that never stopped. Weights, statistics (eval mode) and random generators stay as they are.
    """
    ddp_model.eval()
    ddp_model(empty_batch).sum().backward()
    ddp_model.zero_grad()
    ddp_model.train()
