"""The checks of chapter 3, lessons 3.1 to 3.5: right answers pass, wrong ones are rejected with help."""

import copy
import json
import math
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from answers import Call, OnRanks, assert_rejects, judge, printed, stub, written
from runs import ROOT

import checks
from checks import chapter_3, machinery

LESSONS = ROOT / "03-fsdp-deepspeed"
ON_RANKS = OnRanks({
    2: [
        "torch.distributed.fsdp",
        "deepspeed.runtime.zero.muon.muon_optimizer",  # takes a second, and DeepSpeed imports it for every engine
    ],
    3: ["torch.distributed.fsdp"],
})  # fmt: skip
launched, run_before = ON_RANKS.fixtures()


# --- 3.1a: the largest batch ------------------------------------------------------------------------------------------


def largest_batch(needed, limit, least=0):
    first = needed(1)
    sequence = needed(2) - first
    return max(least, (limit - first + sequence) // sequence)


def searched(needed, limit):
    batch = 0
    while needed(batch + 1) <= limit:
        batch += 1
    return batch


test_3_1a = judge(checks.exercise_3_1a, [largest_batch], [
    (stub, "not done yet"),
    (lambda needed, limit: limit // needed(1), "needed(1) includes the state"),
    (lambda needed, limit: limit // (needed(2) - needed(1)), "there before the first sequence"),
    (searched, "each is a run"),
    (lambda needed, limit: (limit - needed(0)) // (needed(1) - needed(0)), "a batch of 0"),
    (lambda needed, limit: largest_batch(needed, limit) - 1, "needed(1) already includes the first"),
    (lambda needed, limit: math.ceil((limit - needed(1)) / (needed(2) - needed(1))) + 1, "Round down"),
    (lambda needed, limit: largest_batch(needed, limit, least=-math.inf), "it is 0"),
    (lambda needed, limit: largest_batch(needed, limit) + 0.5, "a whole number"),
    (lambda needed, limit: None, "a whole number"),
])  # fmt: skip


# --- 3.1b: six runs whose state is sharded ----------------------------------------------------------------------------

STATES = {"A": "gradients", "B": "graph", "C": "none", "D": "moments", "E": "copy", "F": "weights"}
ON_RANKS.calls[2]["3.1b"] = Call("", machinery.probe("log_sharded_memory"))
test_3_1b = judge(checks.exercise_3_1b, [STATES], [
    (stub, "not done yet"),
    (STATES | {"A": "weights"}, "for run A you say 'weights'. Then from the first backward pass on, both ranks"),
    (STATES | {"F": "gradients"}, "after backward, and no longer after zero_grad. Is that the case in run F?"),
    (STATES | {"B": "none"}, "Then each part of the state would be halved. How many MB are"),
    (STATES | {"D": "weights"}, "at all four points. Is that the case in run D?"),
    (STATES | {"F": "moments"}, "the first optimizer step would add 8 bytes per parameter"),
    (STATES | {"F": "copy"}, "the two ranks would hold different amounts"),
    (STATES | {"D": "graph"}, "each step would end with more than the step before it"),
    (STATES | {"C": "leak"}, "for C you say 'leak', which is not one of 'weights', 'gradients',"),
    ({"A": "none"}, "return a dict with the keys A, B, C, D, E and F"),
    (None, "return a dict with the keys A, B, C, D, E and F; yours is None"),
], prepare="returned")  # fmt: skip


def test_3_1b_the_runs_show_what_the_check_says(launched):
    held = {}
    for run, numbers in re.findall(r"run (.), rank .(.*)", printed(launched(2)["3.1b"])):
        held.setdefault(run, []).append([float(number) for number in re.findall(r"[\d.]+", numbers)])
    assert list(held) == list(STATES)
    whole = 1_059_584 * 4 / 1e6  # MB of 4 bytes per parameter
    healthy = [whole * halves / 2 for halves in (1, 2, 4, 3, *(3, 4, 4, 3) * 2)]
    for run, mistake in STATES.items():
        more = {
            "none": [0] * 12,
            "weights": [0, *[whole] * 11],
            "copy": [0, *[whole] * 11],
            "gradients": [0, whole / 2, whole / 2, 0] * 3,
            "moments": [0, 0, *[whole] * 10],
            "graph": [0] * 3 + [7.0] * 4 + [14.0] * 4 + [21.0],
        }[mistake]
        for rank, numbers in enumerate(held[run]):
            extra = [0] * 12 if (mistake, rank) == ("copy", 1) else more
            expected = [a + b for a, b in zip(healthy, extra, strict=True)]
            assert numbers == pytest.approx(expected, abs=0.11), (run, rank)


# --- 3.1c: ZeRO-1 by hand ---------------------------------------------------------------------------------------------


def report(share=1 / 3, **first_step):
    """What a rank reports whose three steps are right, except for `first_step` or the `step` of that number."""
    right = {"equal": {"mean": 45, "sum": 0, "own": 0}, "unchanged": 0, "gradients": 0, "parameters": 45}
    steps = [copy.deepcopy(right) for _ in range(3)]
    steps[first_step.pop("step", 1) - 1] |= first_step
    return {"steps": steps, "share": share}


def equal(mean, total=0, own=0):
    return {"mean": mean, "sum": total, "own": own}


@pytest.fixture
def reported(monkeypatch):
    """Returns a function that lets the learner's three ranks report this, or fail with this, without starting any."""

    def prepare(outcome):
        def run_script(*arguments):
            raise machinery.Wrong(outcome)

        if isinstance(outcome, str):
            monkeypatch.setattr(machinery, "run_script", run_script)
        else:
            reports = outcome if isinstance(outcome, list) else [outcome] * 3
            monkeypatch.setattr(chapter_3, "watch_zero_1", lambda script: reports)
        return "zero_1.py"

    return prepare


test_3_1c = judge(checks.exercise_3_1c, [[report(0.32), report(0.33), report(0.35)]], [
    (report(equal=equal(0, own=45)), "Many equal an update with this rank's own gradient: average it"),
    (report(equal=equal(0, total=45)), "with the sum of the ranks' gradients: divide it by the world size"),
    (report(equal=equal(12), unchanged=33), "33 have not changed. Their owners have new values: how do they"),
    (report(equal=equal(3)), "after step 1, rank 0 has 3 of 45 parameters as one AdamW with the mean gradient would"),
    (report(equal=equal(3), step=2), "Step 1 was right. What is left from it when the next backward pass begins?"),
    ([report(), report(), report(gradients=33)], "rank 2 still has 33 gradients. Whose gradients does your optimizer"),
    (report(share=1.0), "the ranks keep 100%, 100%, 100% of the moments, and none should keep more than 35%. That is"),
    ([report(0.9), report(0.05), report(0.05)], "Parameters differ in size: balance the numbers in them"),
    ([report(0.326), report(0.318), report(0.356)], "keep 33%, 32%, 36% of the moments"),  # owners by turns
    (report(share=0.2), "the ranks keep 60% of the moments together: does each parameter have an owner?"),
    ("the script failed: RuntimeError: Timed out waiting 20000ms for send", "and do they agree on each source?"),
    ("it hangs: still running after 240 s.", "one rank called a collective that another rank never reached."),
    ("the script failed: NameError: name 'onwer' is not defined", "not right yet: the script failed: NameError"),
], prepare="reported")  # fmt: skip


# --- 3.2a: five runs to diagnose --------------------------------------------------------------------------------------

SHARDINGS = {"A": "blocks only", "B": "own norm", "C": "none", "D": "root only", "E": "optimizer first"}
ON_RANKS.calls[2]["3.2a"] = Call("", machinery.probe("log_fsdp2_steps"))
test_3_2a = judge(checks.exercise_3_2a, [SHARDINGS], [
    (stub, "not done yet"),
    (None, "return a dict with the keys A, B, C, D and E; yours is None"),
    (SHARDINGS | {"A": "none"},
        "for run A you say 'none'. Then the loss would fall, and each rank would keep 16 / 2 bytes"),
    (SHARDINGS | {"B": "same batch"},
        "for run B you say 'same batch'. Then the two ranks would have the same losses"),
    (SHARDINGS | {"C": "own norm"}, "for run C you say 'own norm'. Then the two ranks would scale their gradients"),
    (SHARDINGS | {"D": "blocks only"},
        "for run D you say 'blocks only'. Then some parameters would be whole on every rank"),
    (SHARDINGS | {"E": "root only"}, "for run E you say 'root only'. Then a step would gather a single group"),
    (SHARDINGS | {"E": "frozen"}, "for E you say 'frozen', which is not one of 'none', 'blocks only', 'root only'"),
], prepare="returned")  # fmt: skip


def test_3_2a_the_runs_show_what_the_check_says(launched):
    log = printed(launched(2)["3.2a"])
    assert re.findall("run (.)", log) == list(SHARDINGS)
    for run, lines in zip(SHARDINGS.values(), log.split("run ")[1:], strict=True):
        pattern = r"losses ([\d. ]+)  gradients x (\S+)  state (\S+) B/parameter  all-gathers +(\d+)  embedding (\S+)"
        losses, factors, states, gathers, embeddings = zip(*re.findall(pattern, lines), strict=True)
        assert (embeddings[0] != embeddings[1]) == (run == "blocks only")
        assert (factors[0] != factors[1]) == (run == "own norm")
        assert (len(set(losses[0].split())) == 1) == (run == "optimizer first")
        assert set(states) == {{"blocks only": "8.6", "optimizer first": "4.0"}.get(run, "8.0")}
        assert set(gathers) == {{"blocks only": "5", "root only": "1"}.get(run, "11")}
        assert losses[0] != losses[1]  # no run answers "same batch"


# --- 3.2b: a vision model, on two ranks -------------------------------------------------------------------------------

SHARD = "from torch.distributed.fsdp import fully_shard\n\n\ndef shard(model):\n"
STAGES = "    for layer in (model.layer1, model.layer2, model.layer3, model.layer4):\n        "
BY_BLOCK = f"{STAGES}for block in layer:\n            fully_shard(block)\n"
LARGE = "    for block in model.layer4:\n        fully_shard(block)\n"
GROUPS = f"    fully_shard([model.layer1, model.layer2, model.layer3])\n{LARGE}"
WHOLE = "    fully_shard(model)\n"
WRONG_3_2B = [
    (GROUPS, r"parameters are not sharded \(conv1.weight, .*Which call takes what belongs to no group"),
    (WHOLE + GROUPS, "Did you shard the model before its blocks"),
    (WHOLE, "the root holds 100% of the weights, and it stays gathered"),
    (LARGE + WHOLE, "the root holds 25% of the weights, and it stays gathered"),
    (f"{STAGES}fully_shard(layer)\n{WHOLE}", "one group holds 75% of the weights, and the largest block only 42%"),
    (f"    fully_shard([*model.layer1, *model.layer2, *model.layer3, *model.layer4])\n{WHOLE}", "group holds 100% of"),
    (BY_BLOCK + WHOLE, "17 all-gathers in a step, and seven are enough.* so small that they could be one"),
    (
        GROUPS.replace(")\n", ", reshard_after_forward=False)\n") + WHOLE,
        "4 all-gathers in a step, for 3 groups.* not freed",
    ),
]
test_3_2b = ON_RANKS.judge(
    checks.exercise_3_2b, 2, "sharded_resnet", SHARD, {"right": GROUPS + WHOLE}, dict(enumerate(WRONG_3_2B))
)


# --- 3.2c: collectives of a step --------------------------------------------------------------------------------------


def collectives(num_blocks, micro_batches, reshard_blocks, reshard_root):
    return micro_batches * (num_blocks + 1 + num_blocks * reshard_blocks + reshard_root), num_blocks + 1


def reduced_each_time(*case):
    return collectives(*case)[0], case[1] * collectives(*case)[1]


def gathered_once(num_blocks, micro_batches, *flags):
    return collectives(num_blocks, 1, *flags)


def root_forgotten(num_blocks, micro_batches, reshard_blocks, reshard_root):
    return collectives(num_blocks, micro_batches, reshard_blocks, False)


test_3_2c = judge(checks.exercise_3_2c, [collectives], [
    (stub, "not done yet"),
    (reduced_each_time, "is (260, 33), you say (260, 132). Each group's gradients are reduced once per step"),
    (gathered_once, "you say (65, 33). After a backward pass everything is freed"),
    (root_forgotten, "reshard_root=True) is (12, 6), you say (11, 6). Forward gathers every group"),
    (lambda *case: collectives(*case)[0], "should return two numbers, (all_gathers, reduce_scatters); yours is 11"),
])  # fmt: skip
COUNT = """
import json
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from shared import models

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
seen = []
cases = ((1, True, False), (3, True, False), (2, False, True), (2, True, True))
for micro_batches, reshard_blocks, reshard_root in cases:
    model = models.GPT(models.GPT_PRESETS["nano"])
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_blocks)
    fully_shard(model, reshard_after_forward=reshard_root)
    with CommDebugMode() as comm:
        for number in range(micro_batches):
            model.set_requires_gradient_sync(number == micro_batches - 1)
            model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    counts = {str(operation): number for operation, number in comm.get_comm_counts().items()}
    gathers = sum(number for name, number in counts.items() if "gather" in name)
    reduces = sum(number for name, number in counts.items() if "reduce_scatter" in name)
    seen.append([(5, micro_batches, reshard_blocks, reshard_root), (gathers, reduces)])
print(json.dumps(seen))
"""
ON_RANKS.calls[2]["count"] = Call(COUNT)


def test_3_2c_is_what_fsdp2_does(launched):
    """By a fake process group: nothing is sent, everything is counted."""
    for case, seen in json.loads(printed(launched(2)["count"])):
        assert tuple(seen) == collectives(*case)


# --- 3.3a: a slice, from other ranks' slices --------------------------------------------------------------------------


def chunked(num_rows, world_size, rank):
    most = math.ceil(num_rows / world_size)
    return min(num_rows, rank * most), min(num_rows, (rank + 1) * most)


def load_slice(pieces, read, total_rows, world_size, rank, cut=chunked, order=sorted):
    first, end = cut(total_rows, world_size, rank)
    found = [read(pieces[0]["file"], 0, 0)]
    for piece_first, file, piece_rows in order(
        (piece["first_row"], piece["file"], piece["num_rows"]) for piece in pieces
    ):
        start, stop = max(first, piece_first), min(end, piece_first + piece_rows)
        if start < stop:
            found.append(read(file, start - piece_first, stop - piece_first))
    return torch.cat(found)


def evened_out(num_rows, world_size, rank):
    few, more = divmod(num_rows, world_size)
    return rank * few + min(rank, more), (rank + 1) * few + min(rank + 1, more)


def everything_first(pieces, read, total_rows, world_size, rank):
    first, end = chunked(total_rows, world_size, rank)
    pieces = sorted(pieces, key=lambda piece: piece["first_row"])
    return torch.cat([read(piece["file"], 0, piece["num_rows"]) for piece in pieces])[first:end]


def global_rows(pieces, read, total_rows, world_size, rank):
    return torch.cat([read(piece["file"], *chunked(total_rows, world_size, rank)) for piece in pieces])


def no_rows_are(nothing):
    """An answer that returns `nothing()` where a rank has no rows."""

    def answer(*case):
        first, end = chunked(*case[2:])
        return load_slice(*case) if first < end else nothing()

    return answer


test_3_3a = judge(checks.exercise_3_3a, [load_slice], [
    (stub, "not done yet"),
    (everything_first, "rank 0 of 3, 12 rows in 2 files: you read 12 rows for a slice of 4. A rank that reads whole"),
    (partial(load_slice, order=list), "They are the right rows in the wrong order: nobody promised that the pieces"),
    (global_rows, "the slice is (4, 2), yours is (8, 2). Some of these rows belong to other ranks"),
    (lambda pieces, read, *case: read(pieces[0]["file"], *chunked(*case)), "12 rows in 2 files: the values differ"),
    (lambda pieces, read, *case: read(pieces[1]["file"], *chunked(*case)),
        "rank 1 of 3, 12 rows in 2 files: read('0.slice', 4, 8), and this file holds 6 rows. Count from"),
    (partial(load_slice, cut=evened_out),
        "rank 2 of 4, 10 rows in 3 files: the slice is (3, 2), yours is (2, 2). fully_shard cuts as torch.chunk does"),
    (no_rows_are(lambda: torch.empty(0)),
        "rank 3 of 4, 5 rows in 2 files: the slice is (0, 2), yours is (0,). This rank has no rows"),
    (no_rows_are(lambda: torch.cat([])), "This rank has no rows, but its slice still has columns."),
    (lambda *case: None, "return a tensor, not None"),
])  # fmt: skip


# --- 3.3b: complete or not at all, on three ranks ---------------------------------------------------------------------

SAVE = "import torch\nimport torch.distributed as dist\n\n\ndef save(folder, rank, data, write):\n"
MARK = '    if rank == 0:\n        write("complete", b"")\n'
REMOVE = '    if rank == 0:\n        (folder / "complete").unlink(missing_ok=True)\n'
TRY = '    try:\n        write(f"{rank}.slice", data)\n    except OSError:\n'
AGREE = f"    written = torch.ones(1)\n{TRY}        written.zero_()\n    dist.all_reduce(written, dist.ReduceOp.MIN)\n"
MARK_IF = MARK.replace("rank == 0", "rank == 0 and written")
UNTOLD = f"{REMOVE}    dist.barrier()\n{AGREE}{MARK_IF}    dist.barrier()\n    return bool(written)\n"
TRY_MARK = '    try:\n        if rank == 0 and written:\n            write("complete", b"")\n    except OSError:\n'
TELL = f"{TRY_MARK}        written.zero_()\n    dist.all_reduce(written, dist.ReduceOp.MIN)\n"
RIGHT_3_3B = UNTOLD.replace(f"{MARK_IF}    dist.barrier()\n", TELL)
WRONG_3_3B = [
    (f'    write(f"{{rank}}.slice", data)\n{MARK}    return True\n', "wrote 'complete' when the slice of rank .*2 was"),
    (f'    write(f"{{rank}}.slice", data)\n    dist.barrier()\n{MARK}    return True\n',
        "rank 1's disk was full. save raised .*No space left on device' there and left the other ranks waiting"),
    (f"{TRY}        pass\n    dist.barrier()\n{MARK}    return True\n", "checkpoint is marked as complete: rank 0 did"),
    (f'{AGREE}    if written:\n        write("complete", b"")\n    return bool(written)\n',
        "rank 1 writes 'complete' as well"),
    (f"{AGREE}{MARK_IF}    return bool(written)\n", "the old mark calls the mixture complete"),
    (f"{REMOVE}{AGREE}{MARK_IF}    return bool(written)\n", "while the older checkpoint was still marked as complete"),
    (RIGHT_3_3B.replace("bool(written)", "True"), r"returned \[True, True, True\], expected False three times"),
    (RIGHT_3_3B.replace("rank == 0 and written", "False"), "'complete' was missing: expected True three times"),
    (UNTOLD, "rank 0 failed to write 'complete'. save raised .*No space left on device' there, and the other ranks"),
    (RIGHT_3_3B.replace(TELL, f"{TRY_MARK}        written.zero_()\n    dist.barrier()\n"),
        r"rank 0 failed to write 'complete'; the ranks returned \[False, True, True\], expected False three times"),
]  # fmt: skip
test_3_3b = ON_RANKS.judge(
    checks.exercise_3_3b, 3, "sharded_save", SAVE, {"right": RIGHT_3_3B}, dict(enumerate(WRONG_3_3B))
)


@pytest.mark.parametrize(("last", "when"), [("full", "rank 1's disk was full"), ("mark", "rank 0 failed to write '")])
def test_3_3b_names_a_hang(last, when):
    """One rank returned at once when its write failed, and the others waited for it: without processes."""
    ended = {"marks": False, "mixed": False, "complete": False}
    cases = {"slow": {**ended, "returned": True, "complete": True}}
    if last == "mark":
        cases |= {case: {**ended, "returned": False} for case in ("full", "older")}
    reports = [{**cases, last: {}}, {**cases, last: {"returned": False}}, {**cases, last: {}}]
    failed = machinery.Wrong("the script failed: RuntimeError: Timed out waiting 30000ms for recv operation")
    with pytest.raises(machinery.Wrong, match=rf"Timed out .* when {when}.*\. Does each rank reach the same"):
        chapter_3._judge_saves(reports, failed)


# --- 3.4a: whose logs are these? --------------------------------------------------------------------------------------

ENGINES = {"A": "step once", "B": "divided twice", "C": "none", "D": "not gathered", "E": "clipped by hand"}
ON_RANKS.calls[2]["3.4a"] = Call("", machinery.probe("log_deepspeed_steps"))
test_3_4a = judge(checks.exercise_3_4a, [ENGINES], [
    (stub, "not done yet"),
    (None, "return a dict with the keys A, B, C, D and E; yours is None"),
    (ENGINES | {"A": "none"}, "for run A you say 'none'. Then nothing in its logs would be wrong"),
    (ENGINES | {"B": "none"}, "for run B you say 'none'. Then nothing in its logs would be wrong"),
    (ENGINES | {"C": "step once"}, "for run C you say 'step once'. Then the engine would have made fewer updates"),
    (ENGINES | {"D": "not split"}, "for run D you say 'not split'. Then both ranks would train on the same windows"),
    (ENGINES | {"E": "none"}, "for run E you say 'none'. Then nothing in its logs would be wrong"),
    (ENGINES | {"D": "clipped by hand"}, "for run D you say 'clipped by hand'. Clipping by hand has no effect"),
    (ENGINES | {"E": "divided twice"}, "for run E you say 'divided twice'. Then its gradients would be half as long"),
    (ENGINES | {"D": "gathered"}, "for D you say 'gathered', which is not one of 'none', 'step once'"),
], prepare="returned")  # fmt: skip


def read_logs(text: str) -> tuple[list[dict], dict[str, list[dict]]]:
    """Return the two reference lines, and for each run the lines of its ranks, as lists of numbers by name."""
    references, runs = [], {}
    for line in text.splitlines():
        columns = dict(re.findall(r"(loss|norm|updates) ([\d. ]+)", line))
        numbers = {name: [float(number) for number in values.split()] for name, values in columns.items()}
        run = re.match(r"run (.) ", line)
        (runs.setdefault(run[1], []) if run else references).append(numbers)
    return references, runs


def assert_shows_the_mistakes(text: str) -> None:
    """Raise AssertionError unless the logs show what the check says of each run."""
    (clipped, unclipped), runs = read_logs(text)
    steps = list(range(1, len(clipped["loss"]) + 1))
    assert list(runs) == list(ENGINES)
    for run, (zero, one) in runs.items():
        mistake = ENGINES[run]
        means = [(a + b) / 2 for a, b in zip(zero["loss"], one["loss"], strict=True)]
        assert (zero["updates"] != steps) == (mistake == "step once")
        if mistake in ("none", "divided twice"):
            assert means == pytest.approx(clipped["loss"], abs=2e-3)
            factor = 0.5 if mistake == "divided twice" else 1
            assert zero["norm"] == pytest.approx([factor * norm for norm in clipped["norm"]], rel=2e-2)
        assert (abs(means[0] - clipped["loss"][0]) > 0.01) == (mistake == "not gathered")
        assert zero["loss"] != one["loss"]
        if mistake == "clipped by hand":
            assert means == pytest.approx(unclipped["loss"], abs=1e-3)
            assert max(abs(a - b) for a, b in zip(means, clipped["loss"], strict=True)) > 2e-3


def test_3_4a_the_recorded_logs_show_what_the_check_says():
    assert_shows_the_mistakes(checks.recorded("deepspeed_step_logs.txt"))


def test_3_4a_deepspeed_still_makes_such_logs(launched):
    assert_shows_the_mistakes(printed(launched(2)["3.4a"]))


# --- 3.4b: a port to DeepSpeed ----------------------------------------------------------------------------------------

STUB_PORT = written(LESSONS / "04_deepspeed_zero.ipynb", "repair-port")
RIGHT_PORT = written(LESSONS / "solutions/04_deepspeed_zero.ipynb", "repair-port")
WRONG_PORTS = {
    "as it was": (
        re.sub(r"^raise NotImplementedError.*\n", "", STUB_PORT, flags=re.MULTILINE),
        "parameters do not have their start values",
    ),
    "not gathered": (
        re.sub(r", gathered=partial\(.*\)\)", ")", RIGHT_PORT),
        "parameters do not have their start values.* what is its shape while it is filled",
    ),
    "filled by each rank, without broadcast": (
        RIGHT_PORT.replace("modifier_rank=0", "modifier_rank=None"),
        "parameters do not have their start values.* what becomes of the new values",
    ),
    "step once": (
        RIGHT_PORT.replace("        engine.step()\n", "").replace(
            "    return distributed", "    engine.step()\n    return distributed"
        ),
        "the engine has made 0 updates instead of 1. How does it know that a part of a step is over",
    ),
    "divided twice": (RIGHT_PORT.replace("backward(loss)", "backward(loss / len(parts))"), "half of the"),
    "not through the engine": (
        RIGHT_PORT.replace("engine(tokens)", "engine.module(tokens)"),
        "Compare the port line by line with what section 2 says of the engine's three calls",
    ),
    "clipped by hand": (
        RIGHT_PORT.replace('    settings["gradient_clipping"] = 0.5\n', "").replace(
            "        engine.step()\n",
            "        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.5)\n        engine.step()\n",
        ),
        "where one process is that never clips. After engine.backward.*, what is left in the parameters' .grad",
    ),
    "own loss": (
        RIGHT_PORT.replace("distributed.global_sum(mean).item() / dist.get_world_size()", "mean.item()"),
        "step 1's loss on rank 0 is .* That is the mean over this rank's own windows",
    ),
    "no loss": (re.sub("    return distributed.*", "    return None", RIGHT_PORT), "loss on rank 0 should be a number"),
}
test_3_4b = ON_RANKS.judge(checks.exercise_3_4b, 2, "zero_3_engine", "", {"right": RIGHT_PORT}, WRONG_PORTS)


# --- 3.5a: which blocks keep their gathered weights, on two ranks -----------------------------------------------------

BLOCKS = "    for number, block in enumerate(model.blocks):\n        fully_shard(block, reshard_after_forward={})\n"
LAST_FOUR_KEPT = BLOCKS.format("number < 4") + WHOLE
ENDS_KEPT = BLOCKS.format("1 < number < 6") + WHOLE  # the first two and the last two

WRONG_3_5A = {
    "all free": (
        BLOCKS.format("True") + WHOLE,
        r"has a peak of 11\.\d\d MB and sends 5.02 MB. It fits, but it sends more than the 4.30 MB allowed. Each block",
    ),
    "all kept": (
        BLOCKS.format("False") + WHOLE,
        r"has a peak of 13\.\d\d MB and sends 3.44 MB. The limit is 12.30 MB. Every block keeps its gathered weights",
    ),
    "the first four kept": (
        BLOCKS.format("number >= 4") + WHOLE,
        r"has a peak of 1[23]\.\d\d MB and sends 4.23 MB. The limit is 12.30 MB. Which blocks' gathered weights",
    ),
    "every second one kept": (
        BLOCKS.format("number % 2 == 0") + WHOLE,
        "The limit is 12.30 MB. Which blocks' gathered",
    ),
    "blocks 3 to 6 kept": (BLOCKS.format("not 3 <= number <= 6") + WHOLE, "The limit is 12.30 MB. Which blocks'"),
    "the last one kept": (
        BLOCKS.format("number < 7") + WHOLE,
        "sends 4.83 MB. It fits, but it sends more than the 4.30",
    ),
    "the last two kept": (
        BLOCKS.format("number < 6") + WHOLE,
        "sends 4.63 MB. It fits, but it sends more than the 4.30",
    ),
    "the last three kept": (BLOCKS.format("number < 5") + WHOLE, "sends 4.43 MB. It fits, but .* how many must keep"),
    "the last five kept": (BLOCKS.format("number < 3") + WHOLE, "The limit is 12.30 MB. It sends less than it may"),
    "root only": (WHOLE, "All weights are gathered at once: shard each block first, then the model"),
    "blocks only": (
        BLOCKS.format("number < 4"),
        "the gradients are off by .* Call fully_shard on the whole model last",
    ),
    "root first": (WHOLE + BLOCKS.format("number < 4"), "Did you shard the model before its blocks"),
    "DDP": (
        "    from torch.nn.parallel import DistributedDataParallel\n    return DistributedDataParallel(model)\n",
        "Nothing is sharded, so each rank keeps the whole state",
    ),
}
RIGHT_3_5A = {"the last four kept": LAST_FOUR_KEPT, "the first two and the last two kept": ENDS_KEPT}
test_3_5a = ON_RANKS.judge(checks.exercise_3_5a, 2, "sharded_gpt", SHARD, RIGHT_3_5A, WRONG_3_5A)


def reports(launched: Callable, name: str) -> list[dict]:
    folder = launched(2)["exercise_3_5a", name].folder
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_3_5a_the_last_four_blocks_are_cheaper_than_the_first_four(launched):
    first_four, last_four = reports(launched, "the first four kept"), reports(launched, "the last four kept")
    for first, last in zip(first_four, last_four, strict=True):
        assert first["sent"] == last["sent"]
        assert last["peak"] < 0.97 * first["peak"]


def test_3_5a_keeping_the_last_two_blocks_costs_almost_nothing(launched):
    all_free = reports(launched, "all free")
    for name in ("the last one kept", "the last two kept"):
        for free, kept in zip(all_free, reports(launched, name), strict=True):
            assert kept["sent"] < free["sent"] and kept["peak"] == pytest.approx(free["peak"], rel=0.025)


# --- 3.5b: five jobs, and what to change first ------------------------------------------------------------------------

DECISION = {
    "A": "change the default", "B": "use DDP", "C": "nothing", "D": "reduce once", "E": "checkpoint activations"
}  # fmt: skip
test_3_5b = judge(checks.exercise_3_5b, [DECISION], [
    (stub, "not done yet"),
    (DECISION | {"A": "nothing"}, "job A: 'nothing' is not what to change first. Divide what a rank sends by (N-1)/N"),
    (DECISION | {"A": "use DDP"}, "job A: 'use DDP' is not what to change first. DDP keeps 16 bytes"),
    (DECISION | {"B": "nothing"}, "job B: 'nothing' is not"),
    (DECISION | {"C": "change the default"}, "job C: 'change the default' is not what to change first. With DeepSpeed"),
    (DECISION | {"D": DECISION["E"]}, "job D: 'checkpoint activations' is not what to change first. Is the peak"),
    (DECISION | {"E": "reduce once"}, "job E: 'reduce once' is not what to change first. How many micro-batches"),
    (DECISION | {"E": "ZeRO-3"}, "for E you say 'ZeRO-3', which is not one of 'nothing', 'use DDP', 'change the"),
    (None, "return a dict with the keys A, B, C, D and E; yours is None"),
], prepare="returned")  # fmt: skip


def test_3_5b_the_decision_follows_from_the_log():
    log = checks.recorded("memory_and_traffic_per_rank.json")
    parameters, num_ranks = log["parameters"], log["ranks"]

    def decide(job: dict, rank: str) -> str:
        state, peak, sent = (job[rank][key] for key in ("state", "peak", "sent"))
        rounds = sum(sent.values()) / (4 * parameters * (num_ranks - 1) / num_ranks)
        with_ddp = peak - state + 16 * parameters
        if peak > job["gpu_bytes"]:
            assert state < 5 * parameters and peak > 4 * state  # sharded already, and the rest is not state
            return "checkpoint activations"
        if job["micro_batches"] > 1 and rounds > 1.9 * job["micro_batches"]:
            return "reduce once"
        if state < 15 * parameters and with_ddp < 0.9 * job["gpu_bytes"]:
            return "use DDP"
        assert with_ddp > 1.1 * job["gpu_bytes"]
        if sent.get("allreduce", 0) > 0.9 * 2 * parameters * 4 * (num_ranks - 1) / num_ranks:
            assert rounds == pytest.approx(3, rel=0.05)
            return "change the default"
        assert rounds == pytest.approx(2, rel=0.05)
        return "nothing"

    for rank in range(num_ranks):
        assert {name: decide(job, f"rank {rank}") for name, job in log["jobs"].items()} == DECISION


# --- scripts that are stubs -------------------------------------------------------------------------------------------

STUBS = {
    checks.exercise_3_1c: 'raise NotImplementedError("write both functions")\n',
    checks.exercise_3_2b: SHARD + "    raise NotImplementedError\n",
    checks.exercise_3_3b: SAVE + "    raise NotImplementedError  # delete this line\n" + RIGHT_3_3B,
    checks.exercise_3_4b: STUB_PORT,
    checks.exercise_3_5a: SHARD + "    raise NotImplementedError\n",
}


@pytest.mark.parametrize("check", STUBS)
def test_a_script_that_is_a_stub_is_not_done_yet(check, tmp_path, capsys):
    (tmp_path / "answer.py").write_text(STUBS[check])
    assert_rejects(check, tmp_path / "answer.py", "not done yet", capsys)
