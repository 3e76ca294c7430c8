"""The exercise checks of chapter 3: when the model no longer fits."""

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from checks import machinery
from checks.machinery import Wrong, exercise, expect_answers, expect_close, refuse_stub, reports_of_ranks

# --- Lesson 3.1: where memory goes -----------------------------------------------------------------------------------


@exercise("3.1a", "two measurements are enough to know it in advance.")
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
            raise Wrong(f"{what}, you return {seen!r}: return a whole number of sequences")
        if seen != expected:
            hint = "Where not even one sequence fits, it is 0."
            if expected and seen * sequence + state > limit:
                hint = f"That needs {seen * sequence + state:,.0f}. "
                hint += "Round down." if seen == expected + 1 else "Something is there before the first sequence."
            elif seen == expected - 1:
                hint = "One more fits: needed(1) already includes the first sequence."
            elif expected:
                hint = "More would fit. needed(1) includes the state, which a second sequence does not need again."
            raise Wrong(f"{what}, {expected} sequences fit; you return {seen}. {hint}")


# What the log of log_sharded_memory.py shows of a run with this mistake.
SYMPTOMS_3_1B = {
    "weights": "from the first backward pass on, both ranks would hold 4 more bytes per parameter, at all four points",
    "gradients": "both ranks would hold more than half of the gradients after backward, and no longer after zero_grad",
    "moments": "after backward in step 1 nothing would be wrong, and the first optimizer step would add 8 bytes per "
    "parameter instead of 4",
    "graph": "each step would end with more than the step before it",
    "copy": "the two ranks would hold different amounts",
    "none": "each part of the state would be halved. How many MB are 4 bytes per parameter, and half of them?",
}


@exercise("3.1b", "each mistake shows in its own part of the memory, at its own point of the step.")
def exercise_3_1b(diagnose: Callable[[], dict[str, str]]) -> None:
    """diagnose() -> the mistake in each of the runs A to F of log_sharded_memory.py, one of SYMPTOMS_3_1B."""
    seen = diagnose()
    expect_answers(seen, "ABCDEF", SYMPTOMS_3_1B)
    for run, mistake in {
        "A": "gradients",
        "B": "graph",
        "C": "none",
        "D": "moments",
        "E": "copy",
        "F": "weights",
    }.items():
        if seen[run] != mistake:
            raise Wrong(
                f"for run {run} you say {seen[run]!r}. Then {SYMPTOMS_3_1B[seen[run]]}. Is that the case in run {run}?"
            )


def watch_zero_1(script: str | Path) -> list[dict]:
    """Let three ranks take three steps with the learner's functions. Return what each rank saw."""
    question = "Do all ranks call the same collectives in the same order, and do they agree on each source?"
    return reports_of_ranks("zero_1", 3, str(script), question=question)


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
    if max(shares) > 0.35:
        hint = "That is all of them: an optimizer makes moments for each parameter that it is given."
        if max(shares) < 0.99:
            hint = "Parameters differ in size: balance the numbers in them, not how many there are."
        shown = ", ".join(f"{share:.0%}" for share in shares)
        raise Wrong(f"the ranks keep {shown} of the moments, and none should keep more than 35%. {hint}")
    if sum(shares) < 0.99:
        raise Wrong(f"the ranks keep {sum(shares):.0%} of the moments together: does each parameter have an owner?")


# --- Lesson 3.2: FSDP2 -----------------------------------------------------------------------------------------------


# What each mistake of exercise 3.2a would show in the logs.
SHARDING_SYMPTOMS = {
    "none": "the loss would fall, and each rank would keep 16 / 2 bytes per parameter and call 11 all-gathers",
    "blocks only": "some parameters would be whole on every rank, with gradients that nobody averages",
    "root only": "a step would gather a single group of parameters",
    "optimizer first": "the optimizer would have no gradients to work with, so it would make no moments either",
    "own norm": "the two ranks would scale their gradients by different factors",
    "same batch": "the two ranks would have the same losses",
}


@exercise("3.2a", "five set-ups without an error, told apart by their numbers.")
def exercise_3_2a(diagnose: Callable[[], dict[str, str]]) -> None:
    """diagnose() -> the mistake in each of the runs A to E, one of SHARDING_SYMPTOMS."""
    seen = diagnose()
    expect_answers(seen, "ABCDE", SHARDING_SYMPTOMS)
    for run, mistake in {
        "A": "blocks only",
        "B": "own norm",
        "C": "none",
        "D": "root only",
        "E": "optimizer first",
    }.items():
        if seen[run] != mistake:
            symptom = SHARDING_SYMPTOMS[seen[run]]
            raise Wrong(
                f"for run {run} you say {seen[run]!r}. Then {symptom}. Does that fit everything in run {run}'s log?"
            )


