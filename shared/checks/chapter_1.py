"""The exercise checks of chapter 1: DDP with plain PyTorch."""

import argparse
import contextlib
import copy
import io
import json
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.run import get_args_parser

from shared import models
from shared.checks.machinery import Wrong, exercise, expect_close, run_script

# --- Lesson 1.1: one process ---------------------------------------------------------------------------------------


@exercise("1.1a", "a mean over samples, not a mean of means.")
def exercise_1_1a(mean_loss: Callable[[list[float], list[int]], float]) -> None:
    """mean_loss(batch_means, batch_sizes) -> the mean loss over all samples."""
    hint = (
        "Each batch's mean stands for as many samples as the batch holds: weight it by them, "
        "and divide once, by the number of all samples."
    )
    expect_close(mean_loss([1.0, 3.0], [4, 4]), 2.0, "the mean of two batches of 4 with means 1 and 3", hint=hint)
    expect_close(
        mean_loss([1.0, 3.0], [64, 5]), 79 / 69, "the mean of batches of 64 and 5 with means 1 and 3", hint=hint
    )
    expect_close(mean_loss([0.5, 2.0, 7.0], [10, 20, 0]), 1.5, "the mean where one batch is empty", hint=hint)


@exercise("1.1b", "parts of a batch, added up, are the batch: the idea that all data parallelism rests on.")
def exercise_1_1b(accumulate: Callable) -> None:
    """accumulate(model, images, labels, parts) leaves in .grad the gradient of the mean loss over the whole batch."""
    torch.manual_seed(0)
    model = models.MLP(input_dim=64, hidden_dim=16, dropout=0.0).double()
    images, labels = torch.randn(12, 1, 8, 8, dtype=torch.float64), torch.randint(0, 10, (12,))
    F.cross_entropy(model(images), labels).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    for sizes in ([12], [4, 4, 4], [6, 5, 1]):
        candidate = copy.deepcopy(model)
        candidate.zero_grad()
        calls = []
        next(candidate.parameters()).register_post_accumulate_grad_hook(calls.append)
        accumulate(candidate, images, labels, sizes)
        for parameter, reference in zip(candidate.parameters(), expected, strict=True):
            if parameter.grad is None:
                raise Wrong("a parameter has no .grad afterwards: call backward() for every part")
            if not torch.allclose(parameter.grad, reference, rtol=1e-9, atol=1e-12):
                ratio = (parameter.grad.norm() / reference.norm()).item()
                raise Wrong(
                    f"with parts of {sizes} the gradient is not the whole batch's, but {ratio:.3f} times as long. "
                    "backward() adds to .grad, so divide each part's SUM of losses by the size of the whole batch"
                )
        if len(calls) != len(sizes):  # the right gradient, but the whole batch was held at once
            raise Wrong(f"{len(sizes)} parts, and backward() ran {len(calls)} time(s): call it for each part by itself")


@exercise("1.1c", "weights once and Adam's two moments: three times the weights.")
def exercise_1_1c(checkpoint_bytes: Callable[[torch.nn.Module], int]) -> None:
    """checkpoint_bytes(model) -> the bytes of a checkpoint of the model and its Adam state, within 1 %."""
    for model in (models.MLP(), models.MLP(input_dim=64, hidden_dim=300).double()):
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        weights = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
        dtype, seen = next(model.parameters()).dtype, checkpoint_bytes(model)
        hint = "Adam keeps two more tensors of each parameter's size."
        if seen == 3 * sum(parameter.numel() for parameter in model.parameters()):
            hint = "That is how many numbers they are: element_size() gives the bytes of one."
        elif seen == 12 * sum(parameter.numel() for parameter in model.parameters()):
            hint = "A number has not always 4 bytes: element_size() says how many."
        elif seen == 4 * sum(weights):
            hint = "A checkpoint holds no gradients: the next step computes them anew."
        elif seen < file.tell() / 1000:
            hint = "Return bytes, not kilobytes or megabytes."
        expect_close(seen, file.tell(), f"the size for an MLP in {dtype}", tolerance=0.01, hint=hint)


