"""The exercise checks of chapter 1: DDP with plain PyTorch."""

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
    run_ranks,
    run_script,
    run_train_epoch,
)
from shared import models, rendezvous

# --- Lesson 1.1: one process ---------------------------------------------------------------------------------------


@exercise("1.1a", "the run continues as if nothing had happened.")
def exercise_1_1a(resume: Callable) -> None:
    """resume(state, model, optimizer, scheduler) restores all three, and returns the number of the next epoch."""
    torch.manual_seed(0)
    images, labels = torch.randn(32, 1, 8, 8), torch.randint(0, 10, (32,))

    def build():
        model = models.MLP(input_dim=64, hidden_dim=32, dropout=0.5)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)

    def train(model, optimizer, scheduler, epoch):
        losses = []
        for batch in torch.randperm(32, generator=torch.Generator().manual_seed(epoch)).split(16):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        return losses

    run = build()
    for epoch in range(3):
        train(*run, epoch)
    names = ("model", "optimizer", "scheduler")
    saved = {name: copy.deepcopy(part.state_dict()) for name, part in zip(names, run, strict=True)}
    state = {**saved, "random": torch.get_rng_state(), "epochs_done": 3}
    right_rate = run[1].param_groups[0]["lr"]
    expected = train(*run, epoch=3) + train(*run, epoch=4)

    run = build()
    epoch = resume(copy.deepcopy(state), *run)
    if epoch != 3:
        raise Wrong(f"the next epoch should be 3, since 0, 1 and 2 are done; resume() returned {epoch!r}")
    rate = run[1].param_groups[0]["lr"]
    seen = train(*run, epoch=3) + train(*run, epoch=4)
    for step, (right, loss) in enumerate(zip(expected, seen, strict=True), start=1):
        if not math.isclose(right, loss, rel_tol=1e-6):
            equal = "no loss is right" if step == 1 else f"{step - 1} of {len(seen)} losses are right, then they differ"
            cause = (
                "It depends on the weights and on what dropout draws: is one of them not as it was saved?" if step == 1
                else f"The step before it had a learning rate of {rate:.2g} instead of {right_rate:.2g}: what set it?"
                if step == 2 and not math.isclose(rate, right_rate)
                else "The step before it moved the weights differently: what does Adam remember?" if step == 2
                else "The step before it had a different learning rate: which epoch does the schedule count?"
            )  # fmt: skip
            raise Wrong(f"{equal}: step {step} should have {right:.4f} and has {loss:.4f}. {cause}")


@exercise("1.1b", "the gradients of the parts add up to that of the whole batch: all data parallelism rests on this.")
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
                    f"with parts of {sizes} the gradient should be the whole batch's, but it has {ratio:.3f} times its "
                    "length. What does backward() add to .grad for each part?"
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
            hint = "A number does not always take 4 bytes: element_size() says how many."
        elif seen == 4 * sum(weights):
            hint = "A checkpoint holds no gradients: the next step computes new ones."
        elif seen < file.tell() / 1000:
            hint = "Return bytes, not kilobytes or megabytes."
        expect_close(seen, file.tell(), f"the size for an MLP in {dtype}", tolerance=0.01, hint=hint)


# --- Lesson 1.2: ranks and collectives ------------------------------------------------------------------------------


# The cause behind each of the four runs of 1.2a, and where in the log to look for it.
RUNS_1_2A = {
    "A": ("weights", "Compare both ranks' weights before step 1, and how much each rank's weights change in it."),
    "B": ("summed", "The ranks agree with each other. Do they agree with the one process after step 1?"),
    "C": ("samples", "Read both ranks' samples of step 1 next to each other, and then those of the one process."),
    "D": ("correct", "Each rank's loss is over its own samples. Compare the mean of both with the one process."),
}


@exercise("1.2a", "only D has equal weights before and after each step, no sample twice, and one process's results.")
def exercise_1_2a(diagnose: Callable[[], dict[str, str]]) -> None:
    """diagnose() -> {"A": cause, ...}, the cause behind the log of each of the four runs."""
    answer = diagnose()
    expect_answers(answer, "ABCD", ("correct", "weights", "samples", "forgotten", "summed"))
    for run, (cause, look_here) in RUNS_1_2A.items():
        if answer[run] == "forgotten":
            look_here = (
                f"In a forgotten run the weights would be equal before step 1 and different after it. {look_here}"
            )
        if answer[run] != cause:
            raise Wrong(f"run {run} is not {answer[run]!r}. {look_here}")