def reports_of_sharding(name: str, script: str | Path) -> list[dict]:
    """Run a probe that calls the learner's shard(model) on two ranks. Return each rank's report."""
    try:
        return reports_of_ranks(name, 2, str(script))
    except Wrong as error:
        hint = ". Did you shard the model before its blocks?" if "Invariant" in str(error) else ""
        raise Wrong(f"{error}{hint}") from None


@exercise("3.2b", "half of the state on each rank, no group above the largest block, and few all-gathers.")
def exercise_3_2b(script: str | Path) -> None:
    """A file with shard(model), which shards a ResNet-18 in place, in few groups of limited size."""
    refuse_stub(script)
    reports = reports_of_sharding("sharded_resnet", script)
    for rank, report in enumerate(reports):
        unsharded = report["unsharded"]
        if unsharded:
            names = ", ".join([*unsharded[:3], "..."] if len(unsharded) > 3 else unsharded)
            raise Wrong(
                f"{len(unsharded)} parameters are not sharded ({names}): their gradients are not averaged over the "
                "ranks either. Which call takes what belongs to no group?"
            )
        if report["root"] > 0.01:
            raise Wrong(f"the root holds {report['root']:.0%} of the weights, and it stays gathered")
        if report["largest"] > 0.43:
            raise Wrong(f"one group holds {report['largest']:.0%} of the weights, and the largest block only 42%")
        if report["gathers"] < 2 * report["groups"]:
            raise Wrong(
                f"{report['gathers']} all-gathers in a step, for {report['groups']} groups besides the root: they are "
                "not freed between the forward and the backward pass"
            )
        if report["gathers"] > 7:
            raise Wrong(
                f"{report['gathers']} all-gathers in a step, and seven are enough. Each group costs two: which are so "
                "small that they could be one?"
            )
        if report["apart"] > 1e-9:
            raise Wrong(f"the gradients are off by {report['apart']:.1e} from those of one process")
        expect_close(report["state"], 32 / 2, f"rank {rank}'s bytes of state per parameter in float64", tolerance=0.02)


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
        hint = "Forward gathers every group. Backward gathers again what was freed: blocks, root, or both."
        if seen[0] == expected[0]:
            hint = "Each group's gradients are reduced once per step, after the last micro-batch."
        elif micro_batches > 1 and seen[0] == once:
            hint = "After a backward pass everything is freed: the next micro-batch gathers again."
        raise Wrong(f"{call} is {expected}, you say {tuple(seen)}. {hint}")


# --- Lesson 3.3: checkpoints in shards -------------------------------------------------------------------------------


@exercise("3.3a", "any number of ranks loads what any number wrote, and each reads only its own rows.")
def exercise_3_3a(load_slice: Callable[..., torch.Tensor]) -> None:
    """load_slice(pieces, read, total_rows, world_size, rank) -> this rank's rows of a weight that other ranks wrote."""
    for num_rows, writers, world_size in ((12, 2, 3), (101, 2, 3), (101, 3, 2), (100, 4, 1), (10, 3, 4), (5, 2, 4)):
        weight = torch.arange(2.0 * num_rows).view(num_rows, 2)
        files = {f"{number}.slice": rows for number, rows in enumerate(weight.chunk(writers))}
        firsts = [sum(len(rows) for rows in weight.chunk(writers)[:number]) for number in range(len(files))]
        pieces = [
            {"file": name, "first_row": first, "num_rows": len(files[name])}
            for name, first in zip(files, firsts, strict=True)
        ]
        expected = list(weight.chunk(world_size))
        expected += [weight[:0]] * (world_size - len(expected))
        for rank in range(world_size):
            _judge_slice(load_slice, pieces[::-1], files, expected[rank], num_rows, world_size, rank)


