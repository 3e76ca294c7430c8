"""The exercise checks of chapter 2: the same training on Ray."""

import json
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from checks.machinery import (
    Wrong,
    exercise,
    expect_answers,
    expect_close,
    expect_success,
    probe,
    refuse_stub,
    reports_of_ranks,
    run_command,
    run_script,
    run_train_epoch,
)

# --- Lesson 2.1: Ray Train -------------------------------------------------------------------------------------------


@exercise("2.1a", "one worker and two compute the same, and every image counts once.")
def exercise_2_1a(script: str | Path) -> None:
    """A module with `train_function(config)` for Ray Train, which returns the same on one worker and on two."""
    refuse_stub(script)
    one, two = (run_port(script, num_workers) for num_workers in (1, 2))
    expect_same_steps(one, two)
    expect_every_test_image(one, two)
    if list(one["weights"]) != list(two["weights"]):
        names = [next(iter(results["weights"]), "nothing") for results in (one, two)]
        raise Wrong(
            f'"weights" begins with {names[0]!r} on one worker and with {names[1]!r} on two: return the weights of the '
            "same model, the one inside the wrapper"
        )


def run_port(script: str | Path, num_workers: int) -> dict:
    """Run the port's training function in Ray's local mode on this many processes; return what rank 0 returns."""
    where = "on one worker" if num_workers == 1 else "on two workers"
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.pt")
        try:
            start_port(num_workers, str(probe("ray_local_mode")), str(script), str(results))
        except Wrong as error:
            hints = {
                "'module'": "prepare_model did not wrap this model. When does it, and when does it not?",
                "'set_epoch'": "Which sampler is this? Skipping the call hides that two workers have a different one.",
                "[Cc]onnection|[Tt]imed out|it hangs": "Does every rank call every collective?",
            }
            said = re.split(r"\. (?:Did you mean|This is typically)", str(error))[0].rstrip(".")  # advice that misleads
            hint = next((hint for pattern, hint in hints.items() if re.search(pattern, said)), "")
            raise Wrong(f"{where} {said}. {hint}".strip()) from None
        returned = torch.load(results, weights_only=True)
    names = ("step_losses", "orders", "test", "weights")
    if not isinstance(returned, dict) or not all(returned.get(name) for name in names):
        raise Wrong(f"{where} train_function should return a dict with {', '.join(names)}: keep its last line")
    return returned


def start_port(num_workers: int, runner: str, script: str, results: str) -> None:
    """Run the port by plain Python as one process, or under torchrun as several."""
    if num_workers == 1:
        expect_success(*run_command([runner, script, results]))
    else:
        run_script(runner, num_workers, script, results)


def expect_same_steps(one: dict, two: dict) -> None:
    """Raise Wrong unless both ports take the same 40 steps, in an order that changes with the epoch."""
    for results, where in ((one, "one worker takes"), (two, "two workers take")):
        steps = len(results["step_losses"])
        if steps != 40:
            hints = {
                20: "How many images do the two workers take together in one step? The global batch is 64.",
                80: "Does each worker train on all images, or only on its own part?",
            }
            raise Wrong(f"{where} {steps} steps in two epochs, expected 40. {hints.get(steps, '')}".strip())
    for results, where in ((one, "one worker"), (two, "two workers")):
        if results["orders"][0] == results["orders"][1]:
            raise Wrong(
                f"on {where}, rank 0 gets the images in the same order in both epochs: who tells the sampler which "
                "epoch begins?"
            )
    pairs = zip(one["step_losses"], two["step_losses"], strict=True)
    different = [step for step, (a, b) in enumerate(pairs, start=1) if not math.isclose(a, b, rel_tol=1e-9)]
    if different:
        hint = "Does Ray average the gradients of this model?"
        if different[0] == 1:
            hint = "No weight has moved yet: the images differ. Which sampler shuffles on one worker, and which on two?"
            if two["orders"][0] == one["orders"][0][::2]:  # rank 0 takes every second image, as it should
                hint = "Both take the same images. Over which of them is this loss the mean?"
        elif different[0] > 20:
            hint = "The first epoch agrees. Which images are in the first batch of the second?"
        raise Wrong(f"the loss of step {different[0]} differs between one and two workers. {hint}")


