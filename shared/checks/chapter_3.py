"""The exercise checks of chapter 3: when the model no longer fits."""

import copy
import json
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from shared.checks.machinery import Wrong, exercise, expect_close, refuse_stub, run_script

# --- Lesson 3.1: where memory goes -----------------------------------------------------------------------------------


@exercise("3.1a", "two measurements, and no run that dies in the night.")
def exercise_3_1a(largest_batch: Callable[[Callable[[int], int], int], int]) -> None:
    """largest_batch(needed, limit) -> the largest batch with needed(batch) <= limit, in three calls of needed."""
    for state, sequence, limit in (
        (16_000, 2_000, 60_000),
        (16_000, 2_000, 61_999),
        (1_000, 7_000, 50_000),
        (0, 3_000, 10_000),
        (16_000, 2_000, 18_000),
        (16_000, 2_000, 17_999),
        (90_000, 5_000, 40_000),
    ):
        calls = []

        def needed(batch: int, state: int = state, sequence: int = sequence, calls: list = calls) -> int:
            if batch < 1 or batch != int(batch):
                raise Wrong(f"you measure a batch of {batch}: a step needs at least one sequence, and whole ones")
            calls.append(batch)
            if len(calls) > 3:
                raise Wrong(f"you measure the batches {calls}: each is a run, and you have three. Section 2 needed two")
            return state + sequence * int(batch)

        what = f"with {state:,} bytes of state, {sequence:,} per sequence and a limit of {limit:,}"
        expected = max(0, (limit - state) // sequence)
        seen = largest_batch(needed, limit)
        if isinstance(seen, bool) or not isinstance(seen, int | float) or seen != int(seen):
            raise Wrong(f"{what} you return {seen!r}: return a whole number of sequences")
        if seen != expected:
            hint = "Where not even one sequence fits, it is 0."
            if expected and seen * sequence + state > limit:
                hint = f"That needs {seen * sequence + state:,.0f}. "
                hint += "Round down." if seen == expected + 1 else "Something is there before the first sequence."
            elif seen == expected - 1:
                hint = "One more fits: needed(1) already includes the first sequence."
            elif expected:
                hint = "More would fit. needed(1) includes the state, which a second sequence does not need again."
            raise Wrong(f"{what} {expected} sequences fit; you return {seen}. {hint}")


# What the log of six_shardings.py shows of a run with this mistake.
SYMPTOMS_3_1B = {
    "weights": "from the first backward pass on, both ranks would hold 4 more bytes per parameter, at all four points",
    "gradients": "both ranks would hold more than half of the gradients after backward, and no longer after zero_grad",
    "moments": "after backward in step 1 nothing would be wrong, and the first optimizer step would add 8 bytes per "
    "parameter instead of 4",
    "graph": "each step would end with more than the step before it",
    "copy": "the two ranks would hold different amounts",
    "none": "each part of the state would be halved. How many MB are 4 bytes per parameter, and half of them?",
}


@exercise("3.1b", "each mistake adds its own part, at its own moment, on its own rank.")
def exercise_3_1b(diagnose: Callable[[], dict[str, str]]) -> None:
    """diagnose() -> the mistake in each of the runs A to F of six_shardings.py, one of SYMPTOMS_3_1B."""
    seen = diagnose()
    if not isinstance(seen, dict) or sorted(seen) != ["A", "B", "C", "D", "E", "F"]:
        raise Wrong(f"return a dict with the keys A, B, C, D, E and F; yours is {seen!r}")
    for run, mistake in {
        "A": "gradients",
        "B": "graph",
        "C": "none",
        "D": "moments",
        "E": "copy",
        "F": "weights",
    }.items():
        if seen[run] not in SYMPTOMS_3_1B:
            raise Wrong(f"for run {run} you say {seen[run]!r}, which is not one of {', '.join(SYMPTOMS_3_1B)}")
        if seen[run] != mistake:
            raise Wrong(
                f"for run {run} you say {seen[run]!r}. Then {SYMPTOMS_3_1B[seen[run]]}. Is that the case in run {run}?"
            )


# Runs under torchrun: takes three steps with the learner's two functions, and writes what it saw to FOLDER/RANK.json.
WATCH_ZERO_1 = """
import copy, json, runpy, sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared import datasets, distributed, measure, models

script, folder = sys.argv[1:]
worker = distributed.join(timeout_s=20)
rank, world_size = worker.rank, worker.world_size
functions = runpy.run_path(script)
model = models.GPT(models.GPT_PRESETS["nano"]).double()
models.init_weights(model, seed=7)
start = [parameter.detach().clone() for parameter in model.parameters()]
# Three models on one process, each updated with a different gradient: which of them does the learner's equal?
others = {kind: copy.deepcopy(model) for kind in ("mean", "sum", "own")}
adams = {kind: torch.optim.AdamW(other.parameters(), lr=1e-3) for kind, other in others.items()}

def set_gradients(model, tokens, targets, factor=1):
    model.zero_grad()
    (factor * F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())).backward()

def is_equal(parameter, other):
    return (parameter - other).abs().max().item() < 1e-9

optimizer = functions["make_optimizer"](model)
if not isinstance(optimizer, torch.optim.Optimizer):
    raise TypeError(f"make_optimizer should return an optimizer, not {optimizer!r}")
windows, steps = datasets.text(64).train, []
for step in range(3):
    first = 2 * world_size * step
    tokens, targets = windows[first : first + 2 * world_size]
    mine = slice(rank, None, world_size)
    loss = F.cross_entropy(model(tokens[mine]).flatten(0, 1), targets[mine].flatten())
    loss.backward()
    functions["step"](model, optimizer)
    set_gradients(others["mean"], tokens, targets)
    set_gradients(others["sum"], tokens, targets, world_size)
    set_gradients(others["own"], tokens[mine], targets[mine])
    for adam in adams.values():
        adam.step()
    parameters = list(model.parameters())
    equal = {kind: sum(map(is_equal, parameters, other.parameters())) for kind, other in others.items()}
    unchanged = sum(map(torch.equal, parameters, start))
    left = sum(p.grad is not None and bool(p.grad.any()) for p in parameters)
    steps.append({"equal": equal, "unchanged": unchanged, "gradients": left, "parameters": len(parameters)})
moments = [value for state in optimizer.state.values() for value in state.values() if value.dim() > 0]
share = measure.storage_bytes(moments) / (16 * sum(parameter.numel() for parameter in model.parameters()))
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump({"steps": steps, "share": share}, file)
distributed.leave()
"""


def watch_zero_1(script: str | Path) -> list[dict]:
    """Let three ranks take three steps with the learner's functions. Return what each rank saw."""
    with tempfile.TemporaryDirectory() as folder:
        watcher = Path(folder) / "watch.py"
        watcher.write_text(WATCH_ZERO_1)
        try:
            run_script(watcher, 3, str(script), folder)
        except Wrong as error:
            if not re.search("[Cc]onnection|[Tt]imed out|timeout|[Bb]roken pipe|it hangs", str(error)):
                raise
            said = str(error).partition(". ")[0]  # what follows is advice on crashed workers, misleading here
            question = "Do all ranks call the same collectives in the same order, and do they agree on each source?"
            raise Wrong(f"one rank waited for another in vain. {question} (What it said: {said})") from None
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(3)]