RING_FACTORS = (7, 11, 13)  # rank r starts with [factor * 10**r] * 2 as each chunk: digits tell whose share is in a sum
RING_CHUNKS = [[[factor * 10**rank] * 2 for factor in RING_FACTORS] for rank in range(len(RING_FACTORS))]


@exercise("1.2b", "every rank has the whole sum and has sent 2(N-1) chunks, as gloo does.")
def exercise_1_2b(script: str | Path) -> None:
    """A file with ring_all_reduce(chunks, rank, exchange) -> the chunks of the sum over all ranks."""
    refuse_stub(script)
    num_ranks = len(RING_FACTORS)
    reports = reports_of_ranks("ring_all_reduce", num_ranks, str(script), json.dumps(RING_CHUNKS))
    steps = 2 * (num_ranks - 1)
    for rank, report in enumerate(reports):
        seen, calls = report["chunks"], len(report["sent"])
        if not isinstance(seen, list) or [len(chunk) for chunk in seen] != [2] * num_ranks:
            raise Wrong(f"return the list of the {num_ranks} chunks, 2 numbers each; rank {rank} returns {seen!r}")
        if any(size != 2 for size in report["sent"]):
            raise Wrong(f"rank {rank} sends {max(report['sent'])} numbers at once; a chunk has 2: send one per step")
        for number, (chunk, factor) in enumerate(zip(seen, RING_FACTORS, strict=True)):
            if chunk == [111 * factor] * 2:
                continue
            where = f"with {num_ranks} ranks, chunk {number} on rank {rank}"
            if chunk[0] % factor:
                raise Wrong(
                    f"{where} holds numbers of other chunks. Which chunk arrives? "
                    "The one that the left neighbor sends in this step"
                )
            shares = f"{int(chunk[0] // factor):0{num_ranks}d}"[::-1]
            counts = ", ".join(f"rank {owner}'s share {times} time(s)" for owner, times in enumerate(shares))
            hint = "In the second round finished sums arrive: they replace a chunk, and are not added to it."
            if calls < steps:
                hint = f"exchange() was called {calls} times. The first round alone leaves one finished chunk per rank."
            elif set(shares) <= {"0", "1"}:
                hint = "A finished sum has been overwritten, or never came. Which chunk arrives in which step?"
            raise Wrong(f"{where} holds {counts}. {hint}")
        if calls != steps:
            how = "did another collective do it?" if calls == 0 else "does each chunk travel on its own?"
            raise Wrong(f"the sum is right, and rank {rank} has sent {calls} chunks; a ring sends {steps}: {how}")


COUNTS_1_2C = [[[45, 50], [2, 10]], [[1, 4], [36, 36]]]  # two cases: for each rank its hits and its samples


@exercise("1.2c", "counts are added over the ranks, and divided once.")
def exercise_1_2c(script: str | Path) -> None:
    """A file with global_accuracy(hits, samples) -> the accuracy over the samples of all ranks, on every rank."""
    refuse_stub(script)
    try:
        answers = reports_of_ranks("global_accuracy", 2, str(script), json.dumps(COUNTS_1_2C))
    except Wrong as error:
        if "NoneType" not in str(error):
            raise
        returns = "`all_reduce` returns nothing: it writes the sum over the tensor that you give it"
        raise Wrong(f"{returns}. The error was: {error}") from None
    for case, ((hits0, samples0), (hits1, samples1)) in enumerate(COUNTS_1_2C):
        counts = f"where rank 0 has {hits0} of {samples0} right and rank 1 {hits1} of {samples1}"
        mean = (hits0 / samples0 + hits1 / samples1) / 2
        for rank in range(2):
            seen = answers[rank][case]
            hint = f"On both ranks together, {hits0 + hits1} of {samples0 + samples1} are right."
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