def expect_every_test_image(one: dict, two: dict) -> None:
    """Raise Wrong unless both ports count the 261 test images, and the same correct ones."""
    for results, where in ((one, "one worker counts"), (two, "two workers count")):
        samples = int(results["test"][1])
        if samples != 261:
            hints = {
                130: "That is the part of one rank.",
                131: "That is the part of one rank.",
                262: "An image counts twice: who has added it?",
                522: "Each rank tests all images.",
            }
            raise Wrong(f"{where} {samples} test images, expected 261. {hints.get(samples, '')}".strip())
    if one["test"][0] != two["test"][0]:
        seen = f"{one['test'][0]:g} and {two['test'][0]:g}"
        raise Wrong(f"one and two workers get {seen} test images right, and both have the same weights: who counts?")


@exercise("2.1b", "you count draws over all ranks, and compare the epochs.")
def exercise_2_1b(diagnose: Callable[[], dict[str, str]]) -> None:
    """diagnose() -> for each loader in dataloader_sample_ids.json what is wrong with it."""
    answers = ("nothing", "padding", "no set_epoch", "different seeds", "not split")
    seen = diagnose()
    expect_answers(seen, "ABCD", answers)
    evidence = {  # what to look at for each answer that is wrong
        "nothing": "How often is each sample drawn in an epoch, over both ranks? And does the order change?",
        "padding": "Padding repeats a sample, so that all ranks have equally many. How many does each rank draw?",
        "no set_epoch": "Compare the order of the two epochs on one rank.",
        "different seeds": "Ranks that shuffle differently leave samples out. Which ones does nobody draw?",
        "not split": "Then each rank would draw all 101 samples. How many does rank 0 draw?",
    }
    expected = {"A": "different seeds", "B": "nothing", "C": "padding", "D": "no set_epoch"}
    for loader, answer in expected.items():
        if seen[loader] != answer:
            raise Wrong(f"loader {loader}: it is not {seen[loader]!r}. {evidence[seen[loader]]}")


# --- Lesson 2.2: nothing changed but the launcher --------------------------------------------------------------------


HUNG_JOBS = {"A": (2, "left the loop"), "B": (1, "waits for data"), "C": (None, "different collectives"),
             "D": (3, "waits for a person")}  # fmt: skip
CAUSES_OF_HANGS = {  # what speaks against each cause where it is wrong
    "left the loop": "Has a rank reached a function that main calls after the training step, while others still train?",
    "waits for data": "Is a rank fetching a batch, and in no collective at all?",
    "waits for a person": "Is a rank inside pdb?",
    "different collectives": "Three ranks wait at the same line. Is the fourth in their loop, and in a collective?",
    "slow": "No rank computes anything: where are they all waiting, and for whom?",
}


@exercise("2.2a", "the odd rank holds the others up, and ranks at the same line need not be in the same collective.")
def exercise_2_2a(diagnose: Callable[[], dict[str, tuple[int | None, str]]]) -> None:
    """diagnose() -> for each job in hung_job_stacks.txt the rank to look at, and the cause."""
    seen = diagnose()
    if not isinstance(seen, dict) or set(seen) != set(HUNG_JOBS):
        raise Wrong(f"return a dict with the keys A, B, C and D; yours is {seen!r}")
    for job, expected in HUNG_JOBS.items():
        answer = seen[job]
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise Wrong(f'job {job}: answer with a rank and a cause, such as (0, "slow"), not {answer!r}')
        rank, cause = answer
        if cause not in CAUSES_OF_HANGS:
            raise Wrong(f"job {job}: {cause!r} is not one of the causes {', '.join(map(repr, CAUSES_OF_HANGS))}")
        if cause != expected[1]:
            hint = CAUSES_OF_HANGS[cause]
            if job == "C":
                hint = "All ranks are idle at the same line. Would they still wait there if all were in the same call?"
            raise Wrong(f"job {job} is not {cause!r}. {hint}")
        if rank != expected[0]:
            hint = "Which rank's innermost line of train.py differs from the others'?"
            if expected[0] is None:
                hint = "Four equal dumps point to no rank: say None."
            raise Wrong(f"job {job}: the cause is right, but look again for the rank. {hint}")


