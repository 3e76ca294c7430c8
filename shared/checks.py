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


def run_script(path: str | Path, nproc: int, *args: str, timeout: float = 60) -> str:
    """Run a script with `nproc` ranks under torchrun, on CPUs, and return what it printed, rank after rank.

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
        output = "".join(log.read_text() for log in sorted(Path(logs).glob("*/attempt_0/*/stdout.log")))
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
        if not all(isinstance(share, torch.Tensor) and share.dim() == 0 and share.requires_grad for share in shares):
            raise Wrong(f"return one number a rank, as a tensor that backward() can be called on, not {shares[0]!r}")
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
            if re.search("[Cc]onnection|[Tt]imed out|timeout", str(error)):
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


@exercise("1.11", "the first step tells a bug from rounding.")
def exercise_1_11(verdict: Callable[[list[float], list[float]], str]) -> None:
    """verdict(reference step losses, the port's) -> "same", "rounding" or "bug"."""
    reference = [2.4683871, 4.1011681, 3.8245499]
    for port, expected, why in (
        (list(reference), "same", "all steps are equal"),
        ([2.4683873, 4.1012, 3.8311], "rounding", "the first step agrees to 1e-7, and the gap grows from there"),
        ([2.4683873, 4.15, 3.5], "rounding", "after a first step that agrees, training may amplify rounding this far"),
        ([2.4784, 4.1011681, 3.8245499], "bug", "the first step is off by 0.4 %, where nothing was amplified yet"),
        ([2.4683871, 4.1011681], "bug", "a step is missing"),
    ):
        seen = verdict(list(reference), port)
        if seen != expected:
            raise Wrong(f"for {port} against {reference} you say {seen!r}, expected {expected!r}: {why}")


@exercise("1.12", "every rank reaches the collective, one rank speaks.")
def exercise_1_12(script: str | Path) -> None:
    """A script that prints "mean loss X" once, X being the mean of rank + 1 over all ranks."""
    lines = [line for line in run_script(script, 2, timeout=40).splitlines() if "mean loss" in line]
    if len(lines) != 1:
        raise Wrong(f"{len(lines)} lines with `mean loss` from 2 ranks, expected one, from rank 0 alone")
    hint = "Divide the sum by the world size." if "3.0" in lines[0] else "Is it the mean over ALL ranks?"
    expect_close(lines[0].split("mean loss")[1].strip(), 1.5, "the mean loss of 2 ranks", hint=hint)


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
                if seen != expected:
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
        ((5.0, 100.0), (30.0, 200.0), 5000, "after 5,000 samples both are done at 55 s"),
        ((5.0, 60.0), (29.0, 180.0), 2160, "after 2,160 samples both are done at 41 s"),
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
