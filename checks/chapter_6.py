"""The exercise checks of chapter 6: beyond data parallelism."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from checks.machinery import Wrong, exercise
from shared import measure, ranks


def on_ranks(function: Callable, num_ranks: int, *args: object) -> list:
    """Call shared.ranks.run. Raises NotImplementedError or Wrong for ranks that failed."""
    try:
        return ranks.run(function, num_ranks, *args)
    except ranks.RanksFailed as error:
        if "NotImplementedError" in str(error):
            raise NotImplementedError from None
        raise Wrong(f"on {num_ranks} ranks, {'; '.join(map(str.strip, str(error).splitlines()))}") from None


def try_embedding(build: Callable, table: torch.Tensor, tokens: torch.Tensor, upstream: torch.Tensor) -> dict:
    """Report what a sliced embedding returns, its gradients, and what it sends forward and in all."""
    module = build(table.clone())
    with measure.Traffic() as traffic:
        found = module(tokens)
        forward = sum(traffic.sent.values())
        (found * upstream).sum().backward()
    return {
        "found": found.detach(),
        "parameters": [(value.detach(), value.grad) for value in module.parameters()],
        "forward": forward,
        "backward": sum(traffic.sent.values()) - forward,
    }


@exercise("6.1a", "each rank keeps its rows, and the embeddings and gradients are those of the whole table.")
def exercise_6_1a(answer: Callable) -> None:
    """A module SlicedEmbedding(weight), weight (vocabulary, width) -> forward(tokens) -> embeddings."""
    torch.manual_seed(7)
    for num_ranks, vocabulary in ((2, 8), (3, 10)):
        table = torch.randn(vocabulary, 4, dtype=torch.float64)
        tokens = torch.randint(vocabulary, (2, 12))
        tokens[0, :vocabulary] = torch.arange(vocabulary)  # each token, those at the borders of slices too
        upstream = torch.randn(2, 12, 4, dtype=torch.float64)
        whole = table.clone().requires_grad_()
        expected = F.embedding(tokens, whole)
        (expected * upstream).sum().backward()
        where = f"with {vocabulary} tokens on {num_ranks} ranks,"
        reports = on_ranks(try_embedding, num_ranks, answer, table, tokens, upstream)
        for rank, (report, rows) in enumerate(zip(reports, table.chunk(num_ranks), strict=True)):
            values = [value for value, _ in report["parameters"]]
            if [value.shape for value in values] != [rows.shape]:
                shapes = ", ".join(str(tuple(value.shape)) for value in values) or "no parameter"
                raise Wrong(f"{where} rank {rank} has {shapes}; its slice is one nn.Parameter {tuple(rows.shape)}")
            if report["found"].shape != expected.shape:
                raise Wrong(f"{where} rank {rank} returns the shape {tuple(report['found'].shape)}")
            wrong = (report["found"] - expected).abs().amax(dim=2) > 1e-9
            if wrong.any():
                token = int(tokens[wrong][0])
                owner = next(
                    number for number, part in enumerate(torch.arange(vocabulary).chunk(num_ranks)) if token in part
                )
                raise Wrong(
                    f"{where} rank {rank} returns a wrong embedding for token {token}, which rank {owner} has. "
                    "What does each rank contribute for a token that it does not have?"
                )
        for rank, report in enumerate(reports):
            (_, gradient), slice_ = report["parameters"][0], whole.grad.chunk(num_ranks)[rank]
            if gradient is None:
                raise Wrong(f"{where} rank {rank} has no gradient: how does it get through the all-reduce?")
            if torch.allclose(gradient, num_ranks * slice_, atol=1e-9):
                hint = "Every rank computes the same loss. Who adds up its gradients?"
                raise Wrong(f"{where} the gradient of rank {rank} is {num_ranks} times the right one. {hint}")
            if not torch.allclose(gradient, slice_, atol=1e-9):
                raise Wrong(f"{where} the gradient of rank {rank} is wrong. Which tokens does it have rows for?")
            embeddings = expected.nbytes * 2 * (num_ranks - 1) / num_ranks
            for name, limit in (("forward", embeddings), ("backward", 0)):
                if report[name] > limit + 1:
                    hint = f"expected at most {limit:.0f}: what has to be added up, and by whom?"
                    raise Wrong(f"{where} rank {rank} sends {report[name]:.0f} bytes {name}, {hint}")


class SumOverRanks(torch.autograd.Function):
    """Forward: the sum of all ranks' inputs. Backward: the gradient, unchanged. As in lesson 6.1."""

    @staticmethod
    def forward(ctx: object, part: torch.Tensor) -> torch.Tensor:
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class CopyToRanks(torch.autograd.Function):
    """Forward: the input, unchanged. Backward: the sum of all ranks' gradients. As in lesson 6.1."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        whole = gradient.clone()
        dist.all_reduce(whole)
        return whole


@dataclass
class WithoutOne:
    """Calls `function`, but not in the call number `left_out`."""

    function: type[torch.autograd.Function]
    left_out: int | None = None
    calls: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x if self.calls - 1 == self.left_out else self.function.apply(x)


@exercise("6.1b", "you find each missing sum, and blame nobody whose model is right.")
def exercise_6_1b(answer: tuple[Callable, Callable]) -> None:
    """A function find_missing_sum(results) -> what is missing, and a function of (copy, add) that returns results."""
    find_missing_sum, run = answer
    complete = run(WithoutOne(CopyToRanks), WithoutOne(SumOverRanks))
    find_missing_sum(complete)  # a stub raises here
    num_blocks = len({name.split(".")[1] for name in complete[0][1] if name.startswith("blocks.")})
    draw = random.Random(repr(complete[0][0]))  # by the loss: with a different SEED, other sums are missing
    places = [2 * draw.randrange(num_blocks), 2 * draw.randrange(num_blocks) + 1, 2 * num_blocks - 1, 0]
    cases = {"none": (None, None), "forward": (None, draw.randrange(2 * num_blocks))}
    cases |= {f"backward, block {place // 2}, {('attention', 'mlp')[place % 2]}": (place, None) for place in places}
    for expected, (backward, forward) in draw.sample(list(cases.items()), len(cases)):
        results = run(WithoutOne(CopyToRanks, backward), WithoutOne(SumOverRanks, forward))
        said = find_missing_sum(results)
        if said != expected:
            hints = {
                "none": "All losses and gradients are those of one process, except for rounding.",
                "forward": "What is wrong in this case alone, and right in all others?",
            }
            hint = hints.get(
                expected, "Which gradients are right? They are computed before the backward pass gets there."
            )
            raise Wrong(f"the answer was {expected!r}, and you say {said!r}. {hint}")