DRIFTED = (  # (rank, parameter, what is added) -> the hint for whoever misses it
    ([], ""),
    ([(2, "1.weight", 2.0**-40)], "They differ by 1e-12. Copies of the same weights are equal bit for bit."),
    ([(0, "0.bias", 1.0), (2, "0.bias", -1.0)], "What rank 0 has more, rank 2 has less: they cancel in a sum."),
    ([(1, "0.weight", "flip"), (0, "1.bias", 1.0)], "The same numbers in other places are different weights."),
    ([(1, "0.weight", math.nan)], "NaN is neither less nor greater than a number. Compare bits: look up Tensor.view."),
)


@exercise("2.2b", "every rank knows which weights differ, and no weight has changed.")
def exercise_2_2b(script: str | Path) -> None:
    """A file with differing_parameters(model) -> on every rank, the names of the parameters that differ by rank."""
    refuse_stub(script)
    for number, ((changes, hint), reports) in enumerate(zip(DRIFTED, compare_models(script), strict=True), start=1):
        expected = sorted({name for _, name, _ in changes})
        where = f"case {number}: {describe_drift(changes)}"
        for rank, report in enumerate(reports):
            if report["changed"]:
                names = ", ".join(report["changed"])
                raise Wrong(
                    f"{where}. Your function has changed {names} on rank {rank}: a collective writes its result into "
                    "the tensor that it gets"
                )
            if not isinstance(report["answer"], list):
                raise Wrong(f"return a list of names on every rank; rank {rank} returns {report['answer']}")
        answers = [sorted(map(str, report["answer"])) for report in reports]
        if answers.count(answers[0]) != len(answers):
            said = ", ".join(f"rank {rank} says {answer}" for rank, answer in enumerate(answers))
            raise Wrong(f"{where}. But {said}. How does a rank learn what another one has found?")
        if answers[0] != expected:
            if extra := sorted(set(answers[0]) - set(expected)):
                hint = f"{extra[0]} is the same on all ranks."
            raise Wrong(f"{where}. Expected {expected}; your ranks say {answers[0]}. {hint}")


def describe_drift(changes: list[tuple]) -> str:
    """Say in words what a case of exercise 2.2b changed."""
    if not changes:
        return "all ranks have the same weights"
    said = []
    for rank, name, change in changes:
        how = "upside down" if change == "flip" else "NaN" if math.isnan(change) else f"{change:+.0e} off"
        said.append(f"{name} of rank {rank} is {how}")
    return " and ".join(said)


def compare_models(script: str | Path) -> list[list[dict]]:
    """Run the learner's function on three ranks, and return each rank's report for each case."""
    num_ranks = 3
    cases = json.dumps([changes for changes, _ in DRIFTED])
    reports = reports_of_ranks("differing_parameters", num_ranks, str(script), cases)
    return [list(case) for case in zip(*reports, strict=True)]


# --- Lesson 2.3: Ray Data --------------------------------------------------------------------------------------------


STREAMS_2_3A = {"A": "files only", "B": "rows dropped", "C": "nothing", "D": "idle rank", "E": "same order"}