def _judge_slice(
    load_slice: Callable[..., torch.Tensor], pieces: list[dict], files: dict[str, torch.Tensor],
    expected: torch.Tensor, num_rows: int, world_size: int, rank: int,
) -> None:  # fmt: skip
    """Raise Wrong unless `load_slice` returns the `expected` rows, and reads no others."""
    rows_read = []

    def read(file: str, start: int, stop: int) -> torch.Tensor:
        if file not in files:
            raise Wrong(f"you read {file!r}; the pieces are in {', '.join(files)}")
        if not 0 <= start <= stop <= len(files[file]):
            raise Wrong(
                f"{where}: read({file!r}, {start}, {stop}), and this file holds {len(files[file])} rows. Count from "
                "the file's own first row, and skip the files that hold none of the rows"
            )
        rows_read.append(stop - start)
        return files[file][start:stop].clone()

    where = f"rank {rank} of {world_size}, {num_rows} rows in {len(files)} files"
    try:
        seen = load_slice([dict(piece) for piece in pieces], read, num_rows, world_size, rank)
    except (Wrong, NotImplementedError):
        raise
    except Exception as error:
        empty = " This rank has no rows, but its slice still has columns." if len(expected) == 0 else ""
        raise Wrong(f"{where}: your code raised {type(error).__name__}: {error}.{empty}") from error
    if not isinstance(seen, torch.Tensor):
        raise Wrong(f"{where}: return a tensor, not {seen!r}")
    if seen.shape != expected.shape:
        hint = "fully_shard cuts as torch.chunk does: each rank gets as many rows as rank 0, until none are left."
        if len(expected) == 0:
            hint = "This rank has no rows, but its slice still has columns: what does read(file, 0, 0) return?"
        elif len(seen) > len(expected):
            hint = "Some of these rows belong to other ranks: which rows of the weight does each file hold?"
        raise Wrong(f"{where}: the slice is {tuple(expected.shape)}, yours is {tuple(seen.shape)}. {hint}")
    if not torch.equal(seen, expected):
        hint = "Are they the right rows of the right files?"
        if torch.equal(seen.sort(dim=0).values, expected):
            hint = "They are the right rows in the wrong order: nobody promised that the pieces are sorted."
        raise Wrong(f"{where}: the values differ. {hint}")
    if sum(rows_read) > len(expected):
        raise Wrong(
            f"{where}: you read {sum(rows_read)} rows for a slice of {len(expected)}. A rank that reads whole files "
            "needs the memory and the time of a rank that is not sharded"
        )


@exercise("3.3b", "complete on every rank, or on none.")
def exercise_3_3b(script: str | Path) -> None:
    """A file with save(folder, rank, data, write), which marks a checkpoint of three ranks as complete, or does not."""
    refuse_stub(script)
    with tempfile.TemporaryDirectory() as folder:
        failed = None
        try:
            machinery.run_script(machinery.probe("sharded_save"), 3, folder, str(script))
        except Wrong as error:
            failed = error
        paths = [Path(folder) / f"{rank}.json" for rank in range(3)]
        reports = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    _judge_saves(reports, failed)


def _judge_saves(reports: list[dict[str, dict]], failed: Wrong | None) -> None:
    """Raise Wrong for the first promise that the ranks' reports show to be broken."""
    cases = ("slow", "full", "older", "mark")
    slow, full, older, mark = ([report.get(case, {}) for report in reports] for case in cases)
    for rank, seen in enumerate(slow):
        if seen.get("missing"):
            late = " and ".join(map(str, seen["missing"]))
            raise Wrong(
                f"rank {rank} wrote 'complete' when the slice of rank {late} was missing. It does not know when the "
                "others are done: who tells it?"
            )
    if marks := [rank for rank, seen in enumerate(slow) if seen.get("marks")][1:]:
        raise Wrong(f"rank {marks[0]} writes 'complete' as well: one rank must decide, and only it should write")
    for rank, seen in enumerate(full):
        if "raised" in seen:
            raise Wrong(
                f"rank {rank}'s disk was full. save raised {seen['raised']!r} there and left the other ranks waiting: "
                "how do they learn of it?"
            )
    if failed and not any(mark):
        _judge_failure(failed, " when rank 1's disk was full" if any(full) else "")
    if any(seen["returned"] is not True for seen in slow) or not slow[0]["complete"]:
        returned = [seen["returned"] for seen in slow]
        raise Wrong(
            f"when every rank could write, the ranks returned {returned} and 'complete' was "
            f"{'there' if slow[0]['complete'] else 'missing'}: expected True three times, and the mark"
        )
    if full[0]["complete"]:
        raise Wrong("rank 1's disk was full, and the checkpoint is marked as complete: rank 0 did not know of it")
    if any(seen["returned"] is not False for seen in full):
        returned = [seen["returned"] for seen in full]
        raise Wrong(f"rank 1's disk was full; the ranks returned {returned}, expected False three times")
    if older[0]["complete"]:
        raise Wrong(
            "the folder held an older checkpoint, and rank 1's disk was full. Now two slices are new, one is old, and "
            "the old mark calls the mixture complete"
        )
    if mixed := [rank for rank, seen in enumerate(older) if seen["mixed"]]:
        raise Wrong(
            f"rank {mixed[0]} wrote its slice while the older checkpoint was still marked as complete. A crash at "
            "that moment leaves a marked mixture. What has to happen before any rank writes?"
        )
    for rank, seen in enumerate(mark):
        if "raised" in seen:
            raise Wrong(
                f"every rank had written its slice, and then rank {rank} failed to write 'complete'. save raised "
                f"{seen['raised']!r} there, and the other ranks did not return False. How do they learn of it?"
            )
    if failed:
        _judge_failure(failed, " when rank 0 failed to write 'complete'")
    if any(seen["returned"] is not False for seen in mark):
        returned = [seen["returned"] for seen in mark]
        raise Wrong(f"rank 0 failed to write 'complete'; the ranks returned {returned}, expected False three times")