# --- Lesson 1.2: ranks and collectives ------------------------------------------------------------------------------


@exercise("1.2a", "2(N-1)/N times the gradients: less than twice, however many ranks.")
def exercise_1_2a(bytes_sent: Callable[[torch.nn.Module, int], float]) -> None:
    """bytes_sent(model, world_size) -> bytes each rank sends in a ring all-reduce of the model's gradients."""
    frozen = models.MLP(input_dim=64, hidden_dim=32)
    frozen.layers[1].requires_grad_(False)
    for model, what in (
        (models.MLP(input_dim=64, hidden_dim=32), "an MLP"),
        (models.MLP(input_dim=64, hidden_dim=32).double(), "an MLP in float64"),
        (frozen, "an MLP whose first layer is frozen"),
    ):
        gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        everything = sum(p.nbytes for p in model.parameters())
        for num_ranks, times in ((2, 1.0), (4, 1.5), (8, 1.75), (1, 0.0)):
            hint = f"The gradients have {gradients:,} bytes, and a ring of {num_ranks} sends {times:g} times as many."
            no_gradient = (
                "This model has not been through backward(): every `.grad` is None. "
                "A gradient has as many bytes as its parameter, `parameter.nbytes`."
            )
            try:
                seen = bytes_sent(model, num_ranks)
            except AttributeError as error:
                if "NoneType" not in str(error):
                    raise
                raise Wrong(f"your code raised AttributeError: {error}. {no_gradient}") from None
            if seen == 0:
                hint = no_gradient
            elif isinstance(seen, int | float) and seen == times * gradients / next(model.parameters()).itemsize:
                hint = "That counts the numbers; each has `element_size()` bytes."
            elif isinstance(seen, int | float) and gradients < everything and seen == times * everything:
                hint = "A frozen parameter has no gradient: count only those with `requires_grad`."
            elif seen == (num_ranks - 1) * gradients:
                hint += " Yours is what rank 0 sends in the naive way."
            expect_close(seen, times * gradients, f"for {what} on {num_ranks} rank(s) the number", 1e-3, hint)


@exercise("1.2b", "dealt like cards: no rank has to ask another one which samples are its own.")
def exercise_1_2b(samples_of: Callable[[list[int], int, int, int, int], list[int]]) -> None:
    """samples_of(order, rank, world_size, batch_size, k) -> the samples of this rank's k-th batch, k from 0."""
    order = torch.randperm(26, generator=torch.Generator().manual_seed(0)).tolist()
    for rank, world_size, k in ((0, 1, 0), (0, 2, 0), (1, 2, 0), (1, 2, 2), (3, 4, 1), (1, 2, 3), (3, 4, 3)):
        local = 8 // world_size
        expected = order[rank::world_size][k * local : (k + 1) * local]
        block = order[8 * k + local * rank :][:local]
        answer = samples_of(list(order), rank, world_size, 8, k)
        try:
            seen = [int(sample) for sample in answer]
        except (TypeError, ValueError):
            raise Wrong(f"return a list of samples; yours is {answer!r}") from None
        if seen != expected:
            hint = "Is it the right step? The first one is k = 0."
            if seen == block:
                hint = "Yours is cut in one piece from the order or the batch: deal in turn, every world_size-th."
            elif seen and len(seen) != len(expected):
                hint = f"A rank's part of a full batch of 8 is {local} samples; the last batch may hold fewer."
            raise Wrong(
                f"rank {rank} of {world_size} trains in step {k}, of order {order} in batches of 8, on {expected}; "
                f"you say {seen}. {hint}"
            )


# Runs under torchrun: calls the learner's function with this rank's counts, case by case.
CALL_GLOBAL_ACCURACY = """
import datetime, json, runpy, sys
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
dist.barrier()  # gloo: a rank that leaves while another one still connects breaks that one's start
path, folder, cases = sys.argv[1:]
global_accuracy = runpy.run_path(path)["global_accuracy"]
answers = [global_accuracy(*counts[dist.get_rank()]) for counts in json.loads(cases)]
with open(f"{folder}/{dist.get_rank()}.json", "w") as file:
    json.dump([a.item() if hasattr(a, "item") else a for a in answers], file, default=repr)
dist.destroy_process_group()
"""