@exercise("2.3a", "you compare rows over both ranks, their order, and both epochs.")
def exercise_2_3a(diagnose: Callable[[], dict[str, str]]) -> None:
    """diagnose() -> for each stream in ray_data_sample_ids.json what is wrong with it."""
    evidence = {  # what to look at for each answer that is wrong
        "nothing": "How many rows does each rank get, how are they mixed, and what changes from epoch to epoch?",
        "rows dropped": "Then some of the 101 ids reach neither rank. Which ones?",
        "idle rank": "Then one rank receives nothing. How many rows does each rank get?",
        "not split": "Then each rank would receive all 101 samples. How many does each rank get?",
        "files only": "Then the rows of a file still arrive one after the other. Do they?",
        "same order": "Compare the two epochs on one rank.",
    }
    seen = diagnose()
    expect_answers(seen, "ABCDE", evidence)
    for stream, answer in STREAMS_2_3A.items():
        if seen[stream] != answer:
            raise Wrong(f"stream {stream}: it is not {seen[stream]!r}. {evidence[seen[stream]]}")


@exercise("2.3b", "every rank learns of the error before any rank leaves.")
def exercise_2_3b(script: str | Path) -> None:
    """A file with train_epoch(ddp_model, stream, optimizer), which ends equally on all ranks."""
    refuse_stub(script)
    whole, broken = run_train_epoch(script, ([[32], [32, 32, 7]], -1), ([[32, 32, 32, 32], [32, 32]], 1))
    for rank, report in enumerate(whole):
        where = "the streams have 1 and 3 batches, and every image can be read, but on"
        if report["ending"] != "returns":
            hint = "Does every rank call every collective in every step?"
            raise Wrong(f"{where} rank {rank} train_epoch ends with {report['ending'][:200]}. {hint}")
        if report["steps"] != 3:
            raise Wrong(f"{where} rank {rank} the optimizer takes {report['steps']} steps, expected 3")
        if not all(map(math.isclose, report["weights"], report["expected"])):
            hint = "Keep the loss: its sum over this rank's rows, divided by the rows of all ranks."
            raise Wrong(f"{where} rank {rank} the weights are not those of one process. {hint}")
    endings = [report["ending"] for report in broken]
    if endings[0] == endings[1] == "returns":
        raise Wrong("rank 1 cannot read an image, and both ranks return as if the epoch were complete")
    for rank, ending in enumerate(endings):
        if ending.startswith("RuntimeError"):
            raise Wrong(f"rank 1 cannot read an image, and on rank {rank} train_epoch ends with {ending[:200]}")
        if ending == "returns":
            raise Wrong(f"rank 1 cannot read an image, and rank {rank} returns. How could it know of the error?")
    steps = [report["steps"] for report in broken]
    if steps[0] != steps[1] or not all(map(math.isclose, *(report["weights"] for report in broken))):
        raise Wrong(f"both ranks raise, but they have taken {steps[0]} and {steps[1]} steps: their weights differ")


# --- Lesson 2.4: checkpoints and resuming ----------------------------------------------------------------------------

# What a run may have failed to restore, and what one sees then.
LEFT_OUT = {
    "nothing": "every loss is equal to that of the uninterrupted run",
    "model": "both ranks' losses jump back to those of an untrained model",
    "optimizer": "both ranks' first losses are right and both ranks' second losses are wrong",
    "optimizer on rank 1": "both ranks' first losses are right, and only rank 1's second loss is wrong",
    "scheduler": "several losses are right on both ranks, until only one of the runs halves its learning rate",
    "random": "both ranks' first losses are wrong, on the right samples",
    "random on rank 1": "rank 1's first loss is wrong on the right samples, and rank 0's is right",
    "progress": "the ranks train on other samples than the uninterrupted run",
}


@exercise("2.4a", "you found the part by the first wrong loss, and the rank by comparing the two ranks.")
def exercise_2_4a(diagnose: Callable[[], dict[str, str]]) -> None:
    """diagnose() -> what each run in resumed_run_losses.json did not restore, one of LEFT_OUT."""
    seen = diagnose()
    expect_answers(seen, "ABCDE", LEFT_OUT)
    expected = {
        "A": "scheduler",
        "B": "random on rank 1",
        "C": "nothing",
        "D": "optimizer on rank 1",
        "E": "progress",
    }
    for run, left_out in expected.items():
        if seen[run] != left_out:
            raise Wrong(
                f"run {run}: you say {seen[run]!r}. Then {LEFT_OUT[seen[run]]}. Is that what you see in run {run}?"
            )


