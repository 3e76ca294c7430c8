"""The checks of chapter 6's exercises accept right answers, and reject the stub and plausible mistakes with help."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from answers import cell, judge, stub

import checks
from shared import models, ranks

CHAPTER = Path(__file__).parent.parent / "06-beyond-data-parallel"
SLICED = CHAPTER / "01_tensor_parallelism_by_hand.ipynb"
SMALL = models.GPTConfig(num_layers=2, num_heads=2, dim=16, context=8)


@functools.cache
def lesson_6_1() -> dict:
    """The names of lesson 6.1 with a smaller model, and those of its solutions."""
    names = {"__name__": "lesson_6_1"}  # no module: its functions travel to the ranks as those of a notebook do
    exec(cell(SLICED, "imports"), names)
    names |= {"RANKS": 2, "SEED": 7, "CONFIG": SMALL}
    windows = names["datasets"].text(SMALL.context).train
    names["BATCH"] = [part[:2].clone() for part in windows[:2]]
    cells = "sum-over-ranks copy-to-ranks cut sliced-block step sliced-step reference compare"
    for identity in cells.split():
        exec(cell(SLICED, identity), names)
    for identity in ("exercise-a-solution", "exercise-b-solution"):
        exec(cell(CHAPTER / "solutions" / SLICED.name, identity), names)
    return names


# --- 6.1a: each rank keeps some rows of the embedding ----------------------------------------------------------------


def embedding(*changes: tuple[str, str]) -> type:
    """The solution, with changes, each (old, new)."""
    text = cell(CHAPTER / "solutions" / SLICED.name, "exercise-a-solution")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    names = dict(lesson_6_1())
    exec(text, names)
    return names["SlicedEmbedding"]


MASK, ADDED = " * own.unsqueeze(-1)", "SumOverRanks.apply(part)"
test_6_1a = judge(checks.exercise_6_1a, [embedding()], {
    "stub": (stub, "not done yet"),
    "not masked": (embedding((MASK, "")), "What does each rank contribute for a token that it does not have?"),
    "rows of others": (embedding(("tokens - self.start", "tokens")), "returns a wrong embedding for token"),
    "even slices": (embedding(("len(slices[0])", "len(slices[-1])")), "with 10 tokens on 3 ranks"),
    "not added": (embedding((ADDED, "part")), "returns a wrong embedding for token"),
    "added backward too": (embedding((ADDED, f"CopyToRanks.apply({ADDED})")), "is 2 times the right one. Every rank"),
    "whole table": (embedding(("slices[dist.get_rank()].clone()", "weight.clone()")), "its slice is one nn.Parameter"),
    "rows out of range": (embedding(("rows.where(own, 0)", "rows")), "IndexError"),
})  # fmt: skip


def test_6_1a_refuses_an_all_reduce_that_sums_in_both_directions():
    """It warns, too, so it is no row of the table."""
    answer = embedding((ADDED, "torch.distributed.nn.functional.all_reduce(part)"))
    with pytest.raises(AssertionError, match="is 2 times the right one"):
        checks.exercise_6_1a(answer, strict=True)


# --- 6.1b: the missing sum -------------------------------------------------------------------------------------------


@pytest.fixture
def with_runs():
    """Give an answer what the lesson's cell gives it."""
    names = lesson_6_1()
    run = functools.partial(ranks.run, names["sliced_step"], 2, names["BATCH"])
    return lambda answer: (answer, run, names["CopyToRanks"].apply, names["SumOverRanks"].apply)


def first_wrong(results):
    names = lesson_6_1()
    wrong = [name for name, error in names["compare"](results).items() if error > 1e-9]
    return "none" if not wrong else f"backward, block {(wrong[0].split('.') * 2)[1]}, attention"


def without_the_loss(results):
    names = lesson_6_1()
    return names["find_missing_sum"]([(names["LOSS"], gradients, sent) for _, gradients, sent in results])


def exactly(results):
    names = lesson_6_1()
    wrong = [name for name, error in names["compare"](results).items() if error > 0]
    return names["find_missing_sum"](results) if len(wrong) < 3 else "forward"


test_6_1b = judge(checks.exercise_6_1b, [lambda results: lesson_6_1()["find_missing_sum"](results)], {
    "stub": (stub, "not done yet"),
    "first wrong": (first_wrong, "the answer was"),
    "without the loss": (without_the_loss, "your code raised ValueError"),
    "exactly equal": (exactly, re.compile("the answer was '(none|backward)")),
}, prepare="with_runs")  # fmt: skip


# --- 6.2a: a plan for a gated MLP ------------------------------------------------------------------------------------

PLANNED = CHAPTER / "02_tensor_parallelism_with_pytorch.ipynb"


def solved_6_2(identity: str, *changes: tuple[str, str]) -> dict:
    """The names after the cell of the solutions with this id, with changes, each (old, new)."""
    names = {"__name__": "lesson_6_2"}
    for each in ("imports", "gated"):
        exec(cell(CHAPTER / "solutions" / PLANNED.name, each), names)
    text = cell(CHAPTER / "solutions" / PLANNED.name, identity)
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    exec(text, names)
    return names


@functools.cache
def plan_with(*changes: tuple[str, str]) -> Callable:
    return solved_6_2("exercise-a-solution", *changes)["plan"]


@pytest.fixture
def with_layer():
    """Give a plan the module that it is for."""
    layer = solved_6_2("exercise-a-solution")["GatedLayer"]
    return lambda plan: (plan, layer)


