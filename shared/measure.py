"""Predict and measure memory: the bytes that a rank keeps between steps, and its peak within a step."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


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


def predicted_state_bytes(strategy: str, precision: str, num_parameters: int, world_size: int) -> float:
    """Return the predicted `state_bytes` of one of `world_size` ranks.

    The formulas in STATE_BYTES are those of the libraries themselves.
    """
    every, shared = STATE_BYTES[strategy, precision]
    return num_parameters * (every + shared / world_size)
