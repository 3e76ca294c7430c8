"""The checks of chapter 1's exercises accept right answers, and reject the stub and plausible mistakes with help."""

import json
import re
import runpy
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from answers import Call, assert_rejects, judge, launch_together, replay, stub
from notebook_rules import ROOT, Notebook

import checks
from checks import chapter_1, machinery

CHAPTER = ROOT / "01-ddp-pytorch-only"
NOT_DONE_YET = "not done yet: replace `raise NotImplementedError`"


def script_of(lesson: Path, name: str) -> str:
    """The file of this name, as a cell of the lesson writes it."""
    (script,) = (cell.body for cell in Notebook(lesson).cells if Path(cell.target).name == name)
    return script


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """What two ranks do with all answers of 1.2c, 1.3b and 1.3c, and in the runs of 1.3a, in one launch."""
    accuracies = map(accuracy, (RIGHT_1_2c, *dict(WRONG_1_2c)))
    ddps = map(small_ddp, (MY_DDP, *(source for source, _ in WRONG_1_3b.values())))
    calls = {call: call for call in (*accuracies, *ddps, RUNS_1_3a, *CALLS_1_3c, LARGE_GRADIENTS)}
    return launch_together(tmp_path_factory.mktemp("calls"), 2, calls)


@pytest.fixture
def ran(monkeypatch, on_two_ranks):
    """Lets a check find what the two ranks of a call have done already."""
    return lambda call: replay(monkeypatch, call, on_two_ranks[call])


# --- 1.1a: a resume that lacks something -----------------------------------------------------------------------------


def restored(*names: str, more: int = 0) -> Callable:
    """An answer that does what `names` say, in order, and returns the number of finished epochs plus `more`.

    A name is a part to restore, "seed" or "replay", the colleague's substitutes for the generator and the schedule.
    """

    def resume(state, model, optimizer, scheduler):
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        for name in names:
            if name == "seed":
                torch.manual_seed(0)
            elif name == "replay":
                for _ in range(state["epochs_done"]):
                    scheduler.step()
            elif name == "random":
                torch.set_rng_state(state["random"])
            else:
                parts[name].load_state_dict(state[name])
        return state["epochs_done"] + more

    return resume


WRONG_1_1a = {
    "the stub": (stub, NOT_DONE_YET),
    "the colleague's": (restored("seed", "model", "replay", more=1), "should be 3, since 0, 1 and 2 are done"),
    "nothing returned": (lambda *arguments: None, "resume() returned None"),
    "weights alone": (restored("model"), "no loss is right: step 1"),
    "dropout's generator forgotten": (
        restored("model", "optimizer", "scheduler"),
        "on what dropout draws: is one of them not as it was saved?",
    ),
    "dropout's generator at its start": (
        restored("seed", "model", "optimizer", "scheduler"),
        "on what dropout draws: is one of them not as it was saved?",
    ),
    "weights forgotten": (restored("optimizer", "scheduler", "random"), "It depends on the weights"),
    "optimizer forgotten": (
        restored("model", "scheduler", "random"),
        "1 of 4 losses are right, then they differ: step 2 should have",
    ),
    "optimizer forgotten, schedule replayed": (restored("model", "replay", "random"), "what does Adam remember?"),
    "schedule replayed on the restored rate": (
        restored("model", "optimizer", "replay", "random"),
        "a learning rate of 0.0001 instead of 0.001",
    ),
    "schedule forgotten": (restored("model", "optimizer", "random"), "which epoch does the schedule count?"),
}
RIGHT_1_1a = [
    restored("model", "optimizer", "scheduler", "random"),
    restored("model", "replay", "optimizer", "random"),
]
test_1_1a = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")(  # the replay
    judge(checks.exercise_1_1a, RIGHT_1_1a, WRONG_1_1a)
)


# --- 1.1b: the gradient of a batch in parts --------------------------------------------------------------------------


def accumulated(
    part_loss: Callable, before_part=lambda model: None, after_part=lambda loss: loss.backward()
) -> Callable:
    """An answer that calls backward() for `part_loss(logits, labels, whole batch, number of parts)` of each part."""

    def accumulate(model, images, labels, sizes):
        for part, part_labels in zip(images.split(sizes), labels.split(sizes), strict=True):
            before_part(model)
            after_part(part_loss(model(part), part_labels, len(images), len(sizes)))

    return accumulate


def right_loss(logits, labels, whole, parts):
    return F.cross_entropy(logits, labels, reduction="sum") / whole


