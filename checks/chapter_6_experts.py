"""The exercise checks of lesson 6.8, experts."""

import random
from collections.abc import Callable

import torch
import torch.distributed as dist

from checks.machinery import Wrong, exercise, on_ranks
from shared import measure

SUMS = {  # which ranks sum: rank 0's sum first
    "each alone": ((0,), (1,), (2,), (3,)),
    "groups": ((0, 1), (2, 3)),
    "copies": ((0, 2), (1, 3)),
    "crossed": ((0, 3), (1, 2)),
    "all": ((0, 1, 2, 3),),
}
VERSIONS = [("copies", 1.0), ("copies", 2.0), ("groups", 1.0), ("each alone", 1.0), ("crossed", 0.5), ("all", 1.0)]
VERSIONS += [("all", 4.0), ("each alone", 0.25)]


def sum_in_groups(halves: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's gradient after the sums and the factor of each version."""
    own, versions = halves(), []
    for name, factor in VERSIONS:
        summed = own.clone()
        if name != "each alone":
            group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in SUMS[name]])
            dist.all_reduce(summed, group=group)
        versions.append(summed * factor)
    return versions


@exercise("6.8a", "you say who was summed with whom, and by how much the result is off.")
def exercise_6_8a(answer: tuple[Callable, Callable, torch.Tensor]) -> None:
    """A function find_sum(found, expected) -> ranks, factor; halves() -> a rank's gradient; the right gradients."""
    find_sum, halves, expected = answer
    first, second = expected.chunk(2)
    find_sum([part.clone() for part in (first, second, first, second)], expected.clone())  # a stub raises here
    by_rank = on_ranks(sum_in_groups, 4, halves)
    numbers = list(range(len(VERSIONS)))
    random.Random(repr(expected.sum().item())).shuffle(numbers)  # by the gradient: another SEED, another order
    for number in numbers:
        (name, factor), found = VERSIONS[number], [versions[number] for versions in by_rank]
        ranks = list(SUMS[name][0])
        said = find_sum([part.clone() for part in found], expected.clone())
        if not (isinstance(said, list | tuple) and len(said) == 2 and isinstance(said[0], list | tuple)):
            raise Wrong(f"return a list of ranks and a number; yours is {said!r}")
        if [int(rank) for rank in said[0]] != ranks:
            raise Wrong(
                f"rank 0 was summed with {ranks}, and you say {list(said[0])}. "
                "Which ranks have the same gradient afterwards, and which don't?"
            )
        if not abs(float(said[1]) - factor) < 1e-6 * factor:
            raise Wrong(
                f"for the sum over {ranks} the factor is {factor:g}, and you say {float(said[1]):.4g}. "
                "Does your quantity depend on who was summed with whom, or on how many ranks a sum has?"
            )


BATCHES = [(4, 1, (5, 7)), (6, 2, (4, 9, 2))]  # experts, choices, tokens of each rank


def routed(num_experts: int, num_choices: int, counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities (tokens, experts) and choices (tokens, choices) of all ranks' tokens."""
    generator = torch.Generator().manual_seed(num_experts)
    scores = torch.randn(sum(counts), num_experts, dtype=torch.float64, generator=generator)
    probabilities = (2 * scores).softmax(dim=1)
    return probabilities, probabilities.topk(num_choices, dim=1).indices


def try_balance(answer: Callable, num_experts: int, num_choices: int, counts: tuple[int, ...]) -> dict:
    """Report this rank's part of the loss, its gradient, and the bytes that it sends."""
    probabilities, chosen = (
        whole.split(counts)[dist.get_rank()].clone() for whole in routed(num_experts, num_choices, counts)
    )
    probabilities.requires_grad_()
    with measure.Traffic() as traffic:
        part = answer(probabilities, chosen)
        if torch.is_tensor(part) and part.requires_grad:
            part.sum().backward()
    return {
        "part": part.detach() if torch.is_tensor(part) else part,
        "gradient": probabilities.grad,
        "sent": sum(traffic.sent.values()),
    }


@exercise("6.8b", "the parts add up to the loss of one process, and so do the gradients.")
def exercise_6_8b(answer: Callable) -> None:
    """A function shared_balance(probabilities, chosen) -> this rank's part of the auxiliary loss."""
    for num_experts, num_choices, counts in BATCHES:
        where = f"{num_experts} experts, {num_choices} of them per token, {counts} tokens on the ranks:"
        probabilities, chosen = routed(num_experts, num_choices, counts)
        probabilities.requires_grad_()
        share = chosen.flatten().bincount(minlength=num_experts) / chosen.numel()
        expected = num_experts * (share * probabilities.mean(dim=0)).sum()
        expected.backward()
        reports = on_ranks(try_balance, len(counts), answer, num_experts, num_choices, counts)
        for rank, report in enumerate(reports):
            if not torch.is_tensor(report["part"]) or report["part"].numel() != 1:
                raise Wrong(f"{where} rank {rank} returns {report['part']!r}. Return a tensor with one number")
            if report["gradient"] is None:
                raise Wrong(f"{where} the probabilities of rank {rank} get no gradient. What did you detach?")
        total = sum(report["part"].item() for report in reports)
        if not abs(total - expected.item()) < 1e-9:  # it may be nan
            ratio = total / expected.item()
            question = "How often is the whole loss in it?" if abs(ratio - len(counts)) < 1e-6 else (
                "Which tokens are counted in each share, and what is each mean divided by?"
            )  # fmt: skip
            raise Wrong(f"{where} the parts add up to {total:.6f}, {ratio:.4f} times the right loss. {question}")
        for rank, (report, right) in enumerate(zip(reports, probabilities.grad.split(counts), strict=True)):
            if not torch.allclose(report["gradient"], right, rtol=0, atol=1e-9):
                ratio = (report["gradient"].norm() / right.norm()).item()
                raise Wrong(
                    f"{where} the loss is right, and the gradient on rank {rank} is not: its norm is {ratio:.3f} "
                    "times the right one. Through which of the two factors does it flow?"
                )
            limit = 2 * (len(counts) - 1) / len(counts) * 8 * (num_experts + 1)
            if report["sent"] > limit + 1:
                raise Wrong(
                    f"{where} right, but rank {rank} sends {report['sent']} bytes, and {limit:.0f} are enough. "
                    "Which numbers do the other ranks need from it?"
                )