def _judge_failure(failed: Wrong, where: str) -> None:
    """Raise Wrong for a launch that failed, with a hint if it was at a full disk or waited in vain."""
    timed_out = any(words in str(failed) for words in ("imed out", "timeout", "onnection closed"))
    hint = f"{where}. Does each rank reach the same collectives, whether its write failed or not?"
    raise Wrong(f"{failed}{hint if timed_out or where else ''}")


# --- Lesson 3.4: DeepSpeed ZeRO --------------------------------------------------------------------------------------


@exercise("3.4a", "an update count, a gradient norm and a first loss told these runs apart.")
def exercise_3_4a(diagnose: Callable[[], dict[str, str]]) -> None:
    """diagnose() -> for each run A to E of deepspeed_step_logs.txt its mistake."""
    expected = {"A": "step once", "B": "divided twice", "C": "none", "D": "not gathered", "E": "clipped by hand"}
    signs = {
        "none": "Then nothing in its logs would be wrong. Average the two ranks' losses, and compare each step with "
        "the first line",
        "step once": "Then the engine would have made fewer updates than there are steps. Has it?",
        "divided twice": "Then its gradients would be half as long in every step. Are they?",
        "not gathered": "Then it would start from different weights, and its first loss would be wrong already. Is it?",
        "clipped by hand": "Clipping by hand has no effect on gradients that the engine has taken away. Whose losses "
        "would the run then have: those of the first line?",
        "not split": "Then both ranks would train on the same windows, with the same losses. Do they?",
    }
    seen = diagnose()
    expect_answers(seen, "ABCDE", signs)
    for run, mistake in seen.items():
        if mistake != expected[run]:
            raise Wrong(f"for run {run} you say {mistake!r}. {signs[mistake]}")


def judge_port(seen: list[dict]) -> None:
    """Raise Wrong unless the port's weights, updates, gradient norms and losses are those of one process."""
    report = seen[0]
    if report["wrong"]:
        raise Wrong(
            f"{len(report['wrong'])} of {report['parameters']} parameters do not have their start values, among them "
            f"{report['wrong'][0]}. Follow it through build_engine: what is its shape while it is filled, "
            "and what becomes of the new values when it is sharded again?"
        )
    for number, (step, right) in enumerate(zip(report["steps"], report["clipped"], strict=True), start=1):
        if step["updates"] != number:
            raise Wrong(
                f"after step {number} the engine has made {step['updates']} updates instead of {number}. How does it "
                "know that a part of a step is over?"
            )
        if math.isclose(step["norm"], right["norm"] / 2, rel_tol=1e-3):
            raise Wrong(
                f"in step {number} the gradients' norm is {step['norm']:.3f}, half of the {right['norm']:.3f} of one "
                "process. Who divides by the number of parts?"
            )
        unclipped = report["unclipped"][number - 1]
        if math.isclose(step["norm"], right["norm"], rel_tol=1e-4):
            continue
        if math.isclose(step["norm"], unclipped["norm"], rel_tol=1e-4):
            raise Wrong(
                f"in step {number} the run is where one process is that never clips. After engine.backward(), what is "
                "left in the parameters' .grad to clip?"
            )
        raise Wrong(
            f"in step {number} the gradients' norm is {step['norm']:.3f}, and {right['norm']:.3f} on one process. "
            "Compare the port line by line with what section 2 says of the engine's three calls"
        )
    for rank, own in enumerate(seen):
        for number, (step, right) in enumerate(zip(own["steps"], report["clipped"], strict=True), start=1):
            hint = "It is the mean over all windows of the step, on all ranks."
            if step["loss"] is not None and math.isclose(step["loss"], step["own"], rel_tol=1e-5):
                hint = "That is the mean over this rank's own windows. " + hint
            expect_close(step["loss"], right["loss"], f"step {number}'s loss on rank {rank}", 1e-4, hint)


