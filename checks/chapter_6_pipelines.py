"""The exercise checks of lesson 6.5: pipelines."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from checks.machinery import Wrong, exercise, on_ranks
from shared import measure, schedules

WIDTH, SAMPLES = 4, 3


def stage_weight(index: int) -> nn.Parameter:
    """Return the weight (WIDTH, WIDTH) that stage `index` starts with."""
    return nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(index)))


def microbatch(i: int) -> torch.Tensor:
    """Return the input (SAMPLES, WIDTH) of microbatch `i`."""
    return torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + i))


def receive(rank: int) -> torch.Tensor:
    """Return what `rank` sends for one microbatch."""
    tensor = torch.empty(SAMPLES, WIDTH, dtype=torch.float64)
    dist.recv(tensor, rank)
    return tensor


class BlockingPipe:
    """One rank of a small pipeline, with the functions of the lesson's `Pipe`, and with sends that block.

    Raises ValueError for a microbatch that doesn't exist, and for a function that is called too early or twice.
    """

    def __init__(self, num_microbatches: int) -> None:
        self.rank, self.num_ranks, self.num_microbatches = dist.get_rank(), dist.get_world_size(), num_microbatches
        self.first, self.last = self.rank == 0, self.rank == self.num_ranks - 1
        self.weight = stage_weight(self.rank)
        self.inputs, self.outputs, self.gradients = {}, {}, {}
        self.record: list[str] = []
        self.called: set[tuple[str, int]] = set()

    def start(self, name: str, i: int, after: str = "") -> None:
        """Note the call of `name` for microbatch `i`, which is possible only after that of `after`."""
        if i not in range(self.num_microbatches):
            raise ValueError(f"{name}({i}): there are the microbatches 0 to {self.num_microbatches - 1}")
        if after and (after, i) not in self.called:
            raise ValueError(f"{name}({i}) is called before {after}({i})")
        if (name, i) in self.called:
            raise ValueError(f"{name}({i}) is called twice")
        self.called.add((name, i))

    def receive_input(self, i: int) -> None:
        self.start("receive_input", i)
        self.inputs[i] = (microbatch(i) if self.first else receive(self.rank - 1)).requires_grad_()

    def compute_forward(self, i: int) -> None:
        self.start("compute_forward", i, "receive_input")
        self.outputs[i] = torch.tanh(self.inputs[i] @ self.weight)
        self.record.append(f"{self.rank}F{i}")

    def send_output(self, i: int) -> None:
        self.start("send_output", i, "compute_forward")
        if not self.last:
            dist.send(self.outputs[i].detach(), self.rank + 1)

    def receive_gradient(self, i: int) -> None:
        self.start("receive_gradient", i, "compute_forward")
        self.gradients[i] = torch.ones(SAMPLES, WIDTH).double() if self.last else receive(self.rank + 1)

    def compute_backward(self, i: int) -> None:
        self.start("compute_backward", i, "receive_gradient")
        self.outputs.pop(i).backward(self.gradients.pop(i))
        self.record.append(f"{self.rank}B{i}")

    def send_gradient(self, i: int) -> None:
        self.start("send_gradient", i, "compute_backward")
        gradient = self.inputs.pop(i).grad
        if not self.first:
            dist.send(gradient, self.rank - 1)


def try_orders(order: Callable, sizes: list[int]) -> list[tuple[list[str], torch.Tensor | None]]:
    """Report this rank's record and gradient for each number of microbatches."""
    reports = []
    for num_microbatches in sizes:
        pipe = BlockingPipe(num_microbatches)
        order(pipe)
        reports.append((pipe.record, pipe.weight.grad))
        dist.barrier()  # a message that nobody has received would be taken for one of the next case
    return reports


def right_gradients(num_stages: int, num_microbatches: int) -> list[torch.Tensor]:
    """Return the gradients of all stages' weights, computed in one process."""
    weights = [stage_weight(index) for index in range(num_stages)]
    for i in range(num_microbatches):
        x = microbatch(i)
        for weight in weights:
            x = torch.tanh(x @ weight)
        x.sum().backward()
    return [weight.grad for weight in weights]


@exercise("6.5a", "1F1B runs with sends that block, in its own order.")
def exercise_6_5a(answer: Callable) -> None:
    """A function one_f_one_b(pipe)."""
    for num_ranks, sizes in ((2, [4, 1]), (3, [6, 2]), (4, [8, 3])):
        of_ranks = on_ranks(try_orders, num_ranks, answer, sizes)
        for number, num_microbatches in enumerate(sizes):
            judge_order(num_ranks, num_microbatches, [reports[number] for reports in of_ranks])


