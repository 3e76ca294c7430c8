"""The exercise checks: `checks.exercise_N_M(answer)` is exercise M of chapter N.

In a lesson a check prints what is still wrong; with `strict=True`, as in the solutions, it raises AssertionError.
"""

import argparse
import contextlib
import copy
import functools
import io
import json
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch.distributed.run import get_args_parser
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shared import data, models


class Wrong(Exception):
    """An answer that is not right yet; the message tells the learner what was seen and what was expected."""


def exercise(number: str, praise: str) -> Callable:
    """Make a check of a function that raises Wrong, or the stub's NotImplementedError, for an answer not yet right."""

    def decorate(check: Callable) -> Callable:
        @functools.wraps(check)
        def run(answer, *, strict: bool = False) -> bool:
            try:
                check(answer)
            except NotImplementedError:
                problem = "not done yet: replace `raise NotImplementedError` above and run both cells again"
            except Wrong as error:
                problem = f"not right yet: {error}"
            except Exception as error:  # the learner's own code may raise anything
                problem = f"your code raised {type(error).__name__}: {error}"
            else:
                print(f"[OK] Exercise {number}: {praise}")
                return True
            if strict:
                raise AssertionError(f"Exercise {number}: {problem}")
            print(f"[  ] Exercise {number}: {problem}")
            return False

        return run

    return decorate


def expect_close(seen: float, expected: float, what: str, tolerance: float = 1e-6, hint: str = "") -> None:
    """Raise Wrong unless `seen` is a number within `tolerance` (relative) of `expected`."""
    try:
        seen = float(seen)
    except (TypeError, ValueError):
        raise Wrong(f"{what} should be a number, and is {seen!r}") from None
    if not math.isclose(seen, expected, rel_tol=tolerance, abs_tol=tolerance):
        raise Wrong(f"{what} is {seen:.6g}, expected {expected:.6g}. {hint}".strip())


def run_script(path: str | Path, nproc: int, *args: str, timeout: float = 120) -> list[str]:
    """Run a script with `nproc` ranks under torchrun, on CPUs, and return what each rank printed.

    Raises NotImplementedError where the script did, and Wrong with the end of its errors, or for a hang of `timeout`
    seconds.
    """
    if Path(path).is_file() and re.search(r"^raise NotImplementedError", Path(path).read_text(), flags=re.MULTILINE):
        raise NotImplementedError  # the stub as it was given: no need to start it
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as logs:
        # Each rank prints into a file of its own: in a common one their lines would run into each other.
        options = ["--standalone", "--nproc-per-node", str(nproc), "--redirects", "1", "--log-dir", logs]
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, str(path), *args],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        try:
            errors = process.communicate(timeout=timeout)[1]
        except BaseException as error:  # Ctrl-C too must leave nothing running
            # torchrun gives each rank a session of its own, so we look for its children rather than kill its group.
            for one in (*psutil.Process(process.pid).children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise Wrong(f"it hangs: no end after {timeout:.0f} s. Does every rank reach every collective?") from None
        output = [log.read_text() for log in sorted(Path(logs).glob("*/attempt_0/*/stdout.log"))]
    if "NotImplementedError" in errors:
        raise NotImplementedError
    if process.returncode != 0:
        lines = [line for line in errors.splitlines() if re.search(r"\w*(Error|Exception)\b.*: ", line)]
        raise Wrong(f"the script failed: {lines[0].strip() if lines else errors.strip()[-300:]}")
    return output


# --- Lesson 1.1: one process ---------------------------------------------------------------------------------------


@exercise("1.1", "a mean over samples, not a mean of means.")
def exercise_1_1(mean_loss: Callable[[list[float], list[int]], float]) -> None:
    """mean_loss(batch_means, batch_sizes) -> the mean loss over all samples."""
    hint = "Each batch's mean stands for as many samples as the batch holds: weight it by them."
    expect_close(mean_loss([1.0, 3.0], [4, 4]), 2.0, "the mean of two batches of 4 with means 1 and 3", hint=hint)
    expect_close(
        mean_loss([1.0, 3.0], [64, 5]), 79 / 69, "the mean of batches of 64 and 5 with means 1 and 3", hint=hint
    )
    expect_close(mean_loss([0.5, 2.0, 7.0], [10, 20, 0]), 1.5, "the mean where one batch is empty", hint=hint)


@exercise("1.2", "parts of a batch, added up, are the batch: the idea that all data parallelism rests on.")
def exercise_1_2(accumulate: Callable) -> None:
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
                    f"with parts of {sizes} the gradient is {ratio:.3f} times as long as the whole batch's. "
                    "backward() adds to .grad, so divide each part's SUM of losses by the size of the whole batch"
                )
        if len(calls) != len(sizes):  # the right gradient, but the whole batch was held at once
            raise Wrong(f"{len(sizes)} parts, and backward() ran {len(calls)} time(s): call it for each part by itself")


@exercise("1.3", "weights once and Adam's two moments: three times the weights.")
def exercise_1_3(checkpoint_bytes: Callable[[torch.nn.Module], int]) -> None:
    """checkpoint_bytes(model) -> the bytes of a checkpoint of the model and its Adam state, within 1 %."""
    for model in (models.MLP(), models.MLP(input_dim=64, hidden_dim=300).double()):
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        dtype = next(model.parameters()).dtype
        expect_close(
            checkpoint_bytes(model), file.tell(), f"the size for an MLP in {dtype}", tolerance=0.01,
            hint="Adam keeps two more tensors of each parameter's size; element_size() gives the bytes of one number.",
        )  # fmt: skip


# --- Lesson 1.2: ranks and collectives ------------------------------------------------------------------------------