RIGHT_1_1b = [
    accumulated(right_loss),
    accumulated(lambda logits, labels, whole, parts: F.cross_entropy(logits, labels) * len(labels) / whole),
]
WRONG_1_1b = {
    "the stub": (stub, NOT_DONE_YET),
    "means added up": (
        accumulated(lambda logits, labels, whole, parts: F.cross_entropy(logits, labels)),
        "with parts of [4, 4, 4] the gradient should be the whole batch's, but it has 3.000 times its length",
    ),
    "a mean of means": (
        accumulated(lambda logits, labels, whole, parts: F.cross_entropy(logits, labels) / parts),
        "with parts of [6, 5, 1] the gradient should be the whole batch's",
    ),
    "sums, not divided": (
        accumulated(lambda logits, labels, whole, parts: F.cross_entropy(logits, labels, reduction="sum")),
        "it has 12.000 times its length",
    ),
    "zero_grad before each part": (
        accumulated(right_loss, before_part=lambda model: model.zero_grad()),
        "What does backward() add to .grad for each part?",
    ),
    "the whole batch at once": (
        lambda model, images, labels, sizes: F.cross_entropy(model(images), labels).backward(),
        "3 parts, and backward() ran 1 time(s)",
    ),
    "all parts' losses added up first": (
        lambda model, images, labels, sizes: sum(
            F.cross_entropy(model(part), part_labels, reduction="sum") / len(images)
            for part, part_labels in zip(images.split(sizes), labels.split(sizes), strict=True)
        ).backward(),
        "3 parts, and backward() ran 1 time(s)",
    ),
    "backward forgotten": (accumulated(right_loss, after_part=lambda loss: None), "call backward() for every part"),
}
test_1_1b = judge(checks.exercise_1_1b, RIGHT_1_1b, WRONG_1_1b)


# --- 1.1c: the bytes of a checkpoint ---------------------------------------------------------------------------------


def weight_bytes(model) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


RIGHT_1_1c = [lambda model: 3 * weight_bytes(model), lambda model: 3 * weight_bytes(model) * 1.005]
WRONG_1_1c = {
    "the stub": (stub, NOT_DONE_YET),
    "without Adam": (weight_bytes, "Adam keeps two more tensors"),
    "one moment": (lambda model: 2 * weight_bytes(model), "Adam keeps two more tensors"),
    "with gradients": (lambda model: 4 * weight_bytes(model), "expected 8,043,867. A checkpoint holds no gradients"),
    "always 4 bytes": (
        lambda model: 12 * sum(p.numel() for p in model.parameters()),
        "A number does not always take 4 bytes",
    ),
    "megabytes": (lambda model: 3 * weight_bytes(model) / 1e6, "Return bytes, not kilobytes or megabytes"),
    "numbers, not bytes": (lambda model: 3 * sum(p.numel() for p in model.parameters()), "how many numbers they are"),
}
test_1_1c = judge(checks.exercise_1_1c, RIGHT_1_1c, WRONG_1_1c)


# --- 1.2a: a diagnosis ------------------------------------------------------------------------------------------------

RIGHT_1_2a = {"A": "weights", "B": "summed", "C": "samples", "D": "correct"}


def test_the_runs_have_the_faults_that_the_check_expects():
    faults = runpy.run_path(str(machinery.probe("log_averaging_by_hand")))["FAULTS"]
    assert faults == RIGHT_1_2a == {run: cause for run, (cause, _) in chapter_1.RUNS_1_2A.items()}


test_1_2a = judge(checks.exercise_1_2a, [lambda: dict(RIGHT_1_2a)], [
    (stub, "not done yet"),
    (lambda: None, "keys A, B, C and D"),
    (lambda: {**RIGHT_1_2a, "D": "?"}, "for D you say '?', which is not one of 'correct', 'weights', 'samples'"),
    (lambda: {**RIGHT_1_2a, "A": "forgotten"},
     "equal before step 1 and different after it. Compare both ranks' weights"),
    (lambda: {**RIGHT_1_2a, "B": "correct"}, "run B is not 'correct'. The ranks agree with each other"),
    (lambda: {**RIGHT_1_2a, "C": "correct"}, "run C is not 'correct'. Read both ranks' samples"),
    (lambda: {**RIGHT_1_2a, "D": "forgotten"}, "run D is not 'forgotten'. In a forgotten run"),
])  # fmt: skip


# --- 1.2b: a ring -----------------------------------------------------------------------------------------------------

RING = """
    n = len(chunks)
    for step in range(2 * (n - 1)):
        leaves, arrives = (rank - step) % n, (rank - step - 1) % n
        received = exchange(chunks[leaves])
        chunks[arrives] = chunks[arrives] + received if step < n - 1 else received
    return chunks
"""
WRONG_1_2b = [
    ("raise NotImplementedError", "not done yet"),
    (RING.replace("return chunks", "return sum(chunks)"), "return the list of the 3 chunks, 2 numbers each"),
    (RING.replace("2 * (n - 1)", "n - 1"), "exchange() was called 2 times. The first round alone"),
    (RING.replace(" if step < n - 1 else received", ""), "they replace a chunk, and are not added"),
    (RING.replace("(rank - step - 1) % n", "(rank - step) % n"), "holds numbers of other chunks"),
    (RING.replace("(rank - step - 1) % n", "(rank - step + 1) % n"), "holds numbers of other chunks"),
    (RING.replace("step < n - 1", "step < n - 2"), "A finished sum has been overwritten, or never came"),
    (
        """
        total = [chunk.clone() for chunk in chunks]
        for number in range(len(chunks)):
            traveling = chunks[number]
            for _ in range(len(chunks) - 1):
                traveling = exchange(traveling)
                total[number] += traveling
        return total
        """,
        "the sum is right, and rank 0 has sent 6 chunks; a ring sends 4",
    ),
    (
        """
        import torch
        traveling = torch.cat(chunks)
        total = traveling.clone()
        for _ in range(len(chunks) - 1):
            traveling = exchange(traveling)
            total += traveling
        return list(total.split(2))
        """,
        "sends 6 numbers at once; a chunk has 2",
    ),
]


