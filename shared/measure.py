"""Memory, predicted and measured: the bytes that a rank keeps between steps, and the most that it needs in one."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`: of a DTensor this rank's shard, and each view once."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return sum(storages.values())


def state_tensors(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """What this rank keeps from step to step: parameters, gradients (as long as they are there), Adam's moments."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [*parameters, *gradients, *kept]


def state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Bytes of the `state_tensors`.

    Counted on storages, never by the process's RSS: that also holds Python, torch and whatever the allocator keeps.
    """
    return storage_bytes(state_tensors(model, optimizer))


class PeakMemory:
    """The most bytes that tensors take on `device` between `start` and `stop`, those that were there before included.

    On a GPU by torch's caching allocator; on a CPU by torch's MemTracker, which sees every operation and so takes time.
    Buffers that gloo or NCCL allocate for themselves are in no tensor, and not counted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self, *known: nn.Module | Optimizer | torch.Tensor) -> None:
        """Watch from now on. known: what was there before, and counts."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self.tracker = MemTracker()
            self.tracker.track_external(*known)
            self.tracker.__enter__()

    def stop(self) -> int:
        """The highest number of bytes since `start`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        self.tracker.__exit__(None, None, None)
        return self.tracker.get_tracker_snapshot("peak")[self.device]["Total"]


# Bytes a parameter: those that every rank keeps, and those that N ranks share out, with AdamW and before the step.
# float32: 4 for the weight, 4 for its gradient, 8 for Adam's moments. DeepSpeed keeps a float32 master copy beside the
# weights in float32 too, and with mixed precision it is the only float32 copy (Rajbhandari et al. 2020,
# arXiv:1910.02054, section 3.1: 2 + 2 + 12). FSDP2's bf16 policy keeps float32 shards, and casts what it gathers.
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
    """What `state_bytes` of one of `world_size` ranks will be: by STATE_BYTES, the formula of the library itself."""
    every, shared = STATE_BYTES[strategy, precision]
    return num_parameters * (every + shared / world_size)