@exercise("1.4", "2(N-1)/N times the gradients: less than twice, however many ranks.")
def exercise_1_4(bytes_sent: Callable[[torch.nn.Module, int], float]) -> None:
    """bytes_sent(model, world_size) -> bytes each rank sends in a ring all-reduce of the model's gradients."""
    frozen = models.MLP(input_dim=64, hidden_dim=32)
    frozen.layers[1].requires_grad_(False)
    for model, what in (
        (models.MLP(input_dim=64, hidden_dim=32), "an MLP"),
        (models.MLP(input_dim=64, hidden_dim=32).double(), "an MLP in float64"),
        (frozen, "an MLP whose first layer is frozen"),
    ):
        gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        for num_ranks, times in ((2, 1.0), (4, 1.5), (8, 1.75), (1, 0.0)):
            hint = f"The gradients have {gradients:,} bytes, and a ring of {num_ranks} sends {times:g} times as many."
            expect_close(
                bytes_sent(model, num_ranks), times * gradients, f"for {what} on {num_ranks} rank(s) the number",
                tolerance=1e-3, hint=hint,
            )  # fmt: skip


@exercise("1.5", "dealt like cards: no rank has to ask another one which samples are its own.")
def exercise_1_5(samples_of: Callable[[list[int], int, int, int, int], list[int]]) -> None:
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
                hint = "Yours is cut from the batch in one piece: deal the samples in turn, every world_size-th."
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


@exercise("1.6", "counts are added over the ranks, and divided once.")
def exercise_1_6(script: str | Path) -> None:
    """A file with global_accuracy(hits, samples) -> the accuracy over the samples of all ranks, on every rank."""
    if "raise NotImplementedError" in Path(script).read_text():
        raise NotImplementedError
    cases = [[[45, 50], [2, 10]], [[1, 4], [36, 36]]]
    with tempfile.TemporaryDirectory() as folder:
        caller = Path(folder) / "call.py"
        caller.write_text(CALL_GLOBAL_ACCURACY)
        run_script(caller, 2, str(script), folder, json.dumps(cases))
        answers = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    for case, ((hits0, samples0), (hits1, samples1)) in enumerate(cases):
        counts = f"where rank 0 has {hits0} of {samples0} right and rank 1 {hits1} of {samples1}"
        mean = (hits0 / samples0 + hits1 / samples1) / 2
        for rank in range(2):
            seen = answers[rank][case]
            hint = f"Right are {hits0 + hits1} of {samples0 + samples1}."
            if answers[0][case] != answers[1][case]:
                hint = "The ranks have different answers: all_reduce gives the sum to every rank."
            elif isinstance(seen, float) and math.isclose(seen, mean, rel_tol=1e-5):
                hint = "That is the mean of the ranks' accuracies, as if both had equally many samples: add the counts."
            expect_close(
                seen, (hits0 + hits1) / (samples0 + samples1), f"{counts}, the accuracy on rank {rank}", hint=hint
            )


# --- Lesson 1.3: DistributedDataParallel ----------------------------------------------------------------------------


@exercise("1.7", "the ranks' average is the mean over the global batch, an empty rank included.")
def exercise_1_7(local_loss: Callable[[torch.Tensor, int, int], torch.Tensor]) -> None:
    """local_loss(this rank's losses, global count, world size) -> what the rank calls backward() on."""
    for num_samples, world_size in ((8, 2), (7, 2), (7, 4), (1, 2)):
        losses = torch.arange(1, num_samples + 1, dtype=torch.float64).square().requires_grad_()
        shards = [losses[rank::world_size] for rank in range(world_size)]
        dealt = " + ".join(str(len(shard)) for shard in shards)
        where = f"with {num_samples} samples dealt {dealt}, the ranks' average"
        shares = [local_loss(shard, num_samples, world_size) for shard in shards]
        for rank, share in enumerate(shares):
            if not (isinstance(share, torch.Tensor) and share.dim() == 0 and share.requires_grad):
                raise Wrong(
                    "return one number a rank, as a tensor that backward() can be called on; "
                    f"with {num_samples} samples dealt {dealt}, rank {rank} has {share!r}"
                )
        average, mean = sum(shares).item() / world_size, losses.mean().item()
        if math.isnan(average):
            raise Wrong(f"{where} is not a number: the mean of no samples is 0 / 0. Use a sum")
        hint = "Divide the sum of this rank's losses by the global count."
        if math.isclose(average * world_size, mean):
            hint = "DDP divides by the world size: multiply by it."
        expect_close(average, mean, where, hint=hint)
        (gradient,) = torch.autograd.grad(sum(shares) / world_size, losses)
        if not torch.allclose(gradient, torch.full_like(gradient, 1 / num_samples)):
            raise Wrong(f"{where} is right, its gradient is not: compute with `losses` itself, not with a copy")