def ring(body: str) -> Call:
    head = "import torch.distributed as dist\n\n\ndef ring_all_reduce(chunks, rank, exchange):\n"
    source = head + textwrap.indent(textwrap.dedent(body), "    ")
    return Call(source, machinery.probe("ring_all_reduce"), arguments=(json.dumps(chapter_1.RING_CHUNKS),))


@pytest.fixture(scope="module")
def on_three_ranks(tmp_path_factory):
    """What three ranks do with each ring, all of them in one launch."""
    rings = [ring(body) for body in (RING, *dict(WRONG_1_2b))]
    return launch_together(tmp_path_factory.mktemp("rings"), 3, {call: call for call in rings})


@pytest.fixture
def ran_by_three(monkeypatch, on_three_ranks):
    return lambda call: replay(monkeypatch, call, on_three_ranks[call])


test_1_2b = judge(
    checks.exercise_1_2b,
    [ring(RING)],
    [(ring(body), because) for body, because in WRONG_1_2b],
    prepare="ran_by_three",
)


# --- 1.2c: an accuracy ------------------------------------------------------------------------------------------------

RIGHT_1_2c = """
    counts = torch.tensor([hits, samples])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()
"""
WRONG_1_2c = [
    ("raise NotImplementedError", "not done yet"),
    (
        """
        accuracy = torch.tensor(hits / samples)
        dist.all_reduce(accuracy)
        return accuracy.item() / dist.get_world_size()
        """,
        "mean of the ranks' accuracies",
    ),
    (
        """
        counts = torch.tensor([hits, samples])
        dist.reduce(counts, dst=0)
        return counts[0] / counts[1] if dist.get_rank() == 0 else hits / samples
        """,
        "The ranks have different answers",
    ),
]


def accuracy(body: str) -> Call:
    head = "import torch\nimport torch.distributed as dist\n\n\ndef global_accuracy(hits, samples):\n"
    source = head + textwrap.indent(textwrap.dedent(body), "    ")
    return Call(source, machinery.probe("global_accuracy"), arguments=(json.dumps(chapter_1.COUNTS_1_2C),))


test_1_2c = judge(
    checks.exercise_1_2c,
    [accuracy(RIGHT_1_2c)],
    [(accuracy(body), because) for body, because in WRONG_1_2c],
    prepare="ran",
)


@pytest.fixture
def two_ranks_say(monkeypatch):
    """Lets a test say what the check's two ranks return, or how they fail, without starting any."""

    def prepare(answers):
        def run_script(script, nproc, folder, exercise, cases):
            if isinstance(answers, str):
                raise machinery.Wrong(answers)
            for rank, answer in enumerate(answers):
                Path(folder, f"{rank}.json").write_text(json.dumps(answer))

        monkeypatch.setattr(machinery, "run_script", run_script)
        return "exercise.py"

    return prepare


test_1_2c_in_words = judge(checks.exercise_1_2c, [], {
    "hits added, and samples not": ([[47 / 50, 37 / 4], [47 / 10, 37 / 36]], "Did you add up the samples too"),
    "all_reduce taken for its result": (
        "the script failed: [rank0]: TypeError: 'NoneType' object is not subscriptable",
        "`all_reduce` returns nothing: it writes the sum over the tensor",
    ),
    "a rank that does not call": (  # what two ranks say where one of them reaches no all_reduce
        "the script failed: [rank0]: RuntimeError: [gloo] Connection closed by peer. "
        "This is typically caused by a remote worker crashing. GLHF!",
        re.compile(r"Did every rank call every collective.*Connection closed by peer\)"),
    ),
}, prepare="two_ranks_say")  # fmt: skip


# --- 1.3a: a diagnosis ------------------------------------------------------------------------------------------------

LESSON_1_3 = CHAPTER / "03_distributed_data_parallel.ipynb"
RUNS_1_3a = Call("", machinery.probe("log_ddp_epochs"))
RIGHT_1_3a = {"A": "own accuracy", "B": "none", "C": "bare model", "D": "padding", "E": "no set_epoch"}


def diagnosis(**changed):
    return lambda: RIGHT_1_3a | changed


WRONG_1_3a = [
    (stub, "not done yet"),
    (lambda: None, "return a dict with the keys A, B, C, D and E; yours is None"),
    (diagnosis(A="none"), "for run A you say 'none'. Then nothing in its logs would be wrong"),
    (diagnosis(A="bare model"), "for run A .* the two ranks' weights would differ. Is that so in run A?"),
    (diagnosis(B="no set_epoch"), "for run B .* begin both epochs with the same samples"),
    (diagnosis(C="own accuracy"), "for run C .* report different accuracies although their weights are equal"),
    (diagnosis(E="padding"), "for run E .* train on more than the 101 samples"),
    (diagnosis(D="padded"), "for D you say 'padded', which is not one of 'own accuracy', 'bare model', 'padding'"),
]
test_1_3a = judge(
    checks.exercise_1_3a, [diagnosis()], [(answer, re.compile(because)) for answer, because in WRONG_1_3a]
)