@exercise("1.3a", "each mistake leaves a trace in the ranks' logs, provided that you log the right numbers.")
def exercise_1_3a(diagnose: Callable[[], dict[str, str]]) -> None:
    """diagnose() -> the mistake in each of the runs A to E, one of SYMPTOMS."""
    seen = diagnose()
    expect_answers(seen, "ABCDE", SYMPTOMS)
    for run, mistake in {
        "A": "own accuracy",
        "B": "none",
        "C": "bare model",
        "D": "padding",
        "E": "no set_epoch",
    }.items():
        if seen[run] != mistake:
            raise Wrong(f"for run {run} you say {seen[run]!r}. Then {SYMPTOMS[seen[run]]}. Is that so in run {run}?")


def judge_my_ddp(seen: list[list[dict]]) -> None:
    """Raise Wrong unless all gradients are means on each rank in each step, and were summed in the background."""
    hints = {
        "the sum": "Divide by the world size after `wait()`. Until then the tensor belongs to the all-reduce.",
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
                    f"mean over the ranks, but are {kind}. {hint}"
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
            "background (section 7), and wait in `finish`"
        )
    if left := seen[0][1]["left"]:
        raise Wrong(
            f"all gradients are right, but {left} entries are left in `pending` after two steps, so it grows forever. "
            "Empty it in `finish`"
        )


@exercise("1.3b", "every all-reduce starts while backward() runs: this is DDP with one bucket per gradient.")
def exercise_1_3b(script: str | Path) -> None:
    """A file with attach(model) -> pending, and finish(pending), which leaves the ranks' mean in each `.grad`."""
    refuse_stub(script)
    judge_my_ddp(reports_of_ranks("gradient_hooks", 2, str(script)))


SIZES_1_3C = ([[4, 4, 3], [4, 4, 1]], [[4], [4, 4, 2]], [[4, 4, 1], [4, 4]])  # for each rank the rows of its batches


@exercise("1.3c", "every rank takes every step, and every sample has the same weight.")
def exercise_1_3c(script: str | Path) -> None:
    """A file with train_epoch(ddp_model, batches, optimizer) -> the mean loss over all samples of all ranks."""
    refuse_stub(script)
    reports = run_train_epoch(script, *([sizes] for sizes in SIZES_1_3C))
    lists = [" and ".join(f"{str(own)[1:-1]} on rank {rank}" for rank, own in enumerate(case)) for case in SIZES_1_3C]
    for sizes, batches, of_ranks in zip(SIZES_1_3C, lists, reports, strict=True):
        for rank, report in enumerate(of_ranks):
            if report["ending"].startswith("RuntimeError"):
                said = re.sub(r"\[/\S+\] ", "", report["ending"])[:160]  # without the line of gloo's source
                raise Wrong(
                    f"with batches of {batches}, one rank calls a collective that the other never reaches. Count the "
                    f"steps of each rank, and the collectives in each. (Rank {rank} said: {said})"
                )
        for rank, report in enumerate(of_ranks):
            where, num_steps = f"with batches of {batches}, rank {rank}", max(map(len, sizes))
            if report["ending"] != "returns":
                raise Wrong(f"{where} ends with {report['ending']}")
            if report["steps"] != num_steps:
                less, more = "Whose samples are left out?", "In which of them does nobody have a sample?"
                hint = less if report["steps"] < num_steps else more
                raise Wrong(f"{where} takes {report['steps']} optimizer step(s), expected {num_steps}. {hint}")
            if not all(map(math.isclose, report["weights"], report["expected"])):
                hint = "Has every sample of a step the same weight, whichever rank has it? By what does DDP divide?"
                raise Wrong(f"{where} takes {num_steps} steps, and its weights are not those of one process. {hint}")
    for sizes, batches, of_ranks in zip(SIZES_1_3C, lists, reports, strict=True):
        for rank, report in enumerate(of_ranks):
            what = f"all weights are right. With batches of {batches}, the mean loss that rank {rank} returns"
            hint = f"The {sum(map(sum, sizes))} samples of both ranks count equally, and both ranks return the same."
            expect_close(report["returned"], report["expected_loss"], what, hint=hint)


# --- Lesson 1.4: torchrun -------------------------------------------------------------------------------------------