@exercise("1.8", "one order for all ranks, a new one each epoch, and every sample has one owner.")
def exercise_1_8(my_samples: Callable[[int, int, int, int, int], list[int]]) -> None:
    """my_samples(num_samples, world_size, rank, seed, epoch) -> the samples of this rank in this epoch."""

    def ask(num_samples: int, world_size: int, rank: int, seed: int, epoch: int) -> list[int]:
        answer = my_samples(num_samples, world_size, rank, seed, epoch)
        try:
            return [int(index) for index in answer]
        except TypeError:
            raise Wrong(f"return a list of sample numbers, not {answer!r}") from None

    if ask(40, 2, 0, 7, 1) != ask(40, 2, 0, 7, 1):
        raise Wrong("asked twice for the same epoch, it gives two orders: give torch.randperm a generator with a seed")
    for num_samples, world_size in ((40, 2), (40, 4), (11, 4)):
        for epoch in (0, 1):
            shards = [ask(num_samples, world_size, rank, 7, epoch) for rank in range(world_size)]
            dealt = [index for shard in shards for index in shard]
            missing, extra = num_samples - len(set(dealt)), len(dealt) - len(set(dealt))
            if sorted(dealt) == list(range(num_samples)):
                continue
            seen = f"with {num_samples} samples and {world_size} ranks"
            if missing == 0:
                raise Wrong(f"{seen} {extra} sample(s) go to two ranks: no padding, ranks may differ by one sample")
            if extra == 0:
                raise Wrong(f"{seen} {missing} sample(s) go to no rank: start at `rank`, take every `world_size`-th")
            raise Wrong(
                f"{seen} {missing} sample(s) go to no rank and {extra} are dealt twice. All ranks must draw the same "
                "order: its seed must not depend on the rank"
            )
    first, second = ask(40, 2, 0, 7, 0), ask(40, 2, 0, 7, 1)
    if first == second:
        raise Wrong("epoch 1 has the same order as epoch 0: let the epoch be part of the generator's seed")
    if first == ask(40, 2, 0, 8, 0):
        raise Wrong("seeds 7 and 8 give the same order in epoch 0: let `seed` be part of it in every epoch")
    if set(first) == set(second):
        raise Wrong("rank 0 has the same samples in both epochs, only in another order: shuffle first, then deal")