# What torch.load says of a file that was cut off.
HALF_A_FILE = "zip archive|central directory|PytorchStreamReader|Ran out of input|EOFError|OSError.*Invalid argument"


@exercise("2.4b", "rank 0 died while it wrote a checkpoint, and no loss shows it.")
def exercise_2_4b(script: str | Path) -> None:
    """A file with save(...) and resume(...), which carry two ranks over a SIGKILL bit for bit."""
    refuse_stub(script)
    if "shared.checkpoint" in (text := Path(script).read_text()) or re.search("from shared import .*checkpoint", text):
        raise Wrong("write it with PyTorch and shared.distributed: shared.checkpoint is what you are building")
    judge_resume(*kill_in_save(script))


def kill_in_save(script: str | Path) -> tuple[int, str, bool, dict[str, list]]:
    """Run two ranks that call the learner's save and resume, with a SIGKILL in the third save.

    Returns (exit code, stderr, whether rank 0 was killed, logs). Each log, such as logs["run-0"], is a list of
    [attempt, step, loss].
    """
    with tempfile.TemporaryDirectory() as folder:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
        exit_code, errors = run_command([*torchrun, str(probe("kill_during_save")), folder, str(script)])
        logs = {}
        for name in ("reference-0", "reference-1", "run-0", "run-1"):
            path = Path(folder, f"{name}.jsonl")
            logs[name] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return exit_code, errors, Path(folder, "killed").exists(), logs


def judge_resume(exit_code: int, errors: str, killed: bool, logs: dict[str, list]) -> None:
    """Raise Wrong unless both ranks went through the kill and have the losses of the reference."""
    errors = errors.rpartition("attempt 2 begins")[2]  # those of attempt 1 come from the kill, which is intended
    if not killed and exit_code == 0:
        raise Wrong("the kill waits in rank 0's torch.save into a file, and rank 0 never called it: which rank writes?")
    if exit_code != 0:
        if re.search(HALF_A_FILE, errors):
            raise Wrong(
                "rank 0 died when it had written half of a checkpoint, and resume() reads that half. What should be at "
                "`path` while a new checkpoint is being written?"
            )
        try:
            expect_success(exit_code, errors)
        except Wrong as error:
            hint = ""
            if re.search("[Cc]onnection|[Tt]imed out|[Bb]roken pipe|read .* bytes|size", str(error)):
                hint = " Does every rank call every collective, as often as the others?"
            raise Wrong(f"{'after' if killed else 'before'} the kill, {error}.{hint}") from None
    continued = [[line for line in logs[f"run-{rank}"] if line[0] == 2] for rank in (0, 1)]
    for rank, lines in enumerate(continued):
        if not lines or lines[0][1] != 7:
            begins = f"begins with step {lines[0][1]}" if lines else "does no step"
            hint = "What does resume() return?"
            if lines and lines[0][1] == 1:
                hint = "Is there a file at `path` after save(), on all ranks, and does resume() return its step?"
            elif lines and lines[0][1] == 10:
                hint = "Rank 0 was killed before that file was complete: which other rank writes it?"
            raise Wrong(
                f"after the kill rank {rank} {begins}, expected step 7, after the last whole checkpoint. {hint}"
            )
    expected = [[loss for _, step, loss in logs[f"reference-{rank}"] if step >= 7] for rank in (0, 1)]
    seen = [[loss for _, _, loss in lines] for lines in continued]
    for step, both in enumerate(zip(zip(*expected, strict=True), zip(*seen, strict=True), strict=True), start=7):
        wrong = [rank for rank in (0, 1) if not math.isclose(both[0][rank], both[1][rank], rel_tol=1e-6)]
        if wrong:
            where = "on both ranks" if len(wrong) == 2 else f"on rank {wrong[0]} alone"
            hint = (
                "What does the first loss depend on, besides the batch?" if step == 7 and len(wrong) == 2
                else "Both ranks have the same weights. What else does the first loss depend on?" if step == 7
                else "Step 7 was right, so its update was wrong. What does an update depend on?" if step == 8
                else "The steps before it are right. What changes an update that late?"
            )  # fmt: skip
            raise Wrong(f"after the kill, the loss of step {step} is wrong {where}. {hint}")


