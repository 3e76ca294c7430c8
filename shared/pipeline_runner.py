"""Run a schedule of a pipeline, a table as in shared.schedules, on real ranks that compute real gradients.

A rank computes its row from left to right. It sends with `isend`, one tag per message, and receives a message when a
cell needs it. So messages may arrive in any order, and only ranks that wait for each other in a circle hang.

A hang is found without a clock. On a board that all ranks read, a rank writes each message that it has sent, and what
it waits for. The ranks hang if each of them waits or has finished, and none of the awaited messages has been sent.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shared import ranks, schedules
from shared.schedules import Cell, Wait

Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Outcome(NamedTuple):
    """What the ranks did."""

    done: list[list[Cell]]  # the cells that each rank computed, in order
    most_live: list[int]  # for each rank, the largest number of forward passes that it kept at once
    loss: float  # the sum over the microbatches
    gradients: list[dict[str, torch.Tensor]]  # for each stage, by the name of the parameter
    waits: list[Wait]  # of the ranks that wait forever; empty unless they hang


def run(rows: Sequence[str | Sequence[str]], stages: Sequence[nn.Module], microbatches: Batches, loss: Loss) -> Outcome:
    """Run a table with one process per row, and return what the ranks did, even if they hang.

    rows: as `schedules.read_table` takes them. stages: a stage's result is the input of the next stage. microbatches:
    (input, target) for each. loss: gets the last stage's result and a target. The gradients are those of the sum of the
    losses.

    Raises ValueError for a table that `schedules.check` refuses. No process has started then.
    """
    table = schedules.read_table(rows)
    schedules.check(table, len(stages), len(microbatches))
    with tempfile.TemporaryDirectory() as folder:
        board = Path(folder, "board")
        return together(ranks.run(run_row, len(table), table, list(stages), list(microbatches), loss, board))


def together(reports: Sequence[Outcome]) -> Outcome:
    """Return one outcome for what `run_row` returned on each rank."""
    num_stages = len(reports[0].gradients)
    return Outcome(
        [report.done[rank] for rank, report in enumerate(reports)],
        [report.most_live[0] for report in reports],
        sum(report.loss for report in reports),
        [next(filter(None, (report.gradients[stage] for report in reports)), {}) for stage in range(num_stages)],
        [wait for report in reports for wait in report.waits],
    )


class Board:
    """What each rank has sent, and what it waits for, in a store that all ranks read."""

    def __init__(self, path: Path) -> None:
        self.store = dist.FileStore(str(path), dist.get_world_size())

    def add_message(self, cell: Cell, message: torch.Tensor) -> None:
        """Say that the message of `cell` has been sent, and what type and shape it has."""
        self.store.set(f"sent {cell}", " ".join([str(message.dtype).removeprefix("torch."), *map(str, message.shape)]))

    def was_sent(self, cell: Cell | str) -> bool:
        """Whether the message of `cell` has been sent."""
        return self.store.check([f"sent {cell}"])

    def buffer_for(self, cell: Cell) -> torch.Tensor:
        """Return an empty tensor to receive the message of `cell`, which has been sent."""
        dtype, *shape = self.store.get(f"sent {cell}").decode().split()
        return torch.empty([int(size) for size in shape], dtype=getattr(torch, dtype))

    def set_state(self, state: str) -> None:
        """Say that this rank `computes`, that it has `finished`, or which cell's message it waits for."""
        self.store.set(f"state {dist.get_rank()}", state)

    def wait_for(self, cell: Cell) -> bool:
        """Return True when the message of `cell` has been sent, or False when it never will be: the ranks hang."""
        self.set_state(str(cell))
        while not self.was_sent(cell):
            if self.all_hang():
                return False
            time.sleep(0.001)  # leave the processor to the ranks that compute
        self.set_state("computes")
        return True

    def all_hang(self) -> bool:
        """Whether every rank waits or has finished, and no awaited message has been sent.

        A message stays sent, and a rank sends before it waits. The states are read first. So if an awaited message
        has not been sent when the messages are read, its receiver has waited ever since its state was read.
        """
        keys = [f"state {rank}" for rank in range(dist.get_world_size())]
        if not self.store.check(keys):
            return False  # a rank has not started
        states = [self.store.get(key).decode() for key in keys]
        return "computes" not in states and not any(self.was_sent(state) for state in states if state != "finished")