@exercise("1.4a", "in float32 a bug can look like rounding; float64 tells them apart.")
def exercise_1_4a(diagnose: Callable[[], dict[str, str]]) -> None:
    """diagnose() -> for each port in ported_script_losses.json "rounding", "before the update" or "in the update"."""
    answers = ("rounding", "before the update", "in the update")
    seen = diagnose()
    expect_answers(seen, "ABC", answers)
    stays = "In float64 its gap is as large as in float32. Would rounding leave a gap of that size?"
    first_loss = "Look at step 1. Its loss is computed before any update: does it agree with the reference?"
    for port, expected, hints in (
        ("A", "in the update", {"rounding": stays, "before the update": first_loss}),
        ("B", "before the update", {"rounding": stays, "in the update": first_loss}),
        ("C", "rounding", dict.fromkeys(answers, "Its gap grows in float32. What is left of it in float64?")),
    ):
        if seen[port] != expected:
            raise Wrong(f"port {port} is not {seen[port]!r}. {hints[seen[port]]}")


@exercise("1.4b", "the decision to stop is shared, so no rank waits for one that has left.")
def exercise_1_4b(script: str | Path) -> None:
    """A script whose three ranks all print "stopped after step N", N being the first step with a mean below 0.5.

    Rank 0 also prints "mean loss X", with that mean.
    """
    printed = run_ranks(script, 3, question="Which ranks are still in the loop, and which have left it?")
    found = [re.findall(r"stopped after step (\d+), with (\d+) gradients", text) for text in printed]
    if [len(lines) for lines in found] != [1, 1, 1]:
        raise Wrong("each rank should print one line `stopped after step ...`: keep the lines marked `keep`")
    steps, gradients = zip(*((int(step), int(count)) for ((step, count),) in found), strict=True)
    if len(set(steps)) > 1:
        raise Wrong(f"the ranks stop after different steps, {steps}: take the decision from a value that they share")
    if any(count != 3 * steps[0] for count in gradients):
        raise Wrong(
            f"{steps[0]} steps on 3 ranks should add up {3 * steps[0]} gradients, and the ranks have {gradients}: keep "
            "the all_reduce of the gradient in each step, and let no other collective get mixed up with it"
        )
    hints = {  # the shared step, and what has decided it
        4: "That is rank 0's own loss: the others have no say.",
        9: "That is rank 1's own loss: the others have no say.",
        13: "That is the largest loss, so the last rank decides. Take the mean.",
        15: "That is the sum of the losses: divide it by the world size.",
        20: "Nobody has stopped early: does the shared mean reach the `if`?",
    }
    expect_close(steps[0], 10, "the step after which all ranks stop", hint=hints.get(steps[0], "Take the mean loss."))
    lines = [[line for line in text.splitlines() if "mean loss" in line] for text in printed]
    if [len(of_a_rank) for of_a_rank in lines] != [1, 0, 0]:
        counts = "{}, {} and {}".format(*(len(of_a_rank) for of_a_rank in lines))
        raise Wrong(f"the 3 ranks printed {counts} lines with `mean loss`; expected one, from rank 0 alone")
    value = lines[0][0].split("mean loss")[1].strip()
    mean = sum(3**rank * 0.8**10 for rank in range(3)) / 3
    hint = "Is it the value that the decision was taken from?"
    expect_close(value, mean, "the mean loss that rank 0 prints", tolerance=0.01, hint=hint)


# --- Lesson 1.5: two nodes ------------------------------------------------------------------------------------------