NORM = '        "norm": SequenceParallel(),\n'
INPUT = '        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),\n'
W1, W3 = ('"mlp.w1": ColwiseParallel(', '"mlp.w3": ColwiseParallel(')
ROWS = "RowwiseParallel(output_layouts=Shard(1))"
test_6_2a = judge(checks.exercise_6_2a, [plan_with()], {
    "stub": (stub, "not done yet"),
    "each gathers": (
        plan_with((INPUT, ""), (W1, f"{W1}input_layouts=Shard(1)"), (W3, f"{W3}input_layouts=Shard(1)")),
        "with 3 collectives forward and 3 backward. 4 in all are enough. Which tensor is gathered more than once",
    ),
    "said twice": (
        plan_with((W1, f"{W1}input_layouts=Shard(1)"), (W3, f"{W3}input_layouts=Shard(1)")),
        "The backward pass has all-reduces",
    ),
    "norm left out": (plan_with((NORM, "")), "the gradient of norm.weight on rank 0 is wrong. It comes from"),
    "nothing cut": (lambda: {}, "and the gradient of norm.weight on rank 0 is wrong"),
    "all tokens returned": (plan_with((ROWS, "RowwiseParallel()")), "The size of tensor a (3) must match"),
    "w3 left out": (plan_with((f"        {W3}),\n", "")), "mixed torch.Tensor and DTensor"),
    "by the names' order": (
        plan_with((W3, '"mlp.w2": ColwiseParallel('), (f'"mlp.w2": {ROWS}', f'"mlp.w3": {ROWS}')), "in forward"),
    "no dict": (lambda: [], "no dict"),
}, prepare="with_layer")  # fmt: skip


# --- 6.2b: rows by kind, repaired -------------------------------------------------------------------------------------


def repaired(*changes: tuple[str, str]) -> type:
    return solved_6_2("exercise-b-solution", *changes)["RepairedMLP"]


UNITS, READ = "weight.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)", "unflatten(-1, (-1, 2)).unbind(-1)"
FOR_TWO = (UNITS, "weight.unflatten(0, (2, 2, -1)).transpose(0, 1).flatten(0, 2)")  # blocks of three gates, three ups
READ_FOR_TWO = (READ, "unflatten(-1, (-1, 2, 3)).transpose(-3, -2).flatten(-2).unbind(-2)")
test_6_2b = judge(checks.exercise_6_2b, [repaired()], {
    "stub": (stub, "not done yet"),
    "the old layer": (repaired((UNITS, "weight"), (READ, "chunk(2, dim=-1)")), "on 2 ranks, the result "
        "of rank 0 is wrong. It is right on fewer. The slice of rank 0 holds gate 0, gate 1, gate 2, gate 3, gate 4"),
    "rows only": (repaired((READ, "chunk(2, dim=-1)")), "in one process, the result of rank 0 is wrong. Do rows()"),
    "forward only": (repaired((UNITS, "weight")), "in one process, the result of rank 0 is wrong. Do rows()"),
    "for two ranks": (repaired(FOR_TWO, READ_FOR_TWO), "on 3 ranks"),
    "half of the rows": (repaired((UNITS, "weight[:6]")), "rows(weight) returns (6, 4)"),
    "a row twice": (repaired((UNITS, "weight[[0] * 12]")), "each row of the old weight once"),
})  # fmt: skip


# --- 6.3a: the norm of gradients with any layout ---------------------------------------------------------------------

MESHES = CHAPTER / "solutions/03_meshes_on_ray.ipynb"


def mesh_answer(name: str, *changes: tuple[str, str]) -> Callable:
    """The solution to 6.3a or 6.3b, with changes, each (old, new)."""
    exercise = {"gradient_norm": "exercise-a-solution", "step_on_three": "exercise-b-solution"}[name]
    text = cell(MESHES, exercise)
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    names = {"__name__": "lesson_6_3"}  # no module, as above
    exec(cell(MESHES, "imports"), names)
    exec(text, names)
    return names[name]


norm = functools.partial(mesh_answer, "gradient_norm")
KNOWN = "gradient.device_mesh.size()"
test_6_3a = judge(checks.exercise_6_3a, [norm()], {
    "stub": (stub, "not done yet"),
    "copies counted": (norm((" / copies", "")), "HSDP on 2 x 2: you say"),
    "copies in its own mesh": (norm(("dist.get_world_size() /", f"{KNOWN} /")), "without norms in the plan: you say"),
    "whole gradients": (norm(
        ("gradient.to_local().square().sum() / copies", "gradient.full_tensor().square().sum()"),
        ("    dist.all_reduce(total)\n", ""),
    ), "numbers at once"),
})  # fmt: skip


# --- 6.3b: a step on three dimensions --------------------------------------------------------------------------------

three = functools.partial(mesh_answer, "step_on_three")
BOTH = 'mesh["copies"].size() * mesh["shards"].size()'
NUMBER = 'mesh.get_local_rank("copies") * mesh["shards"].size() + '
test_6_3b = judge(checks.exercise_6_3b, [three()], {
    "stub": (stub, "not done yet"),
    "by shards": (three((BOTH, 'mesh["shards"].size()'), (NUMBER, ""), ('("copies", "shards")', '("shards",)')),
                  "2 tensor groups read window 0"),
    "scaled by world": (three(("(loss * size)", "(loss * dist.get_world_size())")), "is 2.000 times the right one"),
    "mean of the own": (three((', reduction="sum") / targets.numel()', ") / size")), "by what are they divided?"),
})  # fmt: skip
