"""The exercise checks: `checks.exercise_N_M(answer)` is exercise M of chapter N.

In a lesson a check prints what is still wrong; with `strict=True`, as in the solutions, it raises AssertionError.
"""

import copy
import functools
import io
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from shared import models


class Wrong(Exception):
    """An answer that is not right yet; the message tells the learner what was seen and what was expected."""


def exercise(number: str, praise: str) -> Callable:
    """Make a check of a function that raises Wrong (or NotImplementedError: the stub) for an answer that is not right."""

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
    """Run a script with `nproc` ranks under torchrun and return what it printed.

    Raises NotImplementedError where the script did, and Wrong with the end of its errors, or for a hang of `timeout`
    seconds.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), str(path)]
    with subprocess.Popen(
        [*command, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise Wrong(f"it hangs: no end after {timeout:.0f} s. Does every rank reach every collective?") from None
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
    expect_close(mean_loss([1.0, 3.0], [64, 5]), 79 / 69, "the mean of batches of 64 and 5 with means 1 and 3", hint=hint)
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


# --- Lesson 1.3: DistributedDataParallel ----------------------------------------------------------------------------


# --- Lesson 1.4: torchrun -------------------------------------------------------------------------------------------


# --- Lesson 1.5: two nodes ------------------------------------------------------------------------------------------