@exercise("1.5a", "the same last line can have two causes: the logs of all nodes tell which.")
def exercise_1_5a(diagnose: Callable[[], dict[str, str]]) -> None:
    """diagnose() -> for each launch in failed_multinode_launches.txt its cause."""
    answers = ("missing agent", "wrong id", "wrong endpoint", "wrong interface", "missing package")
    seen = diagnose()
    expect_answers(seen, "ABCD", answers)
    both = "Both agents of this launch have written a log."
    ranks = "Ranks were started, so the agents had met. Which rank failed first, and in which line of the script?"
    for launch, expected, other, hints in (
        ("A", "wrong id", "No rank was started: how far did each of the two agents get?", {
            "missing agent": f"{both} What would make them wait although both are there?",
            "wrong endpoint": "What does an agent print that reaches no store? Is that in one of the logs?",
        }),
        ("B", "missing package", ranks, {
            "missing agent": f"{both} And ranks were started on both nodes.",
            "wrong interface": "Node 0's error can be a consequence: compare the times of the two failures.",
        }),
        ("C", "wrong endpoint", "No rank was started: how far did each of the two agents get?", {
            "missing agent": f"{both} What was node 1 doing while node 0 waited?",
            "wrong id": "With two ids both agents reach the store. Did both?",
        }),
        ("D", "wrong interface", ranks, {
            "wrong endpoint": "Node 1's last line is that of launch C. But what had happened on node 1 before?",
            "missing agent": f"{both} And ranks were started on both nodes.",
        }),
    ):  # fmt: skip
        if seen[launch] != expected:
            raise Wrong(f"launch {launch} is not {seen[launch]!r}. {hints.get(seen[launch], other)}")


def run_two_nodes(script: str | Path) -> tuple[list[int], list[str]]:
    """Run a script on two nodes with two ranks each; return how often each node downloaded, and the lines reported.

    Raises NotImplementedError and Wrong as run_script does.
    """
    refuse_stub(script)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.txt")
        words = [probe("two_agents"), folder, rendezvous.free_port(), script, report]
        expect_success(*run_command([str(word) for word in words]))
        downloads = [len(list(Path(folder, f"node-{node}").glob("downloaded-by-*"))) for node in range(2)]
        return downloads, report.read_text().splitlines() if report.exists() else []


@exercise("1.5b", "the download once per node, each number and the report once per job.")
def exercise_1_5b(script: str | Path) -> None:
    """A script that, on two nodes, downloads once on each, adds up 1 to 100 over all ranks, and reports one line."""
    try:
        downloads, report = run_two_nodes(script)
    except Wrong as error:
        if missing := re.search(r"FileNotFoundError.*node-(\d)/numbers", str(error)):
            raise Wrong(
                f"a rank on node {missing[1]} does not find numbers.txt on its node's disk. Which ranks are on that "
                "node, and which of them should download?"
            ) from None
        raise
    if downloads != [1, 1]:
        raise Wrong(
            f"the two nodes downloaded {downloads[0]} and {downloads[1]} times: once on each is enough. Which number "
            "is 0 for exactly one process of each node?"
        )
    if not report:
        raise Wrong("nobody reports the sum: which process should?")
    hints = {  # the sum, and what has led to it
        "10100": "Every number counts twice. Among how many processes are the numbers divided, and how many run?",
        "10097": "The parts overlap: they start at the number in the job, and step by the size of the node.",
        "4950": "Two processes have the same part, and others are missing: they start at the number on the node, and "
        "step by the size of the job.",
    }
    if report[0] != "5050":
        hint = hints.get(report[0], "Each number should be in the part of exactly one process of the job.")
        raise Wrong(f"the sum is {report[0]}, expected 5050. {hint}")
    if len(report) > 1:
        raise Wrong(f"{len(report)} lines are reported, expected one: the condition is true on each node")


# --- Lesson 1.6: port a script --------------------------------------------------------------------------------------