def run_ranks(script: str | Path, nproc: int, *args: str) -> list[str]:
    """As run_script, which asks the right question where one rank waited for another in vain."""
    try:
        return run_script(script, nproc, *args)
    except Wrong as error:
        if re.search("[Cc]onnection|[Tt]imed out|timeout|[Bb]roken pipe", str(error)):
            question = "Did every rank call every collective, as often as the others? Is there one inside an `if`?"
            said = str(error).partition(". ")[0]  # what follows is PyTorch's advice on crashed workers, misleading here
            raise Wrong(f"one rank waited for another in vain. {question} (What it said: {said})") from None
        raise


@exercise("1.2c", "counts are added over the ranks, and divided once.")
def exercise_1_2c(script: str | Path) -> None:
    """A file with global_accuracy(hits, samples) -> the accuracy over the samples of all ranks, on every rank."""
    if "raise NotImplementedError" in Path(script).read_text():
        raise NotImplementedError
    cases = [[[45, 50], [2, 10]], [[1, 4], [36, 36]]]
    with tempfile.TemporaryDirectory() as folder:
        caller = Path(folder) / "call.py"
        caller.write_text(CALL_GLOBAL_ACCURACY)
        try:
            run_ranks(caller, 2, str(script), folder, json.dumps(cases))
        except Wrong as error:
            if "NoneType" not in str(error):
                raise
            returns = "`all_reduce` returns nothing: it writes the sum over the tensor that you give it"
            raise Wrong(f"{returns}. (What was said: {error})") from None
        answers = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    for case, ((hits0, samples0), (hits1, samples1)) in enumerate(cases):
        counts = f"where rank 0 has {hits0} of {samples0} right and rank 1 {hits1} of {samples1}"
        mean = (hits0 / samples0 + hits1 / samples1) / 2
        for rank in range(2):
            seen = answers[rank][case]
            hint = f"Right are {hits0 + hits1} of {samples0 + samples1}."
            by_own_samples = (hits0 + hits1) / (samples0, samples1)[rank]
            if isinstance(seen, float) and math.isclose(seen, by_own_samples, rel_tol=1e-5):
                hint = "Did you add up the samples too, not only the hits?"
            elif answers[0][case] != answers[1][case]:
                hint = "The ranks have different answers: all_reduce writes the sum over its tensor, on every rank."
            elif isinstance(seen, float) and math.isclose(seen, mean, rel_tol=1e-5):
                hint = "That is the mean of the ranks' accuracies, as if both had equally many samples: add the counts."
            expect_close(
                seen, (hits0 + hits1) / (samples0 + samples1), f"{counts}, the accuracy on rank {rank}", hint=hint
            )


# --- Lesson 1.3: DistributedDataParallel ----------------------------------------------------------------------------

# What the logs of a run with this mistake show.
SYMPTOMS = {
    "own accuracy": "the two ranks would report different accuracies although their weights are equal",
    "bare model": "the two ranks' weights would differ",
    "padding": "the two ranks together would train on more than the 101 samples that there are",
    "no set_epoch": "each rank would begin both epochs with the same samples",
    "none": "nothing in its logs would be wrong: look at weights, accuracies, numbers of samples, and both epochs",
}