def test_the_runs_of_1_3a_show_what_the_check_says(on_two_ranks):
    machinery.expect_success(on_two_ranks[RUNS_1_3a].ended.exit_code, on_two_ranks[RUNS_1_3a].ended.errors)
    (printed, _) = on_two_ranks[RUNS_1_3a].ended.printed
    assert re.findall("run (.)", printed) == list(RIGHT_1_3a)
    for run, lines in zip(RIGHT_1_3a.values(), printed.split("run ")[1:], strict=True):
        logs = re.findall(r"trained on (.+?) \.\.\. \((\d+) samples\)  sum of weights +(\S+)  accuracy (\S+)", lines)
        (first, samples, weights, accuracies) = zip(*logs, strict=True)  # rank 0's two epochs, then rank 1's
        assert (samples[0] + samples[2] != "5150") == (run == "padding")
        assert (first[0] == first[1] and first[2] == first[3]) == (run == "no set_epoch")
        assert (weights[:2] != weights[2:]) == (run == "bare model")
        assert (accuracies[:2] != accuracies[2:]) == (run == "own accuracy")


# --- 1.3b: a small DDP ------------------------------------------------------------------------------------------------

MY_DDP = """
import torch.distributed as dist

def attach(model):
    pending = []
    def start(parameter):
        work = dist.all_reduce(parameter.grad, async_op=True)
        pending.append((parameter, work))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(start)
    return pending

def finish(pending):
    for parameter, work in pending:
        work.wait()
        parameter.grad /= dist.get_world_size()
    pending.clear()
"""
DIVIDE = "        parameter.grad /= dist.get_world_size()\n"
WAIT = "        work.wait()\n"
BY_HAND = """
import torch.distributed as dist

def attach(model):
    return list(model.parameters())

def finish(pending):
    for parameter in pending:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
"""
WRONG_1_3b = {
    "not divided": (MY_DDP.replace(DIVIDE, ""), "on rank 0, 4 of 4 gradients .* are the sum. Divide by the world size"),
    "divided at once": (
        MY_DDP.replace(DIVIDE, "").replace("        pending.append", DIVIDE + "        pending.append"),
        "are the sum. Divide by the world size after `wait",
    ),
    "not waited for": (MY_DDP.replace(WAIT, ""), "half of this rank's own. You divided a gradient whose sum had not"),
    "not emptied": (MY_DDP.replace("    pending.clear()\n", ""), "in step 2 .* half of the mean. Step 1 was right"),
    "the loop's variable": (MY_DDP.replace("start(parameter)", "start(_)"), "3 of 4 gradients .* its last value"),
    "not in the background": (
        MY_DDP.replace(", async_op=True", "").replace(WAIT, ""),
        "4 all-reduces made backward.. wait",
    ),
    "growing forever": (
        MY_DDP.replace("(parameter, work)", "(parameter.grad, work)")
        .replace("for parameter, work", "for gradient, work")
        .replace("parameter.grad /=", "gradient /=")
        .replace("    pending.clear()\n", ""),
        "8 entries are left in `pending` after two steps",
    ),
    "after backward": (BY_HAND, "no all-reduce had started when backward.. returned"),
}


def small_ddp(source: str) -> Call:
    return Call(source, machinery.probe("gradient_hooks"))


test_1_3b = judge(
    checks.exercise_1_3b,
    [small_ddp(MY_DDP)],
    {name: (small_ddp(source), re.compile(because)) for name, (source, because) in WRONG_1_3b.items()},
    prepare="ran",
)


def test_ddp_of_the_lesson_is_a_stub(tmp_path, capsys):
    (tmp_path / "my_ddp.py").write_text(script_of(LESSON_1_3, "my_ddp.py"))
    assert_rejects(checks.exercise_1_3b, tmp_path / "my_ddp.py", "not done yet", capsys)


# --- 1.3c: lists of batches of different lengths ----------------------------------------------------------------------

STUB_1_3c = 'raise NotImplementedError("repair train_epoch, then delete this line")\n'
COLLEAGUE_1_3c = script_of(LESSON_1_3, "uneven.py").replace(STUB_1_3c, "")
GATHERED_1_3c = script_of(CHAPTER / "solutions" / LESSON_1_3.name, "uneven.py")
SUMMED_1_3c = """
import torch
import torch.nn.functional as F
from shared import distributed

def train_epoch(ddp_model, batches, optimizer):
    (images, labels), step, totals = batches[0], 0, torch.zeros(2, dtype=torch.float64)
    empty = images[:0], labels[:0]
    while True:
        images, labels = batches[step] if step < len(batches) else empty
        count = distributed.global_sum(torch.tensor(len(labels)))
        if count == 0:
            return totals[0] / totals[1]
        loss = F.cross_entropy(ddp_model(images), labels, reduction="sum") / count * 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        totals += torch.stack([distributed.global_sum(loss) / 2 * count, count])
        step += 1
"""
ALL_STEPS = {"min(": "max("}  # of the colleague's: each rank trains on all of its batches, so one leaves early
WRONG_1_3c = {
    "the colleague's": (COLLEAGUE_1_3c, {}, "takes 3 steps, and its weights are not those of one process. Has every"),
    "alone in a step": (
        COLLEAGUE_1_3c,
        ALL_STEPS | {"loss = F": "count = distributed.global_sum(torch.tensor(len(labels)))\n        loss = F"}
        | {"labels)\n        optimizer": "labels, reduction='sum') / count * 2\n        optimizer"},
        "one rank calls a collective that the other never reaches. Count the steps",
    ),
    "samples left out": (
        GATHERED_1_3c,
        {"max(map(len, sizes))": "min(map(len, sizes))"},
        "on rank 1, rank 0 takes 1 optimizer step.s., expected 3. Whose samples are left out",
    ),
}  # fmt: skip