@exercise("3.4b", "on two ranks in stage 3 the port computes what one process in plain PyTorch does.")
def exercise_3_4b(script: str | Path) -> None:
    """A file with build_engine(config, settings) and train_step(engine, parts, loss_of)."""
    refuse_stub(script)
    judge_port(reports_of_ranks("zero_3_engine", 2, str(script)))


# --- Lesson 3.5: choosing --------------------------------------------------------------------------------------------

MEMORY_LIMIT, TRAFFIC_LIMIT, BLOCK_TRAFFIC = 12.3e6, 4.3e6, 0.2e6  # bytes per rank


def judge_sharded_gpt(reports: list[dict]) -> None:
    """Raise Wrong unless every rank's report of sharded_gpt.py is within both limits."""
    for rank, report in enumerate(reports):
        peak, sent, calls = report["peak"], report["sent"], report["calls"]
        needs = f"rank {rank} has a peak of {peak / 1e6:.2f} MB and sends {sent / 1e6:.2f} MB"
        if report["apart"] > 1e-9:
            raise Wrong(
                f"the gradients are off by {report['apart']:.1e} from those of one process. Is every parameter part "
                "of a sharded module? Call fully_shard on the whole model last"
            )
        if peak > MEMORY_LIMIT:
            hint = "Which blocks' gathered weights are in memory at the peak, even if no block keeps any?"
            if not calls.get("allgather"):
                hint = "Nothing is sharded, so each rank keeps the whole state"
            elif calls["allgather"] == 1:
                hint = "All weights are gathered at once: shard each block first, then the model"
            elif calls["allgather"] <= calls.get("reduce_scatter", 0):
                hint = "Every block keeps its gathered weights: some of them must free theirs"
            elif sent + BLOCK_TRAFFIC <= TRAFFIC_LIMIT:
                hint = "It sends less than it may: let fewer blocks keep their gathered weights"
            raise Wrong(f"{needs}. The limit is {MEMORY_LIMIT / 1e6:.2f} MB. {hint}")
        if sent > TRAFFIC_LIMIT:
            raise Wrong(
                f"{needs}. It fits, but it sends more than the {TRAFFIC_LIMIT / 1e6:.2f} MB allowed. Each block that "
                "keeps its gathered weights saves the same traffic: how many must keep theirs?"
            )


@exercise("3.5a", "the step fits, and it sends no more than it must.")
def exercise_3_5a(script: str | Path) -> None:
    """A file with shard(model), which shards a GPT of eight blocks so that it fits and sends little."""
    refuse_stub(script)
    judge_sharded_gpt(reports_of_sharding("sharded_gpt", script))


@exercise("3.5b", "you read a strategy off its traffic, and you know what to change first.")
def exercise_3_5b(decide: Callable[[], dict[str, str]]) -> None:
    """decide() -> for each job in memory_and_traffic_per_rank.json what its owner should change first."""
    expected = {
        "A": "change the default", "B": "use DDP", "C": "nothing", "D": "reduce once", "E": "checkpoint activations"
    }  # fmt: skip
    evidence = {  # what to look at for each answer that is wrong
        "nothing": "Divide what a rank sends by (N-1)/N x 4 bytes per parameter. If it is more than 2, ask why.",
        "use DDP": "DDP keeps 16 bytes per parameter. With that in place of the job's state, does the peak still fit?",
        "change the default": "With DeepSpeed's default, gradients travel by all-reduce, although each rank owns a "
        "part of them. How much state does a rank keep, and which collectives does the job call?",
        "reduce once": "How many micro-batches does a step have?",
        "checkpoint activations": "Is the peak above the limit?",
    }
    seen = decide()
    expect_answers(seen, "ABCDE", evidence)
    for job, answer in expected.items():
        if seen[job] != answer:
            raise Wrong(f"job {job}: {seen[job]!r} is not what to change first. {evidence[seen[job]]}")