@exercise("1.3a", "each mistake leaves its trace in the ranks' logs, if the logs hold the right numbers.")
def exercise_1_3a(diagnose: Callable[[], dict[str, str]]) -> None:
    """diagnose() -> the mistake in each of the runs A to E, one of SYMPTOMS."""
    seen = diagnose()
    if not isinstance(seen, dict) or sorted(seen) != ["A", "B", "C", "D", "E"]:
        raise Wrong(f"return a dict with the keys A, B, C, D and E; yours is {seen!r}")
    for run, mistake in {
        "A": "own accuracy",
        "B": "none",
        "C": "bare model",
        "D": "padding",
        "E": "no set_epoch",
    }.items():
        if seen[run] not in SYMPTOMS:
            raise Wrong(f"for run {run} you say {seen[run]!r}, which is not one of {', '.join(SYMPTOMS)}")
        if seen[run] != mistake:
            raise Wrong(f"for run {run} you say {seen[run]!r}. Then {SYMPTOMS[seen[run]]}. Is that so in run {run}?")


# Runs under torchrun: takes two steps with each learner's file, and writes what it saw to FOLDER/rank-R.json.
WATCH_MY_DDP = """
import json, runpy, sys
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from shared import datasets, distributed

worker = distributed.join(timeout_s=20)
images, labels = datasets.load("digits").train.tensors
really_all_reduce, calls = dist.all_reduce, []

class Work:  # the sum arrives as late as it may, in wait(), or as early as it may, in the call itself
    def __init__(self, tensor, op, group, late):
        self.tensor, self.total = tensor, tensor.detach().clone() if late else None
        self.work = really_all_reduce(self.total if late else tensor, op, group, async_op=True)
        if not late:
            self.work.wait()
    def wait(self, *timeout):
        self.work.wait(*timeout)
        if self.total is not None:
            self.tensor.detach().copy_(self.total)
        self.total = None
        return True
    def __getattr__(self, name):
        return getattr(self.work, name)

def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    calls.append(async_op)
    return Work(tensor, op, group, late) if async_op else really_all_reduce(tensor, op, group)

def mean_over_ranks(gradient):
    total = gradient.clone()
    really_all_reduce(total)
    return total / worker.world_size

def kind(gradient, own, mean):
    same = lambda other: gradient is not None and torch.allclose(gradient, other, rtol=1e-9, atol=1e-12)
    values = {"the mean": mean, "this rank's own": own, "the sum": 2 * mean, "half of the mean": mean / 2}
    values["half of this rank's own"] = own / 2
    return next((name for name, value in values.items() if same(value)), "something else")

def watch(path):
    global late
    dist.all_reduce = all_reduce
    functions = runpy.run_path(path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).double()
    parameters, steps = list(model.parameters()), []
    pending = functions["attach"](model)
    for step, late in enumerate((True, False)):
        rows = slice(64 * step + worker.rank, 64 * step + 64, 2)
        loss = lambda: F.cross_entropy(model(images[rows].double()), labels[rows])
        own = torch.autograd.grad(loss(), parameters)
        calls.clear()
        model.zero_grad()
        loss().backward()
        during_backward = list(calls)
        functions["finish"](pending)
        means = [mean_over_ranks(gradient) for gradient in own]
        kinds = [kind(p.grad, gradient, mean) for p, gradient, mean in zip(parameters, own, means)]
        steps.append({"kinds": kinds, "async_ops": during_backward})
    dist.all_reduce = really_all_reduce
    return steps

folder, *paths = sys.argv[1:]
with open(f"{folder}/rank-{worker.rank}.json", "w") as file:
    json.dump([watch(path) for path in paths], file)
distributed.leave()
"""


def watch_my_ddp(*scripts: str | Path) -> list[list]:
    """Let two ranks take two steps with each script. Return for each script what each rank saw."""
    with tempfile.TemporaryDirectory() as folder:
        watcher = Path(folder) / "watch.py"
        watcher.write_text(WATCH_MY_DDP)
        run_ranks(watcher, 2, folder, *map(str, scripts))
        by_rank = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return [list(seen) for seen in zip(*by_rank, strict=True)]


