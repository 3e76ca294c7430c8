"""Scale a loss by hand: a gradient too small for float16, and a scale that follows the largest gradient."""

from collections.abc import Sequence

import torch


def gradient_in_float16(scale: float) -> torch.Tensor:
    """Return a float16 gradient whose true value is 1e-4 * 1e-4 * scale."""
    weight = torch.ones(1, dtype=torch.float16, requires_grad=True)
    output = weight * torch.tensor([1e-4], dtype=torch.float16)
    loss = output.float().sum() * 1e-4
    (loss * scale).backward()
    return weight.grad


def dynamic_scales(largest: Sequence[float], scale: float = 2.0**16, window: int = 4) -> list[tuple[float, bool]]:
    """Return the loss scale of each step, and whether that step overflows and is skipped.

    An overflow halves the scale. `window` good steps in a row double it.
    largest: the largest gradient of each step, before scaling.
    """
    steps, good = [], 0
    for size in largest:
        overflow = bool(torch.tensor(size * scale).half().isinf())
        steps.append((scale, overflow))
        good = 0 if overflow else good + 1
        if overflow:
            scale /= 2
        elif good == window:
            scale, good = 2 * scale, 0
    return steps