# --- Lesson 2.5: port a script ---------------------------------------------------------------------------------------


@exercise("2.5a", "a worker died, Ray replaced it, and the losses are those of an undisturbed run.")
def exercise_2_5a(script: str | Path) -> None:
    """A port of ddp.py, next to it, to Ray Train: it survives the crash and leaves the same metrics.json."""
    refuse_stub(script)
    with tempfile.TemporaryDirectory() as ddp, tempfile.TemporaryDirectory() as ported:
        # How often Ray looks for reports: so it has noted the last one when the worker dies.
        often = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1", "RAY_ADDRESS": "local"}
        try:
            exit_code, errors = run_command([str(script), ported], timeout=400, **often)
        except Wrong as hang:
            raise Wrong(f"{hang} report() waits for all workers, too: does each of them call it?") from None
        epochs = Path(ported, "epochs.txt").read_text().split() if Path(ported, "epochs.txt").exists() else []
        crashed = Path(ported, "crashed").exists()
        if exit_code != 0:
            if error := error_of_driver(errors):
                raise Wrong(f"the script failed{' after the restart' if crashed else ''}: {error}")
            if crashed:
                raise Wrong(
                    "the run ended when a worker died in epoch 2: how many failures does your RunConfig permit?"
                )
            expect_success(exit_code, errors)
        if not crashed:
            raise Wrong("no worker died: are there two, and does each call begin_epoch with its rank in every epoch?")
        if epochs != ["0", "1", "2", "2", "3"]:
            cause = "Call report() after every epoch, and begin the loop with the first epoch that is not done."
            if epochs.count("0") > 1:
                cause = "The second attempt started from scratch: what did you report, and do you read it again?"
            raise Wrong(f"rank 0 began the epochs {', '.join(epochs)}; expected 0, 1, 2, 2, 3. {cause}")
        if not Path(ported, "metrics.json").exists():
            raise Wrong("there is no metrics.json. A worker runs in a folder of its own: give it an absolute path")
        seen = json.loads(Path(ported, "metrics.json").read_text())["losses"]
        Path(ddp, "crashed").touch()  # the original is not disturbed
        run_script(Path(script).with_name("ddp.py"), 2, ddp)
        expected = json.loads(Path(ddp, "metrics.json").read_text())["losses"]
    if len(seen) != len(expected):
        raise Wrong(f"{len(seen)} losses, expected {len(expected)}: keep those of the first attempt, too")
    for epoch, pair in enumerate(zip(seen, expected, strict=True)):
        hint = "Do both workers together train on the samples of ddp.py, from the same initial weights?"
        if epoch >= 2:
            hint = "This epoch comes after the restart: what else, apart from the weights, decides where a step goes?"
        expect_close(*pair, f"the loss of epoch {epoch}", tolerance=1e-9, hint=hint)


def error_of_driver(errors: str) -> str:
    """Return the last error in what the driver of a Ray Train run wrote to stderr, or "" if a worker was killed."""
    # Ray begins the lines of its workers with a color or a parenthesis.
    own = "\n".join(line for line in errors.splitlines() if not line.startswith(("\x1b", "(")))
    # A traceback is indented. The line after it, which is not, names the error.
    found = re.findall(r"^\s+\S.*\n([A-Za-z_][\w.]*(?:: .*)?)$", own, re.MULTILINE)
    # WorkerGroupError stands above the worker's own error. The other rank may have lost its connection.
    found = [error for error in found if "WorkerGroupError" not in error and "Connection closed by peer" not in error]
    return found[-1] if found else ""