def judge_my_ddp(seen: list[list[dict]]) -> None:
    """Raise Wrong unless all gradients are means on each rank in each step, and were summed in the background."""
    hints = {
        "the sum": "Divide by the world size after `wait()`. Before it the tensor belongs to the all-reduce.",
        "this rank's own": "Does each `.grad` go to an all-reduce, and does `finish` wait for each of them? A hook "
        "that uses the loop's variable sees its last value in every call: PyTorch passes the parameter to the hook.",
        "half of this rank's own": "You divided a gradient whose sum had not arrived.",
        "half of the mean": "You divided it twice.",
        "something else": "Sum each `.grad` over the ranks once, then divide it by the world size.",
    }
    for step, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        kinds = seen[rank][step]["kinds"]
        for kind, hint in hints.items():
            if kind in kinds:
                if step == 1:
                    hint = "Step 1 was right: does `finish` leave `pending` empty for the next step?"
                raise Wrong(
                    f"in step {step + 1} on rank {rank}, {kinds.count(kind)} of {len(kinds)} gradients should be the "
                    f"mean over the ranks, and are {kind}. {hint}"
                )
    started = seen[0][0]["async_ops"]
    if not started:
        raise Wrong(
            "all gradients are right, but no all-reduce had started when backward() returned. That is averaging by "
            "hand: start each one in a hook on its parameter"
        )
    if not all(started):
        raise Wrong(
            f"all gradients are right, but {started.count(False)} all-reduces made backward() wait. Start them in the "
            "background (section 2), and wait in `finish`"
        )


@exercise("1.3b", "every all-reduce starts while backward() runs: this is DDP with one bucket per gradient.")
def exercise_1_3b(script: str | Path) -> None:
    """A file with attach(model) -> pending, and finish(pending), which leaves the ranks' mean in each `.grad`."""
    if "raise NotImplementedError" in Path(script).read_text():
        raise NotImplementedError
    (seen,) = watch_my_ddp(script)
    judge_my_ddp(seen)