@exercise("3.1c", "a third of the moments on each rank, and the weights of one AdamW on all of them.")
def exercise_3_1c(script: str | Path) -> None:
    """A file with make_optimizer(model) -> optimizer, and step(model, optimizer): ZeRO-1 by whole parameters."""
    refuse_stub(script)
    judge_zero_1(watch_zero_1(script))


def judge_zero_1(reports: list[dict]) -> None:
    """Raise Wrong unless each rank has the right weights after each step, no gradient, and its share of the moments."""
    for number, (rank, report) in ((n, pair) for n in range(3) for pair in enumerate(reports)):
        seen = report["steps"][number]
        equal, parameters = seen["equal"], seen["parameters"]
        where = f"after step {number + 1}, rank {rank}"
        if equal["mean"] < parameters:
            hint = "Average each gradient over the ranks before the update, and update each parameter once."
            if equal["own"] > equal["mean"]:
                hint = "Many equal an update with this rank's own gradient: average it over the ranks first."
            elif equal["sum"] > equal["mean"]:
                hint = "Many equal an update with the sum of the ranks' gradients: divide it by the world size."
            elif number == 0 and seen["unchanged"]:
                hint = f"{seen['unchanged']} have not changed. Their owners have new values: how do they get here?"
            elif number > 0:
                hint = "Step 1 was right. What is left from it when the next backward pass begins?"
            raise Wrong(
                f"{where} has {equal['mean']} of {parameters} parameters as one AdamW with the mean gradient would "
                f"leave them. {hint}"
            )
        if seen["gradients"]:
            raise Wrong(
                f"{where} still has {seen['gradients']} gradients. Whose gradients does your optimizer's zero_grad() "
                "clear?"
            )
    shares = [report["share"] for report in reports]
    if max(shares) > 0.4:
        hint = "That is all of them: an optimizer makes moments for each parameter that it is given."
        if max(shares) < 0.99:
            hint = "Parameters differ in size: an equal number of them is not an equal share."
        shown = ", ".join(f"{share:.0%}" for share in shares)
        raise Wrong(f"the ranks keep {shown} of the moments, and none should keep more than 40%. {hint}")
    if sum(shares) < 0.99:
        raise Wrong(f"the ranks keep {sum(shares):.0%} of the moments together: does each parameter have an owner?")


# --- Lesson 3.2: FSDP2 -----------------------------------------------------------------------------------------------


@exercise("3.2a", "whole rows, as many as rank 0 has until none are left.")
def exercise_3_2a(slice_bytes: Callable[[tuple[int, ...], torch.dtype, int, int], int]) -> None:
    """slice_bytes(shape, dtype, world_size, rank) -> bytes of this rank's slice of a parameter of that shape."""
    for shape, dtype, world_size in (
        ((384, 128), torch.float32, 2), ((5, 8), torch.float32, 4), ((10,), torch.float64, 4),
        ((50257, 768), torch.bfloat16, 8),
    ):  # fmt: skip
        row = math.prod(shape[1:]) * dtype.itemsize
        expected = [row * len(rows) for rows in torch.empty(shape[0]).chunk(world_size)]
        expected += [0] * (world_size - len(expected))
        try:
            seen = [slice_bytes(shape, dtype, world_size, rank) for rank in range(world_size)]
        except IndexError:
            raise Wrong(
                f"{shape} has {len(shape)} dimension(s): a bias or a norm has one, and rows of 1 number"
            ) from None
        if not all(isinstance(each, int | float) for each in seen):
            raise Wrong(f"return a number of bytes, not {seen[0]!r}")
        if seen == expected:
            continue
        hint, size = "", sum(expected)
        if min(seen) < 0:
            hint = "A rank past the last row has 0 rows, not fewer."
        elif all(math.isclose(each, size / world_size) for each in seen):
            hint = "A row is never cut in two."
        elif seen == [expected[0]] * world_size:
            hint = "That is the padded storage: the last ranks have fewer rows, or none."
        elif sum(seen) == size:
            hint = "Rows are not evened out: each rank takes as many as rank 0, until none are left."
        elif sum(seen) * dtype.itemsize == size or sum(seen) * dtype.itemsize == 4 * size:
            hint = f"A number of {dtype} takes {dtype.itemsize} bytes."
        where = f"{shape} of {dtype} on {world_size} ranks"
        raise Wrong(f"{where}: the slices have {expected} bytes, you say {seen}. {hint}")


SHARD_RESNET = """
import importlib.util, json, sys
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from shared import datasets, distributed, measure, models

class Gathers(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += "allgather" in str(function)
        return function(*args, **(kwargs or {}))

script, folder = sys.argv[1:]
spec = importlib.util.spec_from_file_location("exercise", script)
exercise = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exercise)
worker = distributed.join()
images, labels = datasets.digits().train[:8]
mine = slice(worker.rank, None, worker.world_size)
torch.manual_seed(0)
plain, model = models.resnet18().double(), models.resnet18().double()
model.load_state_dict(plain.state_dict())
exercise.shard(model)
sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
report = {"unsharded": [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]}
if not report["unsharded"]:
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    pieces = dict.fromkeys(units, 0)
    for name, size in sizes.items():  # a parameter belongs to the innermost module that was sharded
        pieces[max((unit for unit in units if not unit or name.startswith(unit + ".")), key=len)] += size
    report["largest"] = max(pieces.values()) / sum(sizes.values())
    optimizer = torch.optim.AdamW(model.parameters())
    with Gathers() as gathers:
        F.cross_entropy(model(images[mine].double()), labels[mine]).backward()
    report["gathers"] = gathers.number
    F.cross_entropy(plain(images.double()), labels).backward()
    pairs = zip(model.parameters(), plain.parameters())
    report["apart"] = max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs)
    optimizer.step()  # from here on there are moments
    report["state"] = measure.state_bytes(model, optimizer) / sum(sizes.values())
with open(f"{folder}/{worker.rank}.json", "w") as file:
    json.dump(report, file)
distributed.leave()
"""


@exercise("3.2b", "half of the state on each rank, and never more than one block gathered.")
def exercise_3_2b(script: str | Path) -> None:
    """A file with shard(model), which shards a ResNet-18 in place, block by block."""
    refuse_stub(script)
    with tempfile.TemporaryDirectory() as folder:
        caller = Path(folder) / "call.py"
        caller.write_text(SHARD_RESNET)
        try:
            run_script(caller, 2, str(script), folder)
        except Wrong as error:
            hint = " Did you shard the model before its blocks?" if "Invariant" in str(error) else ""
            raise Wrong(f"{error}.{hint}") from None
        reports = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, report in enumerate(reports):
        unsharded = report["unsharded"]
        if unsharded:
            names = ", ".join([*unsharded[:3], "..."] if len(unsharded) > 3 else unsharded)
            raise Wrong(
                f"{len(unsharded)} parameters are not sharded ({names}): their gradients are not averaged over the "
                "ranks either. Call fully_shard on the whole model last"
            )
        if report["largest"] > 0.43:
            raise Wrong(
                f"{report['largest']:.0%} of the weights are gathered at once; with each of the eight blocks for "
                "itself it is 42%, the largest block. Shard the blocks first, then the model"
            )
        if report["gathers"] < 17:
            raise Wrong(
                f"{report['gathers']} all-gathers in a step; block by block there are 17: the eight blocks and the "
                "rest for the forward pass, and the blocks once more for the backward pass. A call for each block, "
                "which is to reshard"
            )
        if report["apart"] > 1e-9:
            raise Wrong(f"the gradients are off by {report['apart']:.1e} from those of one process")
        expect_close(report["state"], 32 / 2, f"rank {rank} keeps, in bytes a parameter in float64,", tolerance=0.02)


@exercise("3.2c", "every micro-batch gathers, and only the last one reduces.")
def exercise_3_2c(collectives: Callable[[int, int, bool, bool], tuple[int, int]]) -> None:
    """collectives(num_blocks, micro_batches, reshard_blocks, reshard_root) -> (all_gathers, reduce_scatters)."""
    for num_blocks, micro_batches, blocks, root in (
        (5, 1, True, False), (5, 1, False, False), (5, 1, True, True), (32, 4, True, False), (2, 3, False, True),
    ):  # fmt: skip
        once = num_blocks + 1 + num_blocks * blocks + root
        expected = (micro_batches * once, num_blocks + 1)
        call = f"collectives({num_blocks}, {micro_batches}, reshard_blocks={blocks}, reshard_root={root})"
        seen = collectives(num_blocks, micro_batches, blocks, root)
        if not isinstance(seen, tuple | list) or len(seen) != 2:
            raise Wrong(f"{call} should return two numbers, (all_gathers, reduce_scatters); yours is {seen!r}")
        if tuple(seen) == expected:
            continue
        hint = "Forward gathers every group; backward gathers again what was freed, blocks or root."
        if seen[0] == expected[0]:
            hint = "Each group's gradients are reduced once a step, with the last micro-batch."
        elif micro_batches > 1 and seen[0] == once:
            hint = "After a backward pass everything is freed: the next micro-batch gathers anew."
        raise Wrong(f"{call} is {expected}, you say {tuple(seen)}. {hint}")


# --- Lesson 3.4: DeepSpeed ZeRO --------------------------------------------------------------------------------------

BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@exercise("3.4a", "two numbers are chosen, the third follows, and nobody can contradict them.")
def exercise_3_4a(fill_in: Callable[[dict, int, int, int], dict]) -> None:
    """fill_in(settings, global_batch, accumulation, world_size) -> new settings with DeepSpeed's three batch sizes."""
    given = {"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "zero_optimization": {"stage": 2}}
    for global_batch, accumulation, world_size in ((64, 1, 2), (64, 4, 2), (96, 2, 8), (8, 8, 1)):
        micro = global_batch // (accumulation * world_size)
        call = f"fill_in(settings, {global_batch}, {accumulation}, {world_size})"
        before = copy.deepcopy(given)
        seen = fill_in(before, global_batch, accumulation, world_size)
        if not isinstance(seen, dict):
            raise Wrong(f"{call} should return a dict of settings, and returns {seen!r}")
        if before != given:
            raise Wrong(f"{call} has changed the settings it was given: make new ones, {{**settings, ...}}")
        if {name: seen.get(name) for name in given} != given:
            raise Wrong(f"{call} should keep all other settings as they are")
        hint = f"{global_batch} = {micro} a rank and part x {accumulation} parts x {world_size} ranks."
        for name, expected in zip(BATCHES, (global_batch, micro, accumulation), strict=True):
            if name not in seen:
                raise Wrong(f"{call} lacks {name!r}")
            if isinstance(seen[name], float):
                hint = "A whole number: // rather than /."
            if seen[name] != expected or isinstance(seen[name], float):
                raise Wrong(f"{call}: {name} is {seen[name]!r}, expected {expected}. {hint}")
    agreeing = {**given, "train_batch_size": 64, "gradient_accumulation_steps": 4}
    if fill_in(dict(agreeing), 64, 4, 2).get("train_micro_batch_size_per_gpu") != 8:
        raise Wrong("settings that hold some of the three numbers already, and the same ones, are right")
    for settings, numbers, why in (
        (given, (64, 3, 2), "64 is not divisible by 3 parts x 2 ranks"),
        (given, (4, 2, 4), "4 samples are too few for 2 parts x 4 ranks"),
        ({**given, "train_batch_size": 32}, (64, 1, 2), "the settings say 32 where the global batch is 64"),
        ({**given, "gradient_accumulation_steps": 2}, (64, 4, 2), "the settings say 2 parts where there are 4"),
        ({**given, BATCHES[1]: 16}, (64, 4, 2), "the settings say 16 a rank and part where there are 8"),
    ):
        try:
            fill_in(copy.deepcopy(settings), *numbers)
        except ValueError:
            continue
        raise Wrong(f"no ValueError, although {why}")


@exercise("3.4b", "you know what DeepSpeed keeps, and when.")
def exercise_3_4b(kept_bytes: Callable[[int, str, int, bool], float]) -> None:
    """kept_bytes(stage, precision, num_ranks, more_to_come) -> bytes a parameter on each rank after backward."""
    for stage in range(4):
        for precision, size in (("fp32", 4), ("bf16", 2)):
            for num_ranks in (1, 2, 8):
                for more_to_come in (False, True):
                    gradients_cut = stage >= 2 or (stage == 1 and not more_to_come)
                    weights = size / (num_ranks if stage == 3 else 1)
                    gradients = size / (num_ranks if gradients_cut else 1)
                    master = 0 if (stage, precision) == (0, "fp32") else 4 / (num_ranks if stage else 1)
                    moments = 8 / (num_ranks if stage else 1)
                    parts = f"{weights:g} + {gradients:g} + {master:g} + {moments:g}"
                    expect_close(
                        kept_bytes(stage, precision, num_ranks, more_to_come),
                        weights + gradients + master + moments,
                        f"kept_bytes({stage}, {precision!r}, {num_ranks}, {more_to_come})",
                        hint=f"Weights, gradients, master copy, moments: {parts}.",
                    )


def loss_scales(
    overflows: list[bool], scale: float, window: int, hysteresis: int, minimum: float, fault: str = ""
) -> list[float]:
    """The loss scale that each step uses, by the rule of exercise 3.4c; `fault`: with one mistake in it."""
    used, good, patience = [], 0, hysteresis
    for overflow in overflows:
        used.append(scale)
        if overflow:
            good = good if fault == "count" else 0
            if patience > 1 and fault != "patience":
                patience -= 1
            else:
                scale = scale / 2 if fault == "minimum" else max(scale / 2, minimum)
                patience = hysteresis if fault == "halved" else patience
            continue
        good += 1
        if fault == "calm":
            patience = hysteresis
        if good == window or (fault == "forever" and good > window):
            scale *= 2
            good = good if fault == "forever" else 0
            patience = patience if fault == "renew" else hysteresis
    return [*used, scale][1:] if fault == "late" else used


FAULTS = {
    "patience": "An overflow halves the scale only when the patience is down to 1; else it takes one off.",
    "minimum": "It never goes below the minimum.",
    "count": "An overflow starts the count of good steps again.",
    "calm": "A good step alone does not renew the patience, only a doubling does.",
    "halved": "A halving does not renew the patience, only a doubling does.",
    "renew": "A doubling renews the patience.",
    "forever": "After a doubling the count of good steps starts again.",
    "late": "That is the scale after each step: note it before you change it.",
}


@exercise("3.4c", "as high as it goes, and no step is taken with a gradient that isn't one.")
def exercise_3_4c(scales: Callable[[list[bool], float, int, int, float], list[float]]) -> None:
    """scales(overflows, scale, window, hysteresis, minimum) -> the loss scale that each step uses."""
    for steps, scale, window, hysteresis, minimum in (
        ("..........", 8.0, 4, 1, 1.0),
        ("x.....", 8.0, 3, 1, 1.0),
        (".x..x...x", 8.0, 3, 1, 1.0),
        ("xxxx..", 8.0, 3, 2, 1.0),
        ("xxxxxx", 4.0, 3, 1, 1.0),
        ("x.x.x...x..x", 64.0, 3, 2, 1.0),
        ("", 8.0, 3, 2, 1.0),
    ):
        overflows = [step == "x" for step in steps]
        numbers = (scale, window, hysteresis, minimum)
        answer = scales(list(overflows), *numbers)
        what = f"with scale {scale:g}, window {window}, hysteresis {hysteresis}, steps {steps!r} (x: overflow)"
        try:
            seen = [float(value) for value in answer]
        except TypeError:
            raise Wrong(f"{what} return a list with one scale a step; yours is {answer!r}") from None
        expected = loss_scales(overflows, *numbers)
        if seen != expected:
            faults = [fault for fault in FAULTS if seen == loss_scales(overflows, *numbers, fault)]
            hint = FAULTS[faults[0]] if faults else ""
            shown = [", ".join(f"{value:g}" for value in values) for values in (expected, seen)]
            raise Wrong(f"{what} the scales are {shown[0]}; you say {shown[1]}. {hint}".strip())


# --- Lesson 3.5: choosing --------------------------------------------------------------------------------------------


@exercise("3.5a", "the least that fits.")
def exercise_3_5a(choose: Callable[[float, int, float, float], str | None]) -> None:
    """choose(num_parameters, num_gpus, gpu_bytes, activation_bytes) -> the first of ddp, zero-2, fsdp2 that fits."""
    for parameters, gpus, memory, activations, expected in (
        (1e9, 8, 80e9, 20e9, "ddp"), (5e9, 8, 80e9, 20e9, "zero-2"), (13e9, 8, 80e9, 20e9, "fsdp2"),
        (13e9, 1, 80e9, 20e9, None), (13e9, 64, 80e9, 20e9, "zero-2"), (1e9, 8, 32e9, 17e9, "zero-2"),
        (1e9, 8, 32e9, 16e9, "ddp"),
    ):  # fmt: skip
        call = f"choose({parameters:.0e}, {gpus}, {memory:.0e}, {activations:.0e})"
        seen = choose(parameters, gpus, memory, activations)
        if seen == expected:
            continue
        order = ("ddp", "zero-2", "fsdp2", None)
        if seen not in order:
            raise Wrong(f'{call} is {seen!r}; it should be "ddp", "zero-2", "fsdp2" or None')
        hint = "State and activations together must fit."
        if order.index(seen) > order.index(expected):
            hint = "Take the first that fits, in the order ddp, zero-2, fsdp2; just fitting is enough."
        raise Wrong(f"{call} is {expected!r}, you say {seen!r}. {hint}")


@exercise("3.5b", "accumulation is free of traffic for DDP, and not for FSDP2.")
def exercise_3_5b(bytes_sent: Callable[[str, int, int, int], float]) -> None:
    """bytes_sent(strategy, num_parameters, num_gpus, accumulation) -> bytes that a rank sends for an optimizer step."""
    for strategy, parameters, gpus, accumulation in (
        ("ddp", 1_000_000, 2, 1), ("ddp", 1_000_000, 8, 4), ("fsdp2", 1_000_000, 2, 1), ("fsdp2", 1_000_000, 8, 4),
        ("ddp", 1_000_000, 1, 1),
    ):  # fmt: skip
        ring = 4 * parameters * (gpus - 1) / gpus
        expected = 2 * ring if strategy == "ddp" else 3 * ring * accumulation
        seen = bytes_sent(strategy, parameters, gpus, accumulation)
        hint = (
            "An all-reduce is two rounds" if strategy == "ddp" else "Two gathers and a reduce-scatter are three rounds"
        )
        hint += ", each of (N-1)/N of all gradients or weights, 4 bytes each."
        if accumulation > 1:
            hint = "no_sync: one all-reduce a step." if strategy == "ddp" else "It gathers and reduces each time."
        elif gpus == 1:
            hint = "One GPU has nobody to send to."
        elif seen == expected * gpus / (gpus - 1):
            hint = "A rank does not send its own part: (N-1)/N."
        call = f'bytes_sent("{strategy}", {parameters}, {gpus}, {accumulation})'
        expect_close(seen, expected, call, hint=hint)
