"""Measure a sharded model: the collectives, the state and the memory of a training step, and gradient clipping."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer

from shared import distributed, measure

PHASES = ("forward", "backward", "optimizer")
CPU = torch.device("cpu")
# CommDebugMode reports the operators below the functions that we call.
COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
}


class MemoryTrace(MemTracker):
    """Note the bytes of all tensors on the CPU after each operation, in the current phase of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.bytes = PHASES[0], {phase: [] for phase in PHASES}

    def __torch_dispatch__(
        self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Run the operation, then note the total."""
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.bytes[self.phase].append(self.get_tracker_snapshot("current")[CPU]["Total"])
        return result

    def curve(self) -> tuple[list[float], list[float]]:
        """Return times and megabytes. Each phase takes one unit of time, and its operations are equally spaced."""
        times = [
            number + index / len(noted)
            for number, noted in enumerate(self.bytes.values())
            for index in range(len(noted))
        ]
        return times, [noted / 1e6 for phase in PHASES for noted in self.bytes[phase]]


def measure_step(model: nn.Module, optimizer: Optimizer, compute_loss: Callable[[nn.Module], torch.Tensor]) -> dict:
    """Take two training steps on CPUs. Return what the first communicates, and the memory of the second. Collective.

    compute_loss: runs the forward pass of `model`, and returns this rank's loss.
    The result has these keys:
    forward, backward: how often each collective was called.
    state: bytes of parameters, gradients and optimizer state after the backward pass.
    trace: the curve of a MemoryTrace.
    peak: the largest number of bytes during the step.
    """
    with CommDebugMode() as communication:
        loss = compute_loss(model)
        forward = count_collectives(communication)
        loss.backward()
    backward = count_collectives(communication) - forward
    state = measure.state_bytes(model, optimizer)
    del loss
    optimizer.step()
    trace = MemoryTrace()
    trace.track_external(model, optimizer)  # before zero_grad, because DDP keeps the buckets that its gradients are in
    optimizer.zero_grad()
    with trace:
        loss = compute_loss(model)
        trace.phase = "backward"
        loss.backward()
        del loss
        trace.phase = "optimizer"
        optimizer.step()
        optimizer.zero_grad()
    peak = trace.get_tracker_snapshot("peak")[CPU]["Total"]
    return {"forward": forward, "backward": backward, "state": state, "trace": trace.curve(), "peak": peak}


def count_collectives(communication: CommDebugMode) -> Counter:
    """Return how often each collective was called inside `communication` so far."""
    counts = {str(call).removeprefix("c10d."): number for call, number in communication.get_comm_counts().items()}
    return Counter({COLLECTIVES[call]: number for call, number in counts.items()})


def clip(model: nn.Module, max_norm: float) -> dict:
    """Clip the gradients of `model` to the global norm `max_norm`. Collective.

    The result has these keys:
    norm: the global norm before clipping.
    own norms: the norm of each rank's own slices, in rank order.
    gradients: the whole clipped gradients, as arrays.
    """
    parameters = list(model.parameters())
    slices = [parameter.grad.to_local() if is_sharded(parameter) else parameter.grad for parameter in parameters]
    own_norm = torch.nn.utils.get_total_norm(slices).item()
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return {
        "norm": whole(norm).item(),
        "own norms": distributed.gather_objects(own_norm),
        "gradients": [whole(parameter.grad).numpy() for parameter in parameters],
    }


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether FSDP2 has sharded this tensor."""
    return isinstance(tensor, DTensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor on every rank. Collective if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor
