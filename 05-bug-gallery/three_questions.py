"""Ask the first update of a sharded run the three questions of lesson 5.2, by comparing it with one process."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

Rule = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of a shard, or the tensor itself. Collective for a shard."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().double().clone()


def gap(seen: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the norm of the difference, relative to the norm of what is expected, over all tensors."""
    seen, expected = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (seen, expected))
    return ((seen - expected).norm() / expected.norm()).item()


class ThreeQuestions:
    """The answers for one run, in `answers`: "held", "gradients" and "change".

    held: how many of the model's parameters the optimizer holds, and how many the model has. It is not asked without
    an optimizer, because DeepSpeed's optimizer holds its own slices. gradients: how far the gradients before the first
    step are from those of one process (`gap`). change: the same for the change of the weights.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, reference: torch.nn.Module, rule: Rule,
        images: torch.Tensor, labels: torch.Tensor,
    ) -> None:  # fmt: skip
        """reference: the same model on one process. rule: makes its optimizer. images, labels: the global batch."""
        first = next(reference.parameters())
        self.model, self.optimizer, self.answers = model, optimizer, {}
        before = [whole(parameter) for parameter in reference.parameters()]
        optimizer = rule(reference.parameters())
        F.cross_entropy(reference(images.to(first.dtype)), labels).backward()
        optimizer.step()
        self.gradients = [parameter.grad.double() for parameter in reference.parameters()]
        self.change = [whole(new) - old for new, old in zip(reference.parameters(), before, strict=True)]

    def before_step(
        self, gradient_of: Callable[[torch.Tensor], torch.Tensor] = lambda parameter: parameter.grad
    ) -> None:
        """Answer the first two questions. Collective. gradient_of: reads the gradient of a parameter of the model."""
        if self.answers:
            return
        parameters = list(self.model.parameters())
        if self.optimizer is not None:
            held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            found = sum(any(parameter is one for one in held) for parameter in parameters)
            self.answers["held"] = [found, len(parameters)]
        gradients = [whole(gradient_of(parameter)) for parameter in parameters]
        self.answers["gradients"] = gap(gradients, self.gradients)
        self.before = [whole(parameter) for parameter in parameters]

    def after_step(self) -> None:
        """Answer the third question. Collective."""
        if "change" not in self.answers:
            now = [whole(parameter) for parameter in self.model.parameters()]
            self.answers["change"] = gap([new - old for new, old in zip(now, self.before, strict=True)], self.change)