@exercise("1.3c", "a new order each epoch, and one accuracy that all ranks agree on.")
def exercise_1_3c(script: str | Path) -> None:
    """A script for 2 ranks that writes its orders and its accuracy to FOLDER/rank-R.json."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(script, 2, folder)
        reports = []
        for rank in (0, 1):
            path = Path(folder, f"rank-{rank}.json")
            if not path.exists():
                raise Wrong(f"rank {rank} wrote no report: keep the lines marked `keep`, on every rank")
            reports.append(json.loads(path.read_text()))
    for epoch, orders in enumerate(zip(*(report["orders"] for report in reports), strict=True)):
        if sorted(index for order in orders for index in order) != list(range(1280)):
            raise Wrong(f"in epoch {epoch} the two ranks together did not see each of the 1280 samples once")
    if any(report["orders"][0] == report["orders"][1] for report in reports):
        fix = "call sampler.set_epoch(epoch) before each (the accuracy is checked next)"
        raise Wrong(f"both epochs have the same order: {fix}")
    own = [sum(report["right"]) / len(report["right"]) for report in reports]
    mean = sum(sum(report["right"]) for report in reports) / sum(len(report["right"]) for report in reports)
    for rank, report in enumerate(reports):
        hint = "Add up hits and samples over all ranks, then divide once."
        if math.isclose(report["accuracy"], own[rank], rel_tol=1e-6):
            hint = "That is the accuracy on this rank's own part. " + hint
        elif math.isclose(report["accuracy"], sum(own) / 2, rel_tol=1e-6):
            hint = "That is the mean of the ranks' accuracies, and they have 128 and 127 images. " + hint
        expect_close(report["accuracy"], mean, f"the accuracy that rank {rank} reports", hint=hint)


# --- Lesson 1.4: torchrun -------------------------------------------------------------------------------------------


@exercise("1.4a", "the share of n times one process that was reached.")
def exercise_1_4a(efficiency: Callable[[dict[int, float]], dict[int, float]]) -> None:
    """efficiency({processes: samples per second}) -> {processes: share of the ideal}."""
    seen = efficiency({1: 300.0, 2: 480.0, 4: 900.0})
    if not isinstance(seen, dict) or sorted(seen) != [1, 2, 4]:
        raise Wrong(f"return a dict with the same keys, 1, 2 and 4; yours is {seen!r}")
    for n, expected in ((2, 0.8), (4, 0.75), (1, 1.0)):
        hints = {  # what was returned, and what it is
            n * expected: "That is the speed-up: divide it by the number of processes.",
            1 / expected: "It is upside down: what was reached, over n times what one process reaches.",
            100 * expected: "That is a percentage: return a share, 1.0 for all of it.",
            300 * expected: "That is the rate of each process: divide it by the rate of one process alone.",
        }
        found = [hint for wrong, hint in hints.items() if isinstance(seen[n], float) and math.isclose(seen[n], wrong)]
        expect_close(seen[n], expected, f"the efficiency on {n} process(es)", hint=" ".join(found))


@exercise("1.4b", "float64 tells a bug from rounding.")
def exercise_1_4b(verdict: Callable[[list[float], list[float], list[float], list[float]], str]) -> None:
    """verdict(fp32, port32, fp64, port64), step losses of the reference and the port -> "same", "rounding" or "bug"."""
    fp32, fp64 = [2.4683871, 4.1011681, 3.8245499], [2.468387098127, 4.101168243981, 3.824550164072]
    tiny = [2.468387098127, 4.101168243982, 3.824550164075]
    for port32, port64, expected, why in (
        (list(fp32), list(fp64), "same", "all steps are equal"),
        ([2.4683873, 4.1012, 3.8311], tiny, "rounding", "in float64 nothing is left of the difference"),
        ([2.4683873, 4.15, 3.5], tiny, "rounding", "training may amplify rounding this far: see float64"),
        ([2.4683871, 4.1421, 3.9], [fp64[0], 4.142098, 3.899871], "bug",
         "the first step agrees, as it does where averaging was forgotten, but the second is off in float64 too"),
        ([2.4784, 4.1011681, 3.8245499], [2.478403, *fp64[1:]], "bug", "the first step is off in float64 too"),
        (list(fp32), [fp64[0], fp64[1] * (1 + 1e-7), fp64[2]], "bug", "1e-7 is more than rounding in float64 makes"),
        ([2.4683871, 4.1011681], fp64[:2], "bug", "a step is missing"),
    ):  # fmt: skip
        seen = verdict(list(fp32), port32, list(fp64), port64)
        if seen != expected:
            raise Wrong(
                f"for {port32} and in float64 {port64} against {fp32} and {fp64} you say {seen!r}, "
                f"expected {expected!r}: {why}"
            )


@exercise("1.4c", "every rank reaches the collective, one rank speaks.")
def exercise_1_4c(script: str | Path) -> None:
    """A script that prints "mean loss X" once, X being the mean of rank + 1 over all ranks."""
    printed = run_ranks(script, 3)
    lines = [[line for line in text.splitlines() if "mean loss" in line] for text in printed]
    if [len(of_a_rank) for of_a_rank in lines] != [1, 0, 0]:
        said = ", ".join(str(len(of_a_rank)) for of_a_rank in lines)
        raise Wrong(f"3 ranks print {said} lines with `mean loss`; expected one, from rank 0 alone")
    value = lines[0][0].split("mean loss")[1].strip()
    hint = "Is it the mean over ALL ranks?"
    if value in ("6.0", "3.0"):
        hint = "Divide the sum by the world size, whatever it is."
    expect_close(value, 2.0, "the mean loss of 3 ranks", hint=hint)


# --- Lesson 1.5: two nodes ------------------------------------------------------------------------------------------


@exercise("1.5a", "a node's ranks follow one another: rank = the processes on the nodes before it + local rank.")
def exercise_1_5a(answer: tuple[Callable, Callable]) -> None:
    """(place_of, rank_of), where processes[i] is the number of processes on node i:

    place_of(rank, processes) -> (node, local_rank), and rank_of(node, local_rank, processes) -> rank.
    """
    place_of, rank_of = answer
    for processes in ([2, 2], [4, 4, 4], [1, 1, 1], [4, 2, 8]):
        places = [(node, local_rank) for node, count in enumerate(processes) for local_rank in range(count)]
        for rank, (node, local_rank) in enumerate(places):
            # What is right only where all nodes have as many processes as the first, or as this one.
            for call, seen, expected, guesses in (
                (f"place_of({rank}, {processes})", place_of(rank, processes), (node, local_rank),
                 [divmod(rank, processes[0])]),
                (f"rank_of({node}, {local_rank}, {processes})", rank_of(node, local_rank, processes), rank,
                 [node * processes[0] + local_rank, node * processes[node] + local_rank]),
            ):  # fmt: skip
                if (tuple(seen) if isinstance(seen, list) else seen) != expected:
                    hint = "Node 0 has the first ranks, node 1 the next ones, and so on; all numbers count from 0."
                    if seen in guesses:
                        hint = "That is right where all nodes have equally many processes: add up the nodes before."
                    raise Wrong(f"{call} is {expected}; you say {seen!r}. {hint}")


def parse_torchrun(words: list[str]) -> argparse.Namespace:
    """torchrun's own reading of a command line. Raises Wrong with torchrun's message for one that it refuses."""
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise Wrong(f"return a list of strings, one a word, numbers too (str(8)); yours is {words!r}")
    if words[1:3] == ["-m", "torch.distributed.run"]:
        words = words[2:]
    elif words[:1] != ["torchrun"]:
        raise Wrong(f"the first word should be torchrun, and is {words[0]!r}" if words else "the list is empty")
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return get_args_parser().parse_args(words[1:])
    except SystemExit:
        raise Wrong(f"torchrun refuses it: {errors.getvalue().strip().rpartition('error: ')[2]}") from None


@exercise("1.5b", "the same command on every node: the agents settle between them who is who.")
def exercise_1_5b(node_command: Callable[[int, list[str], int, list[str]], list[str]]) -> None:
    """node_command(node, hosts, nproc, arguments) -> the words of the torchrun command for that node."""
    for hosts, nproc, arguments in ((["gpu-1", "gpu-2"], 8, ["--epochs", "5"]), (["a", "b", "c"], 1, ["--nnodes"])):
        answers = [node_command(node, list(hosts), nproc, list(arguments)) for node in range(len(hosts))]
        commands = [parse_torchrun(words) for words in answers]
        for node, (host, command) in enumerate(zip(hosts, commands, strict=True)):
            where = f"node {node} ({host}) of {hosts}"
            if command.standalone:
                raise Wrong("--standalone means this machine alone: with it every node trains by itself")
            if [command.training_script, *command.training_script_args] != ["train_ddp.py", *arguments]:
                seen = [command.training_script, *command.training_script_args]
                raise Wrong(f"torchrun's options, then train_ddp.py and {arguments}; on {where} that end is {seen}")
            for option, seen, expected in (
                ("--nnodes", command.nnodes, str(len(hosts))),
                ("--nproc-per-node", command.nproc_per_node, str(nproc)),
                ("--rdzv-backend", command.rdzv_backend, "c10d"),
            ):
                if seen != expected:
                    hint = ". (--node-rank and --master-addr are the older way: section 1)" if seen == "static" else ""
                    raise Wrong(
                        f"on {where}, {nproc} process(es) a node, {option} should be {expected}, and is {seen}{hint}"
                    )
            if command.rdzv_endpoint.partition(":")[0] != hosts[0]:
                hint = f"All meet at one place: --rdzv-endpoint {hosts[0]}:29500, on every node."
                raise Wrong(f"on {where} --rdzv-endpoint is {command.rdzv_endpoint or 'missing'}. {hint}")
        if len({command.rdzv_endpoint for command in commands}) > 1:
            raise Wrong(f"the nodes knock at several ports: {[command.rdzv_endpoint for command in commands]}")
        ids = [command.rdzv_id for command in commands]
        if len(set(ids)) > 1 or ids[0] == "none":
            hint = " (none where it is missing)" if "none" in ids else ""
            raise Wrong(f"one launch has one --rdzv-id, the same on every node; yours are {ids}{hint}")