@exercise("1.6a", "two ranks compute what one process computes, the uneven steps included.")
def exercise_1_6a(script: str | Path) -> None:
    """A port of alone.py, next to it, to DDP: the same metrics.json and model.pt, from two ranks."""
    with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as ported:
        ranks = run_ranks(script, 2, ported)
        run_script(Path(script).with_name("alone.py"), 1, alone)
        for name in ("metrics.json", "model.pt"):
            if not Path(ported, name).exists():
                raise Wrong(f"there is no {name} in the folder that the script gets as its argument")
        try:
            expected, seen = (json.loads(Path(folder, "metrics.json").read_text()) for folder in (alone, ported))
        except json.JSONDecodeError:
            raise Wrong("metrics.json is damaged: does rank 0 alone write it?") from None
        right, weights = (torch.load(Path(folder, "model.pt"), weights_only=True) for folder in (alone, ported))
    same_weights = weights.keys() == right.keys() and all(
        torch.allclose(weights[name], right[name], rtol=1e-6, atol=1e-9) for name in right
    )
    check_samples(seen, "samples", sum(expected["samples"]))
    check_step_losses(seen["step_losses"], expected["step_losses"], same_weights)
    check_samples(seen, "val_samples", sum(expected["val_samples"]))
    for epoch, accuracies in enumerate(zip(seen["val_accuracies"], expected["val_accuracies"], strict=True), start=1):
        hint = "Add up the correct answers of all ranks, each sample once, and divide once, by all validation samples."
        expect_close(*accuracies, f"the val_accuracy of epoch {epoch}", tolerance=1e-9, hint=hint)
    if prefixed := [name for name in weights if name.startswith("module.")]:
        raise Wrong(f"model.pt has the key {prefixed[0]}: save the bare model's state, not that of DDP around it")
    if not same_weights:
        raise Wrong("the losses are right, and the weights in model.pt are not: save them after the last step")
    if ranks[1].strip():
        raise Wrong(f"rank 1 prints too: {ranks[1].strip().splitlines()[0]!r}. Let rank 0 speak for both")


def check_samples(metrics: dict, name: str, expected: int) -> None:
    """Raise Wrong unless the counts under `name` say that two ranks have shared `expected` samples equally."""
    samples = metrics.get(name)
    if not isinstance(samples, list) or len(samples) != 2:
        question = "Have the ranks joined a group, and do you gather their counts?"
        raise Wrong(f"{name} should have one number per rank, but is {samples}. {question}")
    if samples == [expected, expected]:
        raise Wrong(f"{name} is {samples}: both ranks see every sample. Give each rank its part of every batch")
    if sum(samples) > expected:
        raise Wrong(f"{name} is {samples}, {sum(samples) - expected} too many: does your sampler pad uneven parts?")
    if sum(samples) < expected:
        raise Wrong(f"{name} is {samples}, {expected - sum(samples)} too few: is a part of a batch left out?")
    if abs(samples[0] - samples[1]) > expected // 100:
        raise Wrong(f"{name} is {samples}: the ranks' parts should be equal, up to one sample per step")


def check_step_losses(seen: list[float], expected: list[float], same_weights: bool) -> None:
    """Raise Wrong, with the likely cause, unless the losses agree within a relative 1e-9."""
    if len(seen) != len(expected):
        hint = "BATCH_SIZE is the global batch: each rank takes its part of it." if len(seen) < len(expected) else ""
        raise Wrong(f"{len(seen)} steps, expected {len(expected)}. {hint}".strip())
    pairs = zip(seen, expected, strict=True)
    wrong = [step for step, pair in enumerate(pairs) if not math.isclose(*pair, rel_tol=1e-9)]
    if not wrong:
        return
    first, steps = wrong[0], len(expected) // 2
    difference = abs(seen[first] - expected[first]) / expected[first]
    if same_weights:
        cause = "The weights are right, so the training is. Is the recorded loss the mean over BOTH ranks' samples?"
    elif first == 0:
        cause = (
            "Do you record the mean over BOTH ranks' samples, or one rank's own? Are the initial weights the same? "
            "Do both ranks together see the samples of this step in alone.py?"
        )
    elif first == 1 and difference < 1e-3:  # without DDP it is 3e-2; a factor of 2 gives 4e-7, of 32 gives 5e-6
        cause = "The first step is right: are its gradients too large or too small by a factor? Adam hides most of it."
    elif first < steps - 1:
        cause = "The first step is right: does every weight get the mean of both ranks' gradients?"
    elif first <= steps and difference < 0.01:
        cause = "Step 16 has 21 and 20 samples. DDP divides by the number of ranks, and not by the number of samples."
    elif first == steps:
        cause = "It is the first step of the second epoch: which order do the samples have there?"
    else:
        cause = "Do the two parts of each step together hold the samples of that step in alone.py?"
    numbers = f"{seen[first]:.6f}, expected {expected[first]:.6f} (relative difference {difference:.0e})"
    raise Wrong(f"step {first + 1} has the loss {numbers}. {cause}")