def uneven(source: str, sizes: list) -> Call:
    return Call(source, machinery.probe("uneven_inputs"), arguments=(json.dumps(sizes),))


def changed(source: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


ANSWERS_1_3c = [GATHERED_1_3c, SUMMED_1_3c, *(changed(*case[:2]) for case in WRONG_1_3c.values())]
CALLS_1_3c = [uneven(answer, sizes) for answer in ANSWERS_1_3c for sizes in chapter_1.SIZES_1_3C]


@pytest.fixture
def trained(monkeypatch, on_two_ranks, tmp_path):
    """Lets the check find what the two ranks have done already with an answer and each of its lists of batches."""

    def prepare(answer):
        def run_train_epoch(script, *calls):
            launched = [on_two_ranks[uneven(answer, sizes)] for (sizes,) in calls]
            for one in launched:
                machinery.expect_success(one.ended.exit_code, one.ended.errors)
            return [[json.loads((one.folder / f"{rank}.json").read_text()) for rank in (0, 1)] for one in launched]

        monkeypatch.setattr(chapter_1, "run_train_epoch", run_train_epoch)
        (tmp_path / "uneven.py").write_text(answer)
        return tmp_path / "uneven.py"

    return prepare


test_1_3c = judge(
    checks.exercise_1_3c,
    ANSWERS_1_3c[:2],
    {
        name: (answer, re.compile(because))
        for (name, (*_, because)), answer in zip(WRONG_1_3c.items(), ANSWERS_1_3c[2:], strict=True)
    }
    | {"the stub": (script_of(LESSON_1_3, "uneven.py"), "not done yet")},
    prepare="trained",
)


def ends(ending="returns", steps=3, weights=(1.0,), returned=2.0):
    """What a rank reports of one call."""
    return {"ending": ending, "returned": returned, "steps": steps, "weights": weights} | {
        "expected": [1.0], "expected_loss": 2.0,
    }  # fmt: skip


@pytest.fixture
def two_ranks_end(monkeypatch, tmp_path):
    """Lets a test say how train_epoch ends on both ranks in each case, without starting any."""

    def prepare(reports):
        monkeypatch.setattr(chapter_1, "run_train_epoch", lambda script, *calls: [reports] * len(calls))
        (tmp_path / "uneven.py").write_text("def train_epoch(ddp_model, batches, optimizer): ...")
        return tmp_path / "uneven.py"

    return prepare


test_1_3c_in_words = judge(checks.exercise_1_3c, [[ends(), ends()]], [
    ([ends(), ends("RuntimeError: Timed out")], "(Rank 1 said: RuntimeError: Timed out)"),
    ([ends(), ends("ValueError")], "rank 1 ends with ValueError"),
    ([ends(steps=4), ends(steps=4)], "rank 0 takes 4 optimizer step(s), expected 3. In which of them does nobody"),
    ([ends(), ends(weights=(float("nan"),))], "rank 1 takes 3 steps, and its weights are not those of one process"),
    ([ends(returned="None"), ends()], "the mean loss that rank 0 returns should be a number, and is 'None'"),
    ([ends(), ends(returned=2.5)], "the mean loss that rank 1 returns is 2.5, expected 2. The 20 samples of both"),
], prepare="two_ranks_end")  # fmt: skip


# --- 1.3: DDP divides before it adds ----------------------------------------------------------------------------------

LARGE_GRADIENTS = Call("""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from shared import distributed

worker = distributed.join()
model = nn.Linear(1, 1, bias=False)
DistributedDataParallel(model)(torch.full((1, 1), 3e38)).sum().backward()
total = distributed.global_sum(torch.tensor(3e38))
print(model.weight.grad.item(), (total / 2).item())
distributed.leave()
""")


def test_ddp_divides_before_it_adds_so_large_gradients_do_not_overflow(on_two_ranks):
    ended = on_two_ranks[LARGE_GRADIENTS].ended
    machinery.expect_success(ended.exit_code, ended.errors)
    for printed in ended.printed:
        by_ddp, by_hand = map(float, printed.split())
        assert 2.9e38 < by_ddp < 3.1e38 and by_hand == float("inf")


# --- 1.4a: three ports to diagnose ------------------------------------------------------------------------------------

RIGHT_1_4a = {"A": "in the update", "B": "before the update", "C": "rounding"}
test_1_4a = judge(checks.exercise_1_4a, [RIGHT_1_4a], [
    (stub, "not done yet"),
    (RIGHT_1_4a | {"A": "rounding"}, "port A is not 'rounding'. In float64 its gap is as large as in float32"),
    (RIGHT_1_4a | {"A": "before the update"}, "port A is not 'before the update'. Look at step 1"),
    (RIGHT_1_4a | {"B": "in the update"}, "port B is not 'in the update'. Look at step 1"),
    (RIGHT_1_4a | {"C": "in the update"}, "port C is not 'in the update'. Its gap grows in float32. What is left"),
    (RIGHT_1_4a | {"C": "bug"}, "for C you say 'bug', which is not one of 'rounding', 'before the update'"),
    ({"A": "rounding"}, "return a dict with the keys A, B and C"),
    (None, "return a dict with the keys A, B and C; yours is None"),
], prepare="returned")  # fmt: skip


def test_1_4a_the_logs_hold_what_the_check_says_of_them():
    logs = checks.recorded("ported_script_losses.json")
    assert list(logs) == ["reference", "A", "B", "C"]

    def gaps(port, precision):
        return [abs(a - b) for a, b in zip(logs["reference"][precision], logs[port][precision], strict=True)]

    for precision in ("float32", "float64"):
        assert gaps("A", precision)[0] < 1e-9 < 1e-5 < gaps("A", precision)[1]  # in the update
        assert gaps("B", precision)[0] > 1e-2  # before the update
    assert gaps("C", "float32")[0] < 1e-6 and max(gaps("C", "float64")) < 1e-12  # rounding
    assert 0.1 < max(gaps("A", "float32")) / max(gaps("C", "float32")) < 10  # these two look alike


# --- 1.4b: a script that stops early ----------------------------------------------------------------------------------


@pytest.fixture
def printed(monkeypatch):
    """Lets a test say what each of the learner's three ranks prints, or how it fails, without starting any."""

    def prepare(outcome):
        def run_script(path, nproc):
            assert path == "early_stop.py" and nproc == 3
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(machinery, "run_script", run_script)
        return "early_stop.py"

    return prepare


def stopped(*ranks, mean=("mean loss 0.465288\n", "", "")):
    """What the ranks print that stop after these steps, each with the gradients of three ranks per step."""
    return [
        f"stopped after step {step}, with {3 * step} gradients\n{line}" for step, line in zip(ranks, mean, strict=False)
    ]


RIGHT_1_4b = [stopped(10, 10, 10, mean=(line, "", "")) for line in ("mean loss 0.465288\n", "mean loss 0.47\n")]
test_1_4b = judge(checks.exercise_1_4b, RIGHT_1_4b, [
    (NotImplementedError(), "not done yet"),
    (machinery.Wrong("the script failed: RuntimeError: Connection closed by peer [127.0.0.1]"),  # as it was given
     "not right yet: one rank called a collective that another rank never reached. Which ranks are still in the loop"),
    (machinery.Wrong("the script failed: RuntimeError: Timed out waiting 30000ms for recv"), "which have left it?"),
    (machinery.Wrong("it hangs: still running after 240 s."), "never reached. Which ranks are still in the loop"),
    (machinery.Wrong("the script failed: NameError: name 'los' is not defined"), "not right yet: the script failed: "),
    (stopped(4, 9, 13), "the ranks stop after different steps, (4, 9, 13): take the decision from a value"),
    (stopped(4, 4, 4), "is 4, expected 10. That is rank 0's own loss: the others have no say."),
    (stopped(13, 13, 13), "is 13, expected 10. That is the largest loss, so the last rank decides."),
    (stopped(15, 15, 15), "is 15, expected 10. That is the sum of the losses: divide it by the world size."),
    (stopped(20, 20, 20), "is 20, expected 10. Nobody has stopped early"),
    (stopped(11, 11, 11), "is 11, expected 10. Take the mean loss."),
    ([line.replace("30", "10") for line in stopped(10, 10, 10)], "should add up 30 gradients, and the ranks have (10,"),
    ([*stopped(10), "", ""], "each rank should print one line `stopped after step ...`"),
    (stopped(10, 10, 10, mean=["mean loss 0.465288\n"] * 3),
     "the 3 ranks printed 1, 1 and 1 lines with `mean loss`; expected one, from rank 0 alone"),
    (stopped(10, 10, 10, mean=("", "mean loss 0.465288\n", "")), "the 3 ranks printed 0, 1 and 0 lines"),
    (stopped(10, 10, 10, mean=("", "", "")), "the 3 ranks printed 0, 0 and 0 lines with `mean loss`"),
    (stopped(10, 10, 10, mean=("mean loss 0.107374\n", "", "")),
     "the mean loss that rank 0 prints is 0.107374, expected 0.465288. Is it the value that the decision was taken"),
    (stopped(10, 10, 10, mean=("mean loss tensor([0.4653])\n", "", "")), "should be a number, and is 'tensor([0.4653"),
], prepare="printed")  # fmt: skip


# --- 1.5a: four launches to diagnose ----------------------------------------------------------------------------------

RIGHT_1_5a = {"A": "wrong id", "B": "missing package", "C": "wrong endpoint", "D": "wrong interface"}
test_1_5a = judge(checks.exercise_1_5a, [RIGHT_1_5a], [
    (stub, "not done yet"),
    (RIGHT_1_5a | {"A": "missing agent"}, "launch A is not 'missing agent'. Both agents of this launch have written"),
    (RIGHT_1_5a | {"A": "wrong endpoint"},
     "launch A is not 'wrong endpoint'. What does an agent print that reaches no"),
    (RIGHT_1_5a | {"A": "missing package"}, "launch A is not 'missing package'. No rank was started"),
    (RIGHT_1_5a | {"B": "wrong interface"}, "launch B is not 'wrong interface'. Node 0's error can be a consequence"),
    (RIGHT_1_5a | {"B": "wrong id"}, "launch B is not 'wrong id'. Ranks were started"),
    (RIGHT_1_5a | {"C": "missing agent"}, "launch C is not 'missing agent'. Both agents"),
    (RIGHT_1_5a | {"C": "wrong id"}, "launch C is not 'wrong id'. With two ids both agents reach the store. Did both?"),
    (RIGHT_1_5a | {"D": "wrong endpoint"}, "launch D is not 'wrong endpoint'. Node 1's last line is that of launch C."),
    (RIGHT_1_5a | {"D": "missing package"}, "launch D is not 'missing package'. Ranks were started"),
    (RIGHT_1_5a | {"D": "firewall"}, "for D you say 'firewall', which is not one of 'missing agent', 'wrong id'"),
    ({"A": "wrong id"}, "return a dict with the keys A, B, C and D"),
    (None, "return a dict with the keys A, B, C and D; yours is None"),
], prepare="returned")  # fmt: skip


def test_1_5a_the_logs_hold_what_the_check_says_of_them():
    text = checks.recorded("failed_multinode_launches.txt")
    parts = re.split(r"^=+ launch (\w), node (\d) =+$", text, flags=re.MULTILINE)[1:]
    logs = {launch + node: log.strip() for launch, node, log in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}
    assert list(logs) == ["A0", "A1", "B0", "B1", "C0", "C1", "D0", "D1"]
    started = {name for name, log in logs.items() if "train.py" in log}
    assert started == {"B0", "B1", "D0", "D1"}
    last = {name: log.splitlines()[-1] for name, log in logs.items()}
    assert all(last[name].endswith("RendezvousTimeoutError") for name in ("A0", "A1", "C0"))
    assert "RendezvousConnectionError" in last["C1"] and last["C1"] == last["D1"]
    assert "No module named" in logs["B1"] and "Unable to find address for" in logs["D0"]
    times = [re.search(r"time +: (\S+)", logs[name])[1] for name in ("B1", "B0")]
    assert times == sorted(times)  # node 1 failed first


# --- 1.5b: a script for two nodes -------------------------------------------------------------------------------------


@pytest.fixture
def two_nodes(monkeypatch):
    """Lets a test say what the learner's script does on two nodes, without starting any."""

    def prepare(outcome):
        def run_two_nodes(script):
            assert script == "add_up.py"
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(chapter_1, "run_two_nodes", run_two_nodes)
        return "add_up.py"

    return prepare


test_1_5b = judge(checks.exercise_1_5b, [([1, 1], ["5050"])], [
    (NotImplementedError(), "not done yet"),
    (machinery.Wrong("the script failed: FileNotFoundError: [Errno 2] No such file: 'node-1/numbers.txt'"),  # as given
     "a rank on node 1 does not find numbers.txt on its node's disk. Which ranks are on that node"),
    (machinery.Wrong("the script failed: NameError: name 'rank' is not defined"), "not right yet: the script failed: "),
    (([2, 2], ["5050"]), "the two nodes downloaded 2 and 2 times: once on each is enough. Which number is 0"),
    (([1, 2], ["5050"]), "the two nodes downloaded 1 and 2 times"),
    (([1, 1], ["10100", "10100"]), "the sum is 10100, expected 5050. Every number counts twice. Among how many"),
    (([1, 1], ["10097"]), "the sum is 10097, expected 5050. The parts overlap"),
    (([1, 1], ["4950"]), "the sum is 4950, expected 5050. Two processes have the same part"),
    (([1, 1], ["1225"]), "the sum is 1225, expected 5050. Each number should be in the part of exactly one process"),
    (([1, 1], ["5050", "5050"]), "2 lines are reported, expected one: the condition is true on each node"),
    (([1, 1], []), "nobody reports the sum"),
], prepare="two_nodes")  # fmt: skip


def test_1_5b_the_sums_are_those_of_the_mistakes_that_the_check_names():
    numbers = range(1, 101)
    ranks = [(rank, rank % 2) for rank in range(4)]  # rank and local rank of 2 nodes with 2 processes each
    assert sum(sum(numbers[rank::4]) for rank, _ in ranks) == 5050
    assert sum(sum(numbers[local_rank::2]) for _, local_rank in ranks) == 10100
    assert sum(sum(numbers[rank::2]) for rank, _ in ranks) == 10097
    assert sum(sum(numbers[local_rank::4]) for _, local_rank in ranks) == 4950


# --- 1.6a: a port -----------------------------------------------------------------------------------------------------

LOSSES = [2.0 - 0.05 * step for step in range(32)]
WEIGHTS = {"layer.weight": torch.arange(4.0)}
RIGHT_1_6a = {"step_losses": LOSSES, "val_accuracies": [0.5, 0.75], "samples": [1002, 1000], "val_samples": [256, 254]}
LATER = {"layer.weight": torch.arange(4.0) + 0.1}


def changed(step: int, factor: float) -> list[float]:
    """LOSSES, wrong by a factor from a step on, counted from 1."""
    return [loss * (factor if number >= step else 1) for number, loss in enumerate(LOSSES, start=1)]


@pytest.fixture
def ported(monkeypatch, tmp_path):
    """Lets a test say how a script's two ranks differ from a right port of alone.py, which is next to it.

    It takes what differs in metrics.json, or this file's text or None; and {"weights": ..., "printed": by rank 1}.
    """

    def prepare(differences):
        metrics, rest = differences
        left = {"weights": WEIGHTS, "printed": ""} | rest

        def write(folder, metrics, weights):
            Path(folder, "metrics.json").write_text(metrics if isinstance(metrics, str) else json.dumps(metrics))
            torch.save(weights, Path(folder, "model.pt"))

        def run_ranks(script, nproc, folder):
            assert nproc == 2
            if metrics is not None:
                write(folder, metrics if isinstance(metrics, str) else RIGHT_1_6a | metrics, left["weights"])
            return ["epoch 1", left["printed"]]

        def run_script(script, nproc, folder):
            assert (Path(script), nproc) == (tmp_path / "alone.py", 1)
            write(folder, {**RIGHT_1_6a, "samples": [2002], "val_samples": [510]}, WEIGHTS)

        monkeypatch.setattr(chapter_1, "run_ranks", run_ranks)
        monkeypatch.setattr(chapter_1, "run_script", run_script)
        return tmp_path / "ported.py"

    return prepare


WRONG_1_6a = {
    "a group of one each": (({"samples": [1001]}, {}), "one number per rank, but is [1001]"),
    "all samples on both ranks": (({"samples": [2002, 2002]}, {}), "is [2002, 2002]: both ranks see every sample"),
    "padding": (({"samples": [1002, 1002]}, {}), "samples is [1002, 1002], 2 too many: does your sampler pad"),
    "the last batch dropped": (({"samples": [960, 960]}, {}), "82 too few"),
    "one rank does it all": (({"samples": [2002, 0]}, {}), "the ranks' parts should be equal"),
    "a batch of 64 per rank": (({"step_losses": LOSSES[::2]}, {}), "16 steps, expected 32. BATCH_SIZE is the global"),
    "different samples": (({"step_losses": changed(1, 1.01)}, {"weights": LATER}), "step 1 has the loss 2.020000"),
    "rank 0's loss, too early": (({"step_losses": changed(1, 1.01)}, {"weights": LATER}), "record the mean over BOTH"),
    "no DDP": (({"step_losses": changed(2, 1.03)}, {"weights": LATER}), "every weight get the mean of both"),
    "a factor forgotten": (({"step_losses": changed(2, 1 + 4e-7)}, {"weights": LATER}), "(relative difference 4e-07)"),
    "a factor, asked for": (({"step_losses": changed(2, 1 + 5e-6)}, {"weights": LATER}), "too small by a factor?"),
    "a mean of means": (({"step_losses": changed(17, 1.0001)}, {"weights": LATER}), "Step 16 has 21 and 20 samples"),
    "one order for all epochs": (({"step_losses": changed(17, 1.2)}, {"weights": LATER}), "which order do the samples"),
    "rank 0's own loss": (({"step_losses": changed(1, 1.01)}, {}), "the mean over BOTH ranks' samples?"),
    "validation not counted": (({"val_samples": None}, {}), "val_samples should have one number per rank, but is None"),
    "validation not gathered": (({"val_samples": 255}, {}), "val_samples should have one number per rank, but is 255"),
    "validation not shared": (({"val_samples": [510, 510]}, {}), "val_samples is [510, 510]: both ranks see every"),
    "validation padded": (({"val_samples": [256, 256]}, {}), "val_samples is [256, 256], 2 too many"),
    "rank 0's own accuracy": (({"val_accuracies": [0.25, 0.375]}, {}), "val_accuracy of epoch 1 is 0.25, expected 0.5"),
    "DDP's keys": (({}, {"weights": {"module.layer.weight": torch.arange(4.0)}}), "save the bare model's state"),
    "saved too early": (({}, {"weights": LATER}), "save them after the last step"),
    "both ranks print": (({}, {"printed": "epoch 1\n"}), "rank 1 prints too: 'epoch 1'"),
    "no file": ((None, {}), "there is no metrics.json"),
    "a damaged file": (("{}{}", {}), "metrics.json is damaged: does rank 0 alone write it?"),
}  # fmt: skip
test_1_6a = judge(checks.exercise_1_6a, [({}, {})], WRONG_1_6a, prepare="ported")


def test_1_6a_is_not_done_yet(tmp_path, capsys):
    (tmp_path / "ported.py").write_text("raise NotImplementedError  # put alone.py's code here instead, and port it\n")
    assert_rejects(checks.exercise_1_6a, tmp_path / "ported.py", "not done yet", capsys)