@exercise("1.9", "a new order each epoch, and one accuracy that all ranks agree on.")
def exercise_1_9(script: str | Path) -> None:
    """A script for 2 ranks that writes its orders and its accuracy to FOLDER/rank-R.json."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_script(script, 2, folder, timeout=120)
        except Wrong as error:
            if re.search("[Cc]onnection|[Tt]imed out|timeout|[Bb]roken pipe", str(error)):
                raise Wrong(f"{error} One rank waited for another. Is there a collective inside an `if`?") from None
            raise
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
        raise Wrong("both epochs have the same order: call sampler.set_epoch(epoch) before each")
    own = [sum(report["right"]) / len(report["right"]) for report in reports]
    mean = sum(sum(report["right"]) for report in reports) / sum(len(report["right"]) for report in reports)
    for rank, report in enumerate(reports):
        hint = "Add up hits and samples over all ranks, and divide once."
        if math.isclose(report["accuracy"], own[rank], rel_tol=1e-6):
            hint = "That is the accuracy on this rank's own part. " + hint
        elif math.isclose(report["accuracy"], sum(own) / 2, rel_tol=1e-6):
            hint = "That is the mean of the ranks' accuracies, and they have 128 and 127 images. " + hint
        expect_close(report["accuracy"], mean, f"the accuracy that rank {rank} reports", hint=hint)


# --- Lesson 1.4: torchrun -------------------------------------------------------------------------------------------


@exercise("1.10", "the share of n times one process that was reached.")
def exercise_1_10(efficiency: Callable[[dict[int, float]], dict[int, float]]) -> None:
    """efficiency({processes: samples per second}) -> {processes: share of the ideal}."""
    seen = efficiency({1: 300.0, 2: 480.0, 4: 900.0})
    if not isinstance(seen, dict) or sorted(seen) != [1, 2, 4]:
        raise Wrong(f"return a dict with the same keys, 1, 2 and 4; yours is {seen!r}")
    for n, expected in {1: 1.0, 2: 0.8, 4: 0.75}.items():
        hint = "That is the speed-up: divide it by the number of processes." if n > 1 else ""
        expect_close(seen[n], expected, f"the efficiency of {n} processes", hint=hint)


@exercise("1.11", "float64 tells a bug from rounding.")
def exercise_1_11(verdict: Callable[[list[float], list[float], list[float], list[float]], str]) -> None:
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


@exercise("1.12", "every rank reaches the collective, one rank speaks.")
def exercise_1_12(script: str | Path) -> None:
    """A script that prints "mean loss X" once, X being the mean of rank + 1 over all ranks."""
    lines = [[line for line in text.splitlines() if "mean loss" in line] for text in run_script(script, 3)]
    if [len(of_a_rank) for of_a_rank in lines] != [1, 0, 0]:
        said = ", ".join(str(len(of_a_rank)) for of_a_rank in lines)
        raise Wrong(f"3 ranks print {said} lines with `mean loss`; expected one, from rank 0 alone")
    value = lines[0][0].split("mean loss")[1].strip()
    hint = "Is it the mean over ALL ranks?"
    if value in ("6.0", "3.0"):
        hint = "Divide the sum by the world size, whatever it is."
    expect_close(value, 2.0, "the mean loss of 3 ranks", hint=hint)


# --- Lesson 1.5: two nodes ------------------------------------------------------------------------------------------


@exercise("1.13", "a node's ranks follow one another: rank = the processes on the nodes before it + local rank.")
def exercise_1_13(answer: tuple[Callable, Callable]) -> None:
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


@exercise("1.14", "the same command on every node: the agents settle between them who is who.")
def exercise_1_14(node_command: Callable[[int, list[str], int, list[str]], list[str]]) -> None:
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
                    raise Wrong(f"on {where}, {nproc} processes a node, {option} should be {expected}, and is {seen}")
            if command.rdzv_endpoint.partition(":")[0] != hosts[0]:
                hint = f"All meet at one place: --rdzv-endpoint {hosts[0]}:29500, on every node."
                raise Wrong(f"on {where} --rdzv-endpoint is {command.rdzv_endpoint or 'missing'}. {hint}")
        if len({command.rdzv_endpoint for command in commands}) > 1:
            raise Wrong(f"the nodes knock at several ports: {[command.rdzv_endpoint for command in commands]}")
        ids = [command.rdzv_id for command in commands]
        if len(set(ids)) > 1 or ids[0] == "none":
            raise Wrong(f"one launch has one --rdzv-id, the same on every node; yours are {ids}")


# --- Lesson 2.1: Ray Train -------------------------------------------------------------------------------------------


@exercise("2.1", "the scale stands outside of the training function: more workers are another number.")
def exercise_2_1(plan: Callable) -> None:
    """plan(num_workers, num_gpus, global_batch) -> (ScalingConfig, {"batch_size": each worker's part})."""
    from ray.train import ScalingConfig  # takes seconds to import

    for num_workers, num_gpus, global_batch in ((4, 0, 64), (4, 4, 64), (4, 2, 128), (1, 1, 32), (2, 8, 10)):
        call = f"plan({num_workers}, {num_gpus}, {global_batch})"
        answer = plan(num_workers, num_gpus, global_batch)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], ScalingConfig)):
            raise Wrong(f"{call} should return a ScalingConfig and a dict; yours is {answer!r}")
        scaling_config, config = answer
        if scaling_config.num_workers != num_workers:
            raise Wrong(f"{call} asks for {scaling_config.num_workers} workers, expected {num_workers}")
        if bool(scaling_config.use_gpu) != (num_gpus >= num_workers):
            hint = "Each worker takes a GPU of its own: use them if there are as many as workers, and only then."
            raise Wrong(f"in {call} use_gpu is {scaling_config.use_gpu}, expected {num_gpus >= num_workers}. {hint}")
        if not isinstance(config, dict) or "batch_size" not in config:
            raise Wrong(f'{call} should return a train_loop_config with a "batch_size"; yours is {config!r}')
        if isinstance(config["batch_size"], float):
            raise Wrong(f"in {call} each worker's batch is {config['batch_size']}: a DataLoader takes an int; use //")
        hint = "That is the global batch: each worker takes its part." if config["batch_size"] == global_batch else ""
        expect_close(config["batch_size"], global_batch // num_workers, f"in {call} each worker's batch", hint=hint)
    try:
        answer = plan(3, 0, 64)
    except ValueError:
        return
    raise Wrong(f"plan(3, 0, 64) returns {answer[1]!r}: 64 does not divide by 3, so raise a ValueError")


@exercise("2.2", "every epoch has its order, on one worker and on many.")
def exercise_2_2(start_epoch: Callable) -> None:
    """start_epoch(loader, epoch) tells the loader's sampler which epoch begins, where it can be told."""
    dataset = TensorDataset(torch.arange(8))
    for sampler, whose in (
        (DistributedSampler(dataset, 2, 0), "Ray's own sampler, a DistributedSampler"),
        (data.UnpaddedDistributedSampler(dataset, 1, 0), "our own sampler on one worker"),
        (None, "the loader of one worker without a sampler of ours"),
    ):
        loader = DataLoader(dataset, 2, shuffle=sampler is None, sampler=sampler)
        for epoch in (1, 2):
            try:
                start_epoch(loader, epoch)
            except AttributeError as error:
                raise Wrong(f"with {whose} it raises: {error}. Ask first what kind of sampler it is") from None
            if sampler is not None and sampler.epoch != epoch:
                raise Wrong(f"with {whose} it should be epoch {epoch}, and is {sampler.epoch}: call its set_epoch")
            if len([batch for batch in loader]) != len(loader):
                raise Wrong(f"with {whose} the loader no longer gives its {len(loader)} batches")


@exercise("2.3", "the newest checkpoint is for resuming, the best one for using.")
def exercise_2_3(best_weights: Callable) -> None:
    """best_weights(result) -> the state dict of the checkpoint with the highest val_accuracy."""
    from ray.train import Checkpoint, Result  # takes seconds to import

    for accuracies in ([0.80, 0.95, 0.90], [0.97, 0.60, 0.70], [0.50, 0.60, 0.99]):
        best = accuracies.index(max(accuracies)) + 1
        with tempfile.TemporaryDirectory() as storage:
            pairs = []
            for epoch, accuracy in enumerate(accuracies, start=1):
                folder = Path(storage, f"checkpoint_{epoch}")
                folder.mkdir()
                torch.save({"weight": torch.full((2, 2), float(epoch))}, folder / "model.pt")
                # The loss, as it sometimes does, is lowest elsewhere.
                metrics = {"epoch": epoch, "val_loss": 1 / epoch, "val_accuracy": accuracy}
                pairs.append((Checkpoint.from_directory(folder), metrics))
            newest, metrics = pairs[-1]
            weights = best_weights(Result(metrics, newest, None, storage, best_checkpoints=pairs))
        where = f"where the epochs reached {', '.join(f'{accuracy:.2f}' for accuracy in accuracies)}"
        if not isinstance(weights, dict) or "weight" not in weights:
            kind = type(weights).__name__
            raise Wrong(f"{where}, it should return what torch.load gives, a state dict; yours is a {kind}")
        seen = int(weights["weight"][0, 0])
        if seen != best:
            hint = "That is the newest one." if seen == len(accuracies) else ""
            raise Wrong(
                f"{where}, these are the weights of epoch {seen}, expected those of epoch {best}. {hint}".strip()
            )


# --- Lesson 2.2: nothing changed but the launcher --------------------------------------------------------------------


@exercise("2.4", "a start-up is paid once, a rate with every sample.")
def exercise_2_4(break_even: Callable) -> None:
    """break_even((startup_s, rate), (startup_s, rate)) -> samples from which on the second is done no later."""
    for plain, cluster, expected, why in (
        # Powers of two are exact in floating point: an answer that is rounded up is as good.
        ((5.0, 128.0), (30.0, 256.0), 6400, "after 6,400 samples both are done at 55 s"),
        ((5.0, 64.0), (29.0, 128.0), 3072, "after 3,072 samples both are done at 53 s"),
        ((5.0, 100.0), (30.0, 100.0), math.inf, "at the same rate it never makes up for its start"),
        ((5.0, 100.0), (30.0, 80.0), math.inf, "it starts later and is slower: it never catches up"),
        ((30.0, 100.0), (5.0, 200.0), 0, "it is ahead from the start, and stays ahead"),
        ((5.0, 100.0), (5.0, 100.0), 0, "both are equal, so it is never behind"),
        ((30.0, 200.0), (5.0, 100.0), math.inf, "it begins sooner, but in the end it is always behind"),
    ):
        call = f"break_even({plain}, {cluster})"
        try:
            seen = break_even(plain, cluster)
        except ZeroDivisionError:
            raise Wrong(f"{call} divides by zero. Expected {expected}: {why}") from None
        expect_close(seen, expected, call, hint=f"See: {why}.")


STACKS = {
    "validation": (
        [
            ["all_reduce (torch/distributed.py:90)", "global_sum (shared.py:31)", "evaluate (train.py:80)"],
            ["wait (torch/work.py:12)", "all_reduce (torch/distributed.py:90)", "evaluate (train.py:80)"],
            ["read (socket.py:700)", "get (requests.py:5)", "log_to_server (train.py:95)", "main (train.py:20)"],
            ["evaluate (train.py:80)", "main (train.py:20)"],
        ],
        [2],
    ),
    "the first rank": (
        [
            ["sleep (train.py:51)", "train_epoch (train.py:40)"],
            ["backward (torch/autograd.py:8)", "train_epoch (train.py:44)", "main (train.py:21)"],
            ["wait (torch/work.py:12)", "backward (torch/autograd.py:8)", "train_epoch (train.py:44)"],
            ["wait (torch/work.py:12)", "backward (torch/autograd.py:8)", "train_epoch (train.py:44)"],
        ],
        [0],
    ),
    "all at one place": (
        [[f"step_{depth} (torch/x.py:{depth})" for depth in range(rank)] + ["save (train.py:99)"] for rank in range(4)],
        [],
    ),
    "another line of the same function": (
        [
            *([["wait (torch/work.py:12)", "train_epoch (train.py:44)"]] * 3),
            ["wait (torch/work.py:12)", "train_epoch (train.py:47)"],
        ],
        [3],
    ),
    "two of six": ([["x (train.py:7)"], *([["y (torch/y.py:1)", "z (train.py:9)"]] * 4), ["x (train.py:7)"]], [0, 5]),
}


@exercise("2.5", "look at the rank that is somewhere else.")
def exercise_2_5(odd_ranks: Callable) -> None:
    """odd_ranks({rank: frames, innermost first}) -> the ranks at another place in train.py than most."""
    for name, (stacks, expected) in STACKS.items():
        seen = odd_ranks({rank: list(frames) for rank, frames in enumerate(stacks)})
        try:
            seen = list(seen)
        except TypeError:
            raise Wrong(f"return a list of ranks, not {seen!r}") from None
        if seen != expected:
            places = [next(frame for frame in frames if "train.py" in frame) for frames in stacks]
            hint = "Compare only each rank's innermost frame in train.py, with its line number."
            if sorted(seen, key=str) == expected:
                hint = "Sort them."
            raise Wrong(f"in train.py the ranks stand at {', '.join(places)} ({name}): expected {expected}, "
                        f"you say {seen}. {hint}")  # fmt: skip


# --- Lesson 2.3: Ray Data --------------------------------------------------------------------------------------------


@exercise("2.6", "a transform that changes what it should, and nothing else.")
def exercise_2_6(transform: Callable) -> None:
    """transform(seed, largest) makes a callable that takes a batch with its images shifted sideways at random."""
    ids, images = np.arange(40), np.random.default_rng(0).random((40, 8, 8), dtype=np.float32)
    batch = {"id": ids, "image": images, "label": ids % 10}
    for array in batch.values():
        array.flags.writeable = False  # as Ray Data hands them over: they lie in memory that others read too
    before = images.copy()
    shift = transform(7, 2)
    try:
        first, second = shift(dict(batch)), shift(dict(batch))
    except ValueError as error:
        if "read-only" not in str(error):
            raise
        raise Wrong("it writes into the batch it was given, which others read too: make a new array") from None
    for answer in (first, second):
        if not isinstance(answer, dict) or set(answer) != set(batch):
            seen = sorted(answer) if isinstance(answer, dict) else type(answer).__name__
            raise Wrong(f"return a batch with the columns id, image and label; yours is {seen}. See {{**batch, ...}}")
        if not (np.array_equal(answer["id"], ids) and np.array_equal(answer["label"], ids % 10)):
            raise Wrong("ids and labels should come out as they went in")
        seen = np.asarray(answer["image"])
        if seen.shape != images.shape or seen.dtype != np.float32:
            raise Wrong(f"the images should be float32 of shape {images.shape}, and are {seen.dtype} of {seen.shape}")
    if not np.array_equal(images, before):
        raise Wrong("the batch it was given has changed: make a new array")
    choices = [np.roll(before, columns, axis=2) for columns in range(-2, 3)]

    def shifts(answer: dict) -> list[int]:
        fits = [[np.array_equal(choice[i], answer["image"][i]) for choice in choices] for i in range(len(ids))]
        for i, fit in enumerate(fits):
            if not any(fit):
                raise Wrong(f"image {i} is not the original moved by -2 to 2 columns: np.roll(image, columns, axis=1)")
        return [fit.index(True) - 2 for fit in fits]

    columns = shifts(first)
    if len(set(columns)) == 1:
        raise Wrong(f"all images of a batch are moved by {columns[0]}: draw a number for each image")
    if set(columns) != set(range(-2, 3)):
        raise Wrong(f"40 images are moved by {sorted(set(columns))} columns only, expected everything from -2 to 2")
    if shifts(second) == columns:
        raise Wrong("the second batch is moved just like the first: make the generator once, in __init__")
    if shifts(transform(7, 2)(dict(batch))) != columns:
        raise Wrong("made again with the same seed, it moves the images otherwise: give the generator that seed")


@exercise("2.7", "all ranks go on until the last one has no rows left.")
def exercise_2_7(plan_steps: Callable[[list[int], int], list[list[int]]]) -> None:
    """plan_steps(rows of each rank, batch size of a rank) -> for each step, the rows that each rank brings."""
    for rows, batch_size in (([8, 8], 4), ([10, 7], 4), ([9, 0], 4), ([3, 12, 5], 4), ([0, 0], 4), ([1], 32)):
        steps = -(-max(rows) // batch_size)
        expected = [[min(max(n - step * batch_size, 0), batch_size) for n in rows] for step in range(steps)]
        answer = plan_steps(list(rows), batch_size)
        try:
            seen = [[int(n) for n in step] for step in answer]
        except TypeError:
            raise Wrong(f"return a list of steps, each a list with one number a rank; yours is {answer!r}") from None
        if seen != expected:
            dealt = sum(sum(step) for step in seen)
            hint = "A rank whose rows are used up brings 0."
            if len(seen) < len(expected):
                hint = f"{dealt} of {sum(rows)} rows are used: a rank that is done goes on with empty batches."
            elif any(len(step) != len(rows) for step in seen):
                hint = "Every rank takes part in every step, if only with 0 rows: all-reduce waits for all."
            raise Wrong(f"with {rows} rows in batches of {batch_size} it is {expected}; you say {seen}. {hint}")


# --- Lesson 2.4: checkpoints and resuming ----------------------------------------------------------------------------


@exercise("2.8", "the best ones to use, the newest one to go on from.")
def exercise_2_8(kept_reports: Callable[[list[float], int, str | None], list[int]]) -> None:
    """kept_reports(scores, num_to_keep, order) -> numbers of the reports whose checkpoints are kept, sorted."""
    for scores, num_to_keep, order, expected in (
        ([0.5, 0.9, 0.8, 0.6], 2, "max", [1, 2, 3]),
        ([0.5, 0.9, 0.8, 0.95], 2, "max", [1, 3]),
        ([0.5, 0.9, 0.8, 0.6], 2, "min", [0, 3]),
        ([0.5, 0.9, 0.8, 0.6], 2, None, [2, 3]),
        ([0.7, 0.4, 0.2], 1, "max", [0, 2]),
        ([0.7], 3, "max", [0]),
    ):
        call = f"kept_reports({scores}, {num_to_keep}, {order!r})"
        answer = kept_reports(list(scores), num_to_keep, order)
        try:
            seen = sorted(int(number) for number in answer)
        except TypeError:
            raise Wrong(f"{call} should return a list of numbers; yours is {answer!r}") from None
        if seen != expected:
            hint = ""
            ranking = sorted(range(len(scores)), key=lambda number: scores[number])
            if len(scores) - 1 not in seen:
                hint = "The newest is always kept: a run that fails goes on from it."
            elif order is None:
                hint = "Without a score the newest are kept."
            elif order == "min" and seen == sorted({*ranking[-num_to_keep:], len(scores) - 1}):
                hint = 'With order="min" the lowest scores are the best.'
            raise Wrong(f"{call} is {expected}; you say {seen}. {hint}".strip())


@exercise("2.9", "a file that fits is loaded, one that does not is refused.")
def exercise_2_9(load_weights: Callable[[torch.nn.Module, str], torch.nn.Module]) -> None:
    """load_weights(model, path) -> the model with the weights of a file from the bare model or its DDP wrapper."""

    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.head = models.MLP(input_dim=64, hidden_dim=8, dropout=0.5), torch.nn.Linear(10, 2)

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.pt"
        for make, what in (
            (lambda: models.MLP(input_dim=64, hidden_dim=8, dropout=0.5), "an MLP"),
            (Nested, "a model that has a part called `module`"),
        ):
            trained = make()
            for prefix, saved in (("", "the bare model"), ("module.", "its DDP wrapper")):
                if isinstance(trained, Nested) and not prefix:
                    continue  # "module." is ambiguous there: no function could know
                torch.save({prefix + name: value for name, value in trained.state_dict().items()}, path)
                fresh = make()
                try:
                    loaded = load_weights(fresh, path)
                except NotImplementedError:  # which is a RuntimeError too
                    raise
                except RuntimeError as error:
                    line = str(error).splitlines()[-1].strip()
                    raise Wrong(f"for {what}, saved from {saved}, it raises: {line}") from None
                if not isinstance(loaded, torch.nn.Module):
                    raise Wrong(f"return the model; yours returns {type(loaded).__name__}")
                state = loaded.state_dict()
                if any(not torch.equal(state[name], value) for name, value in trained.state_dict().items()):
                    raise Wrong(f"for {what}, saved from {saved}, the weights are not the file's. Was it strict?")
                if loaded.training:
                    raise Wrong("the model is in training mode, where dropout drops neurons: call eval()")
        torch.save(torch.nn.Linear(3, 3).state_dict(), path)
        try:
            load_weights(models.MLP(input_dim=64, hidden_dim=8), path)
        except (RuntimeError, ValueError, KeyError):
            pass
        else:
            raise Wrong("a file of another model was taken without a word: leave strict=True as it is")
        witness = Path(folder, "witness")
        with open(path, "wb") as file:
            pickle.dump(Intruder(str(witness)), file, protocol=2)
        with contextlib.suppress(Exception):
            load_weights(models.MLP(input_dim=64, hidden_dim=8), path)
        if witness.exists():
            raise Wrong("a file from elsewhere could run code in your process: load it with weights_only=True")


class Intruder:
    """What an attacker puts into a pickle file: reading it opens `path` for writing."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


# --- Lesson 3.1: where memory goes -----------------------------------------------------------------------------------


@exercise("3.1", "what is not trained costs its weights, and no more.")
def exercise_3_1(fine_tuning_bytes: Callable[[int, int, str, int], float]) -> None:
    """fine_tuning_bytes(frozen, trainable, strategy, gpus) -> bytes of state a rank keeps, in mixed precision."""
    state = {"DDP": (16, 0), "ZeRO-1": (4, 12), "ZeRO-2": (2, 14), "FSDP": (0, 16)}
    for frozen, trainable in ((0, 1_024_000), (6_400_000, 0), (6_400_000, 1_024_000)):
        for gpus in (1, 8, 1024):
            for strategy, (whole, shared_out) in state.items():
                call = f"fine_tuning_bytes({frozen}, {trainable}, {strategy!r}, {gpus})"
                of_frozen = 2 * frozen / (gpus if strategy == "FSDP" else 1)
                expected = of_frozen + trainable * (whole + shared_out / gpus)
                seen = fine_tuning_bytes(frozen, trainable, strategy, gpus)
                hint = f"Trainable parameters: {whole} bytes each, and {shared_out}/{gpus} as a share."
                if frozen:
                    hint = "A frozen parameter has a weight of 2 bytes: no gradient, no master copy, no moments."
                    if strategy == "FSDP" and gpus > 1:
                        hint = "FSDP shards every weight, a frozen one too."
                    elif gpus > 1:
                        hint = f"{strategy} shards no weights, so every rank keeps the frozen ones whole."
                expect_close(seen, expected, call, hint=hint)


@exercise("3.2", "two measurements, and no run that dies in the night.")
def exercise_3_2(largest_batch: Callable[[Callable[[int], int], int], int]) -> None:
    """largest_batch(needed, limit) -> the largest batch with needed(batch) <= limit, in three calls of needed."""
    for fixed, sequence, limit in (
        (16_000, 2_000, 60_000),
        (16_000, 2_000, 61_999),
        (1_000, 7_000, 50_000),
        (0, 3_000, 10_000),
        (16_000, 2_000, 18_000),
        (16_000, 2_000, 17_999),
        (90_000, 5_000, 40_000),
    ):
        calls = []

        def needed(batch: int, fixed: int = fixed, sequence: int = sequence, calls: list = calls) -> int:
            if batch < 1 or batch != int(batch):
                raise Wrong(f"you measure a batch of {batch}: a step needs at least one sequence, and whole ones")
            calls.append(batch)
            if len(calls) > 3:
                raise Wrong(f"you measure the batches {calls}: each is a run, and three are the most. It is a line")
            return fixed + sequence * int(batch)

        what = f"with {fixed:,} bytes of state and {sequence:,} a sequence, in {limit:,} bytes,"
        expected = max(0, (limit - fixed) // sequence)
        seen = largest_batch(needed, limit)
        if isinstance(seen, bool) or not isinstance(seen, int | float) or seen != int(seen):
            raise Wrong(f"{what} you say {seen!r}: return a whole number of sequences")
        if seen != expected:
            hint = "Where not even one sequence fits, it is 0."
            if expected and seen * sequence + fixed > limit:
                hint = f"That needs {seen * sequence + fixed:,.0f}. Something is there before the first sequence."
            elif expected:
                hint = "More would fit. needed(1) holds the state too, which a second sequence does not need again."
            raise Wrong(f"{what} {expected} fit; you say {seen}. {hint}")


@exercise("3.3", "each storage once, where it is first saved.")
def exercise_3_3(saved_by_stage: Callable[[torch.nn.Module, torch.Tensor], dict[str, float]]) -> None:
    """saved_by_stage(model, images) -> {child: bytes an image that autograd saves in it, parameters apart}."""
    for size, pixels in ((2, 8), (3, 16)):
        model = models.resnet18()
        children = [name for name, _ in model.named_children()]
        images = torch.randn(size, 1, pixels, pixels)
        seen = saved_by_stage(model, images)
        if not isinstance(seen, dict) or not set(children) >= set(seen):
            keys = list(seen) if isinstance(seen, dict) else type(seen).__name__
            raise Wrong(f"return a dict with the children's names, {', '.join(children)}; yours is {keys}")
        if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
            raise Wrong("there are hooks left on the model: call remove() on every handle")
        expected = bytes_saved_by_child(model, images)
        if not any(seen.values()):
            raise Wrong("nothing was saved at all: run the model with gradients enabled, inside the `with` block")
        for name in children:
            hint = "Is each storage counted once, for the child that saves it first?"
            total, right = sum(seen.values()), sum(expected.values())
            if math.isclose(total, size * right, rel_tol=0.01):
                hint = f"Divide by the {size} images."
            elif math.isclose(seen.get("fc", 0), right, rel_tol=0.01):
                hint = "Take what a child adds, not all that there is by then."
            elif total > right + 1e6:
                hint = "Parameters, 45 MB of them, are not activations: leave their storages out."
            what = f"{name} on images of {pixels}x{pixels}, in bytes an image,"
            expect_close(seen.get(name, 0), expected[name], what, 0.01, hint)


def bytes_saved_by_child(model: torch.nn.Module, images: torch.Tensor) -> dict[str, float]:
    """Bytes an image of the storages that autograd saves, by the child of `model` that saves them first."""
    apart = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    current, owners, sizes = [""], {}, {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        owners.setdefault(storage._cdata, current[0])
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    def enter(name: str) -> Callable:
        return lambda *_: current.__setitem__(0, name)

    handles = [child.register_forward_pre_hook(enter(name)) for name, child in model.named_children()]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(images)  # kept: what it holds is not freed, so no storage takes another's place
    for handle in handles:
        handle.remove()
    del output
    saved = dict.fromkeys((name for name, _ in model.named_children()), 0.0)
    for storage in set(owners) - apart:
        saved[owners[storage]] += sizes[storage] / len(images)
    return saved


# --- Lesson 3.2: FSDP2 -----------------------------------------------------------------------------------------------


@exercise("3.4", "whole rows, as many as rank 0 has until none are left.")
def exercise_3_4(slice_bytes: Callable[[tuple[int, ...], torch.dtype, int, int], int]) -> None:
    """slice_bytes(shape, dtype, world_size, rank) -> bytes of this rank's slice of a parameter of that shape."""
    for shape, dtype, world_size in (
        ((384, 128), torch.float32, 2), ((5, 8), torch.float32, 4), ((10,), torch.float64, 4),
        ((50257, 768), torch.bfloat16, 8),
    ):  # fmt: skip
        row = math.prod(shape[1:]) * dtype.itemsize
        expected = [row * len(rows) for rows in torch.empty(shape[0]).chunk(world_size)]
        expected += [0] * (world_size - len(expected))
        seen = [slice_bytes(shape, dtype, world_size, rank) for rank in range(world_size)]
        if not all(isinstance(each, int | float) for each in seen):
            raise Wrong(f"return a number of bytes, not {seen[0]!r}")
        if seen == expected:
            continue
        hint, size = "", sum(expected)
        if all(math.isclose(each, size / world_size) for each in seen):
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
from shared import data, distributed, measure, models

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
images, labels = data.digits().train[:8]
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


@exercise("3.5", "half of the state on each rank, and never more than one block gathered.")
def exercise_3_5(script: str | Path) -> None:
    """A file with shard(model), which shards a ResNet-18 in place, block by block."""
    if "raise NotImplementedError" in Path(script).read_text():
        raise NotImplementedError
    with tempfile.TemporaryDirectory() as folder:
        caller = Path(folder) / "call.py"
        caller.write_text(SHARD_RESNET)
        try:
            run_script(caller, 2, str(script), folder, timeout=120)
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


@exercise("3.6", "every micro-batch gathers, and only the last one reduces.")
def exercise_3_6(collectives: Callable[[int, int, bool, bool], tuple[int, int]]) -> None:
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


# --- Lesson 3.3: DeepSpeed ZeRO --------------------------------------------------------------------------------------

BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@exercise("3.7", "two numbers are chosen, the third follows, and nobody can contradict them.")
def exercise_3_7(fill_in: Callable[[dict, int, int, int], dict]) -> None:
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


@exercise("3.8", "you know what DeepSpeed keeps, and when.")
def exercise_3_8(kept_bytes: Callable[[int, str, int, bool], float]) -> None:
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
    """The loss scale that each step uses, by the rule of exercise 3.9; `fault`: with one mistake in it."""
    used, good, patience = [], 0, hysteresis
    for overflow in overflows:
        used.append(scale)
        if overflow:
            good = good if fault == "count" else 0
            if patience > 1 and fault != "patience":
                patience -= 1
            else:
                scale = scale / 2 if fault == "minimum" else max(scale / 2, minimum)
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
    "renew": "A doubling renews the patience.",
    "forever": "After a doubling the count of good steps starts again.",
    "late": "That is the scale after each step: note it before you change it.",
}


@exercise("3.9", "as high as it goes, and no step is taken with a gradient that isn't one.")
def exercise_3_9(scales: Callable[[list[bool], float, int, int, float], list[float]]) -> None:
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


# --- Lesson 3.4: choosing --------------------------------------------------------------------------------------------


@exercise("3.10", "the least that fits.")
def exercise_3_10(choose: Callable[[float, int, float, float], str | None]) -> None:
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


@exercise("3.11", "accumulation is free of traffic for DDP, and not for FSDP2.")
def exercise_3_11(bytes_sent: Callable[[str, int, int, int], float]) -> None:
    """bytes_sent(strategy, num_parameters, num_gpus, accumulation) -> bytes that a rank sends for an optimizer step."""
    for strategy, parameters, gpus, accumulation in (
        ("ddp", 1_000_000, 2, 1), ("ddp", 1_000_000, 8, 4), ("fsdp2", 1_000_000, 2, 1), ("fsdp2", 1_000_000, 8, 4),
        ("ddp", 1_000_000, 1, 1),
    ):  # fmt: skip
        ring = 4 * parameters * (gpus - 1) / gpus
        expected = 2 * ring if strategy == "ddp" else 3 * ring * accumulation
        seen = bytes_sent(strategy, parameters, gpus, accumulation)
        hint = ""
        if accumulation > 1:
            hint = "no_sync: one all-reduce a step." if strategy == "ddp" else "It gathers and reduces each time."
        elif gpus == 1:
            hint = "One GPU has nobody to send to."
        elif seen == expected * gpus / (gpus - 1):
            hint = "A rank does not send its own part: (N-1)/N."
        call = f'bytes_sent("{strategy}", {parameters}, {gpus}, {accumulation})'
        expect_close(seen, expected, call, hint=hint)
