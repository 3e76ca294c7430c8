"""Predict and measure memory and traffic: what a rank keeps between steps, its peak within a step, what it sends."""

import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind `tensors`.

    A DTensor counts with this rank's shard. Views of one storage count once.
    """
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return sum(storages.values())


def state_tensors(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the tensors that this rank keeps from step to step.

    These are the parameters, their gradients if there are any, and Adam's moments.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [*parameters, *gradients, *kept]


def state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the bytes of the `state_tensors`.

    They are counted on storages and never by the process's RSS, which also includes Python, torch and the allocator's
    reserve.
    """
    return storage_bytes(state_tensors(model, optimizer))


class PeakMemory:
    """The peak bytes of all tensors on `device` between `start` and `stop`, including tensors made before.

    On a GPU, torch's caching allocator counts them. On a CPU it is torch's MemTracker, which sees every operation and
    is slow. Buffers that gloo or NCCL allocate for themselves belong to no tensor and are not counted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self, *known: nn.Module | Optimizer | torch.Tensor) -> None:
        """Start measuring. known: objects that exist already and whose bytes count."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self.tracker = MemTracker()
            self.tracker.track_external(*known)
            self.tracker.__enter__()

    def stop(self) -> int:
        """Return the highest number of bytes since `start`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        self.tracker.__exit__(None, None, None)
        return self.tracker.get_tracker_snapshot("peak")[self.device]["Total"]


class Traffic(TorchDispatchMode):
    """Count the collectives and messages that start inside this context, and the bytes that this rank sends for them.

    It sees those that pass through PyTorch's dispatcher under the namespace `c10d`: those of DDP, FSDP2 and
    DeepSpeed, but not DTensor's functional collectives, as in `full_tensor`. The bytes are those of a ring over the N
    ranks of the collective's group: (N-1)/N of the whole tensor for an all-gather, a reduce-scatter or a reduce, and
    twice that for an all-reduce. For a reduce this is the average over the ranks, because all of them except the owner
    send. An all-to-all counts what leaves the rank, also with parts of different sizes. A receive counts nothing.

    calls: how often each collective was called, by its name.
    sent: bytes sent, by the name of the collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sent = Counter(), Counter()

    def __torch_dispatch__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping | None = None
    ):
        if func.namespace == "c10d" and "barrier" not in func._schema.name:
            name = func._schema.name.removeprefix("c10d::").strip("_").removesuffix("_base")
            named = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False))
            group = torch.distributed.ProcessGroup.unbox(named["process_group"])
            tensors = [[leaf for leaf in tree_leaves(side) if torch.is_tensor(leaf)] for side in args[:2]]
            output, other = (sum(tensor.nbytes for tensor in side) for side in tensors)
            share = (group.size() - 1) / group.size()
            if name == "allreduce":
                sent = 2 * share * output
            elif name in ("allgather", "reduce_scatter"):  # of output and input, the larger one is the whole tensor
                sent = share * max(output, other)
            elif name == "alltoall":
                parts = named.get("input_split_sizes")
                sent = other * (1 - parts[group.rank()] / max(sum(parts), 1) if parts else share)
            else:
                sent = {"send": 1, "recv": 0, "recv_any_source": 0}.get(name, share) * output
            self.calls[name] += 1
            self.sent[name] += round(sent)
        return func(*args, **kwargs or {})


# (bytes per parameter on every rank, bytes per parameter divided among the N ranks), with AdamW and before the step.
# In float32 a weight takes 4, its gradient 4 and Adam's moments 8. DeepSpeed's ZeRO adds a float32 master copy even
# then. With mixed precision the master copy is the only float32 copy (Rajbhandari et al. 2020, arXiv:1910.02054,
# section 3.1: 2 + 2 + 12). FSDP2's bf16 policy keeps float32 shards and casts the weights that it gathers.
STATE_BYTES = {
    ("ddp", "fp32"): (16, 0),
    ("fsdp2", "fp32"): (0, 16),
    ("fsdp2", "bf16"): (0, 16),
    ("fsdp2", "fp64"): (0, 32),
    ("zero-0", "fp32"): (16, 0),
    ("zero-1", "fp32"): (4, 16),
    ("zero-2", "fp32"): (4, 16),
    ("zero-3", "fp32"): (0, 20),
    ("zero-0", "bf16"): (16, 0),
    ("zero-1", "bf16"): (2, 14),
    ("zero-2", "bf16"): (2, 14),
    ("zero-3", "bf16"): (0, 16),
}


def tcp_bytes_sent() -> int:
    """Return the bytes that this process has sent over its open TCP connections, by the kernel's count.

    Sees every collective of gloo, whoever calls it. Neither headers nor repeated bytes count. Returns 0 where the
    system does not count: everywhere except on Linux, and in some sandboxes.
    """
    total = 0
    for descriptor in os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else []:
        try:
            copy = os.dup(int(descriptor))
        except OSError:  # closed by now
            continue
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
                sent, repeated = struct.unpack_from("QQ", info, 200) if len(info) == 216 else (0, 0)
                total += sent - repeated  # tcpi_bytes_sent, tcpi_bytes_retrans
    return total


def predicted_state_bytes(strategy: str, precision: str, num_parameters: int, world_size: int) -> float:
    """Return the predicted `state_bytes` of one of `world_size` ranks.

    The formulas in STATE_BYTES are those of the libraries themselves.
    """
    every, shared = STATE_BYTES[strategy, precision]
    return num_parameters * (every + shared / world_size)