class RowRunner:
    """Computes one rank's row of a table: a cell at a time, with the messages that it needs and those that it sends."""

    def __init__(self, table: list[list[Cell]], stages: list[nn.Module], microbatches: Batches, loss: Loss, path: Path):
        self.rank, self.board, self.row = dist.get_rank(), Board(path), table[dist.get_rank()]
        self.stages, self.microbatches, self.loss = stages, microbatches, loss
        self.cells = sorted(cell for row in table for cell in row)  # a cell's place is the tag of its message
        self.owners = {cell.stage: rank for rank, row in enumerate(table) for cell in row}
        self.messages: dict[Cell, torch.Tensor] = {}  # received, or from one stage of this rank to another
        self.live: dict[tuple[int, int], list] = {}  # for (stage, microbatch): input, result, the result's gradient
        self.sends, self.done, self.losses, self.most_live = [], [], {}, 0

    def other_stage(self, cell: Cell) -> Cell | None:
        """Return the cell of another stage whose message `cell` needs, if it needs one."""
        needed = schedules.needs(cell, set(self.cells), len(self.stages))
        return next((each for each in needed if each.stage != cell.stage), None)

    def receive(self, cell: Cell) -> None:
        """Receive the message of `cell`, which has been sent, unless it comes from this rank itself."""
        if cell not in self.messages:
            self.messages[cell] = self.board.buffer_for(cell)
            dist.recv(self.messages[cell], self.owners[cell.stage], tag=self.cells.index(cell))

    def send(self, cell: Cell, to_stage: int, message: torch.Tensor) -> None:
        """Start to send the message of `cell`. It is kept until it has arrived."""
        message, owner = message.detach().contiguous(), self.owners[to_stage]
        if owner == self.rank:
            self.messages[cell] = message
        else:
            self.sends.append((dist.isend(message, owner, tag=self.cells.index(cell)), message))
        self.board.add_message(cell, message)

    def forward(self, cell: Cell, x: torch.Tensor | None) -> None:
        stage, _, microbatch = cell
        inputs, target = self.microbatches[microbatch]
        x = inputs if stage == 0 else x.requires_grad_()
        result = self.stages[stage](x)
        if stage == len(self.stages) - 1:
            result = self.loss(result, target)
            self.losses[microbatch] = result.item()
        else:
            self.send(cell, stage + 1, result)
        self.live[stage, microbatch] = [x, result, None]
        self.most_live = max(self.most_live, len(self.live))

    def backward(self, cell: Cell, gradient: torch.Tensor | None) -> None:
        """Compute B, I or W. gradient: of the result, unless it is the loss; for W, I has kept it."""
        stage, kind, microbatch = cell
        parameters = list(self.stages[stage].parameters())
        x, result, kept = self.live[stage, microbatch]
        x_gradient = None
        if kind == "W":
            torch.autograd.backward(result, kept, inputs=parameters)
        elif kind == "B":
            torch.autograd.backward(result, gradient)
            x_gradient = x.grad
        else:
            self.live[stage, microbatch][2] = gradient
            if stage:  # the input of stage 0 is data
                (x_gradient,) = torch.autograd.grad(result, x, gradient, retain_graph=True)
        if kind in "BW":
            del self.live[stage, microbatch]
        if kind in "BI" and stage:
            self.send(cell, stage - 1, x_gradient)

    def run(self) -> list[Wait]:
        """Compute the row. Return what this rank waits for, if the ranks hang."""
        for cell in self.row:
            needed = self.other_stage(cell)
            if needed:
                if not self.board.wait_for(needed):
                    return [Wait(self.rank, cell, needed, self.owners[needed.stage])]
                self.receive(needed)
            compute = self.forward if cell.kind == "F" else self.backward
            compute(cell, self.messages.get(needed))
            self.done.append(cell)
        self.board.set_state("finished")
        return []

    def receive_the_rest(self) -> None:
        """Receive what has been sent to this rank and was never needed, so that every send can end."""
        for cell in filter(self.board.was_sent, self.cells):
            receiver = self.owners[cell.stage + (1 if cell.kind == "F" else -1)]
            if receiver == self.rank:
                self.receive(cell)


def run_row(table: list[list[Cell]], stages: list[nn.Module], microbatches: Batches, loss: Loss, path: Path) -> Outcome:
    """Compute this rank's row, and return what it did. Other ranks' rows are empty. path: of the board's file."""
    runner = RowRunner(table, stages, microbatches, loss, path)
    runner.board.set_state("computes")
    waits = runner.run()
    if waits:
        runner.receive_the_rest()
    for request, _ in runner.sends:
        request.wait()
    gradients = [{name: parameter.grad for name, parameter in stage.named_parameters() if parameter.grad is not None}
        for stage in stages]  # fmt: skip
    done = [runner.done if rank == runner.rank else [] for rank in range(len(table))]
    return Outcome(done, [runner.most_live], sum(runner.losses.values()), gradients, waits)