def judge_order(num_ranks: int, num_microbatches: int, reports: list[tuple]) -> None:
    """Raise Wrong unless the ranks computed in the order of 1F1B, and their gradients are right."""
    where = f"with {num_ranks} ranks and {num_microbatches} microbatches,"
    for rank, (record, _) in enumerate(reports):
        names = [f"{rank}{kind}{i}" for kind in "FB" for i in range(num_microbatches)]
        if missing := [name for name in names if name not in record]:
            raise Wrong(f"{where} rank {rank} has not computed {missing[0]}. Is that what its last microbatches need?")
    table = schedules.read([record for record, _ in reports])
    live, most = schedules.most_live(table), [min(num_ranks - rank, num_microbatches) for rank in range(num_ranks)]
    for rank, (found, expected) in enumerate(zip(live, most, strict=True)):
        if found > expected:
            hint = f"1F1B holds {expected}. Receiving an input early is not the same as computing with it early."
            raise Wrong(f"{where} rank {rank} holds {found} live forward passes at once; {hint}")
    idle, expected = max(schedules.idle_units(schedules.timeline(table))), 3 * (num_ranks - 1)
    if idle != expected:
        raise Wrong(f"{where} the recorded orders leave ranks idle for {idle} units; those of 1F1B for {expected}")
    for rank, ((record, gradient), right) in enumerate(
        zip(reports, right_gradients(num_ranks, num_microbatches), strict=True)
    ):
        ahead = most[rank] - 1 if num_microbatches >= num_ranks - rank else num_microbatches
        order = []
        for step in range(num_microbatches + ahead):
            order += [f"{rank}F{step}"] * (step < num_microbatches) + [f"{rank}B{step - ahead}"] * (step >= ahead)
        if record != order:
            raise Wrong(
                f"{where} rank {rank} computes {' '.join(record[:6])} ..., and in 1F1B {' '.join(order[:6])} ..."
            )
        if not torch.allclose(gradient, right, atol=1e-9):
            raise Wrong(f"{where} the order of rank {rank} is right, and its gradient is not. Who gets whose messages?")


TOKENS, TARGETS, VOCABULARY, STEPS = torch.tensor([0, 3, 3]), torch.tensor([3, 5, 0]), 7, 3


def table(seed: int) -> nn.Parameter:
    """Return a table (VOCABULARY, WIDTH)."""
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, generator=generator))


def try_tied(build: Callable) -> dict:
    """Train a pipeline whose ends have a table each. Report this rank's tables, their gradients, and its operations."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    weight, own = stage_weight(rank), table(50 + rank) if rank in (0, last) else None
    tied = build(own)
    parameters = [weight] if own is None else [weight, own]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    report = {"tables": [], "gradients": [], "calls": 0}
    for _ in range(STEPS):
        report["tables"].append(None if own is None else own.detach().clone())
        x = own[TOKENS] if rank == 0 else receive(rank - 1).requires_grad_()
        y = torch.tanh(x @ weight)
        if rank == last:
            F.cross_entropy(y @ own.T, TARGETS).backward()
        else:
            dist.send(y.detach(), rank + 1)
            y.backward(receive(rank + 1))
        if rank > 0:
            dist.send(x.grad, rank - 1)
        with measure.Traffic() as traffic:
            tied.sum_gradients()
        report["calls"] += sum(traffic.calls.values())
        report["gradients"].append(None if own is None else own.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
    return report


def right_tables(num_stages: int) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the table before each step in one process, and the gradients of its two uses."""
    weights, shared = [stage_weight(index) for index in range(num_stages)], table(50)
    optimizer, tables, parts = torch.optim.SGD([*weights, shared], lr=0.1), [], []
    for _ in range(STEPS):
        tables.append(shared.detach().clone())
        first, last = (shared.detach().clone().requires_grad_() for _ in range(2))
        x = first[TOKENS]
        for weight in weights:
            x = torch.tanh(x @ weight)
        F.cross_entropy(x @ last.T, TARGETS).backward()
        parts.append((first.grad, last.grad))
        shared.grad = first.grad + last.grad
        optimizer.step()
        optimizer.zero_grad()
    return tables, parts


@exercise("6.5b", "both copies of the table train as one does in one process.")
def exercise_6_5b(answer: type) -> None:
    """A class Tied(table) with sum_gradients()."""
    for num_ranks in (2, 3):
        reports, (tables, parts) = on_ranks(try_tied, num_ranks, answer), right_tables(num_ranks)
        where = f"on {num_ranks} ranks,"
        ends = (0, num_ranks - 1)
        for step in range(STEPS):
            for rank in ends:
                if not torch.allclose(reports[rank]["tables"][step], tables[step], atol=1e-9):
                    when = "before the first step" if step == 0 else f"after {step} steps"
                    hint = "Both copies start with the values of the first rank." if step == 0 else ""
                    raise Wrong(f"{where} the table of rank {rank} is wrong {when}. {hint}".strip())
            for rank in ends:
                gradient = reports[rank]["gradients"][step]
                judge_gradient(f"{where} the gradient of rank {rank}'s table", gradient, parts[step], rank == 0)
        for rank in range(1, num_ranks - 1):
            if calls := reports[rank]["calls"]:
                hint = "It has no copy of the table. Who should?"
                raise Wrong(f"{where} rank {rank} takes part in {calls} operations of sum_gradients. {hint}")


def judge_gradient(what: str, found: torch.Tensor, parts: tuple[torch.Tensor, torch.Tensor], first: bool) -> None:
    """Raise Wrong unless `found` is the sum of both parts."""
    right, own = sum(parts), parts[0] if first else parts[1]
    if torch.allclose(found, right, atol=1e-9):
        return
    if torch.allclose(found, own, atol=1e-9):
        raise Wrong(f"{what} is that of its own use alone. In one process, one table has two uses")
    factor = ((found * right).sum() / right.square().sum()).item()
    if torch.allclose(found, factor * right, atol=1e-9):
        raise Wrong(f"{what} is {factor:.2f} times the right one")
    raise Wrong(f"{what} is wrong. Which two gradients make up that of a table with two uses?")
