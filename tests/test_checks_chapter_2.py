"""The checks of chapter 2's exercises accept right answers, and reject the stub and plausible mistakes with help."""

import ast
import copy
import functools
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from answers import assert_rejects, judge, stub
from notebook_rules import ROOT, Notebook
from torch.utils.data import DistributedSampler

import checks
from checks import chapter_2, machinery
from checks.probes import record_resumed_runs
from shared import sampling

CHAPTER = ROOT / "02-ddp-pytorch-ray"
RAY_DATA = CHAPTER / "03_ray_data.ipynb"


def script_of(lesson: Path, name: str) -> str:
    """The file of this name, as a cell of the lesson writes it."""
    (script,) = (cell.body for cell in Notebook(lesson).cells if Path(cell.target).name == name)
    return script


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What 2.3b's check says of the lesson's script without its stub's line, and the recording of 2.4a, made again.

    The launch that the check asks for runs record_resumed_runs.py too.
    """
    folder = tmp_path_factory.mktemp("launched")
    script, log = folder / "bad_image.py", folder / "resumed_run_losses.json"
    lines = script_of(RAY_DATA, "bad_image.py").splitlines(True)
    script.write_text("".join(line for line in lines if not line.startswith("raise NotImpl")))
    really_run_scripts = machinery.run_scripts

    def run_scripts(commands, nproc, **options):
        (*ended, resumed) = really_run_scripts([*commands, [record_resumed_runs.__file__, log]], nproc, **options)
        machinery.expect_success(resumed.exit_code, resumed.errors)
        return ended

    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError) as refused:
        patch.setattr(machinery, "run_scripts", run_scripts)
        checks.exercise_2_3b(script, strict=True)
    return str(refused.value), log


# --- 2.1a: a port to repair ------------------------------------------------------------------------------------------

RESULT = {  # what the repaired function returns; the orders are shortened
    "step_losses": [2.3 - step / 20 for step in range(40)],
    "orders": [[6, 3, 6, 0], [1, 2, 1, 1]],
    "test": [250.0, 261.0],
    "weights": {"layers.1.weight": torch.ones(1), "layers.1.bias": torch.ones(1)},
}
SAME_IMAGES = RESULT | {"orders": [order[::2] for order in RESULT["orders"]]}  # what rank 0 of two workers takes


@pytest.fixture
def ported(monkeypatch, tmp_path):
    """Lets a test say what the port returns on one worker and on two, or how it fails, without starting any.

    It takes both, or the text of the script.
    """

    def prepare(outcomes):
        def start_port(num_workers, runner, script, results):
            outcome = outcomes[num_workers - 1]
            if isinstance(outcome, Exception):
                raise outcome
            torch.save(outcome, results)

        monkeypatch.setattr(chapter_2, "start_port", start_port)
        script = tmp_path / "ported.py"
        script.write_text(outcomes if isinstance(outcomes, str) else "def train_function(config): ...")
        return script

    return prepare


def losses_that_differ_from(step):
    return [loss + (number >= step) * 1e-6 for number, loss in enumerate(RESULT["step_losses"], start=1)]


NO_MODULE = machinery.Wrong(
    "the script failed: AttributeError: 'MLP' object has no attribute 'module'. Did you mean: 'x'?"
)
NO_SET_EPOCH = machinery.Wrong("the script failed: AttributeError: 'RandomSampler' object has no attribute 'set_epoch'")
ROUNDED = RESULT | {"step_losses": [loss * (1 + 1e-13) for loss in RESULT["step_losses"]]}
test_2_1a = judge(checks.exercise_2_1a, [(RESULT, ROUNDED)], [
    ("raise NotImplementedError  # delete this line", "not done yet"),
    ((NotImplementedError(), None), "not done yet"),
    ((NO_MODULE, None), "on one worker the script failed: AttributeError: 'MLP' object has no attribute 'module'. p"),
    ((NO_SET_EPOCH, None), "has no attribute 'set_epoch'. Which sampler is this? Skipping the call hides"),
    ((machinery.Wrong("the script failed: NameError: name 'los' is not defined"), None),
     "NameError: name 'los' is not"),
    ((RESULT, machinery.Wrong("the script failed: Connection closed by peer [127.0.0.1]. This is typically caused by")),
     "on two workers the script failed: Connection closed by peer [127.0.0.1]. Does every rank call every collective?"),
    ((RESULT, machinery.Wrong("it hangs: no end after 240 s.")), "on two workers it hangs: no end after 240 s. Does"),
    ((RESULT, RESULT | {"step_losses": RESULT["step_losses"][::2]}),
     "two workers take 20 steps in two epochs, expected 40"),
    ((RESULT, RESULT | {"step_losses": 2 * RESULT["step_losses"]}), "Does each worker train on all images"),
    ((RESULT | {"step_losses": RESULT["step_losses"][:10]}, RESULT),
     "one worker takes 10 steps in two epochs, expected 40"),
    ((RESULT, RESULT | {"orders": [[6, 3, 6, 0]] * 2}),
     "on two workers, rank 0 gets the images in the same order in both"),
    ((RESULT | {"orders": [[6, 3, 6, 0]] * 2}, RESULT), "on one worker, rank 0 gets the images in the same order"),
    ((RESULT, RESULT | {"step_losses": losses_that_differ_from(1)}),
     "the loss of step 1 differs between one and two work"),
    ((RESULT, RESULT | {"step_losses": losses_that_differ_from(1)}), "No weight has moved yet: the images differ."),
    ((RESULT, SAME_IMAGES | {"step_losses": losses_that_differ_from(1)}), "Both take the same images."),
    ((RESULT, RESULT | {"step_losses": losses_that_differ_from(2)}), "Does Ray average the gradients of this model?"),
    ((RESULT, RESULT | {"step_losses": losses_that_differ_from(21)}),
     "step 21 differs between one and two workers. The f"),
    ((RESULT, RESULT | {"test": [126.0, 131.0]}),
     "two workers count 131 test images, expected 261. That is the part of o"),
    ((RESULT, RESULT | {"test": [251.0, 262.0]}), "expected 261. An image counts twice: who has added it?"),
    ((RESULT, RESULT | {"test": [500.0, 522.0]}), "expected 261. Each rank tests all images."),
    ((RESULT, RESULT | {"test": [120.0, 261.0]}), "one and two workers get 250 and 120 test images right"),
    ((RESULT, RESULT | {"weights": {f"module.{name}": torch.ones(1) for name in RESULT["weights"]}}),
     "\"weights\" begins with 'layers.1.weight' on one worker and with 'module.layers.1.weight' on two"),
    ((RESULT, RESULT | {"orders": []}), "on two workers train_function should return a dict with step_losses, orders"),
    ((None, None), "on one worker train_function should return a dict with step_losses"),
], prepare="ported")  # fmt: skip


# --- 2.1b: four loaders to diagnose ----------------------------------------------------------------------------------

LOADERS = {"A": "different seeds", "B": "nothing", "C": "padding", "D": "no set_epoch"}
test_2_1b = judge(checks.exercise_2_1b, [LOADERS], [
    (stub, "not done yet"),
    (LOADERS | {"A": "nothing"}, "loader A: it is not 'nothing'. How often is each sample drawn in an epoch"),
    (LOADERS | {"A": "padding"}, "loader A: it is not 'padding'. Padding repeats a sample, so that all ranks have"),
    (LOADERS | {"B": "different seeds"}, "loader B: it is not 'different seeds'. Ranks that shuffle differently"),
    (LOADERS | {"C": "not split"}, "loader C: it is not 'not split'. Then each rank would draw all 101 samples."),
    (LOADERS | {"C": "no set_epoch"}, "loader C: it is not 'no set_epoch'. Compare the order of the two epochs"),
    (LOADERS | {"D": "nothing"}, "loader D: it is not 'nothing'."),
    (LOADERS | {"D": "shuffle"}, "for D you say 'shuffle', which is not one of 'nothing', 'padding', 'no set_epoch'"),
    ({"A": "padding"}, "return a dict with the keys A, B, C and D"),
    (None, "return a dict with the keys A, B, C and D; yours is None"),
], prepare="returned")  # fmt: skip


def test_2_1b_the_log_holds_what_the_check_says_of_it():
    log = checks.recorded("dataloader_sample_ids.json")
    assert list(log) == list(LOADERS)

    def draws(loader, epoch):
        return Counter(log[loader]["rank 0"][epoch] + log[loader]["rank 1"][epoch])

    for epoch in (0, 1):
        assert sorted(draws("B", epoch)) == sorted(draws("D", epoch)) == list(range(101))
        assert draws("A", epoch).total() == draws("B", epoch).total() == draws("D", epoch).total() == 101
        assert draws("C", epoch).total() == 102 and len(draws("C", epoch)) == 101
        assert len(draws("A", epoch)) < 90  # many samples are drawn twice, and as many never
    for loader, ranks in log.items():
        assert all((first == second) == (loader == "D") for first, second in ranks.values())


def test_2_1b_the_log_is_what_the_samplers_deal():
    log = checks.recorded("dataloader_sample_ids.json")
    dataset = range(101)

    def dealt(sampler, epochs):
        for epoch in epochs:
            sampler.set_epoch(epoch)
            yield list(sampler)

    for rank in (0, 1):
        unpadded = sampling.UnpaddedDistributedSampler(dataset, 2, rank, seed=7)
        assert list(dealt(unpadded, (0, 1))) == log["B"][f"rank {rank}"]
        assert list(dealt(unpadded, (0, 0))) == log["D"][f"rank {rank}"]
        assert list(dealt(DistributedSampler(dataset, 2, rank), (0, 1))) == log["C"][f"rank {rank}"]
        own_seed = sampling.UnpaddedDistributedSampler(dataset, 2, rank, seed=7 + rank)
        assert list(dealt(own_seed, (0, 1))) == log["A"][f"rank {rank}"]


# --- 2.2a: four jobs that hang ---------------------------------------------------------------------------------------

HUNG_JOBS = {
    "A": (2, "left the loop"),
    "B": (1, "waits for data"),
    "C": (None, "different collectives"),
    "D": (3, "waits for a person"),
}
test_2_2a = judge(checks.exercise_2_2a, [HUNG_JOBS], [
    (stub, "not done yet"),
    (HUNG_JOBS | {"A": (0, "waits for data")}, "job A is not 'waits for data'. Is a rank fetching"),
    (HUNG_JOBS | {"A": (2, "different collectives")}, "job A is not 'different collectives'. Three ranks"),
    (HUNG_JOBS | {"A": (0, "left the loop")}, "job A: the cause is right, but look again for the rank. Which"),
    (HUNG_JOBS | {"B": (1, "left the loop")}, "job B is not 'left the loop'. Has a rank reached a function that"),
    (HUNG_JOBS | {"B": (1, "slow")}, "job B is not 'slow'. No rank computes anything"),
    (HUNG_JOBS | {"C": (None, "slow")}, "job C is not 'slow'. All ranks are idle at the same line. Would they"),
    (HUNG_JOBS | {"C": (0, "different collectives")}, "job C: the cause is right, but look again for the rank. Four"),
    (HUNG_JOBS | {"D": (3, "waits for data")}, "job D is not 'waits for data'."),
    (HUNG_JOBS | {"D": (3, "deadlock")}, "job D: 'deadlock' is not one of the causes 'left the loop'"),
    (HUNG_JOBS | {"D": "waits for a person"}, "job D: answer with a rank and a cause, such as (0, \"slow\"), not 'wai"),
    ({"A": (2, "left the loop")}, "return a dict with the keys A, B, C and D"),
    (None, "return a dict with the keys A, B, C and D; yours is None"),
], prepare="returned")  # fmt: skip


def test_2_2a_the_dumps_show_what_the_check_says_of_them():
    text = checks.recorded("hung_job_stacks.txt")
    parts = re.split(r"^-+ job (\w), rank (\d) -+$", text, flags=re.MULTILINE)[1:]
    dumps = {(job, int(rank)): dump for job, rank, dump in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}
    assert list(dumps) == [(job, rank) for job in "ABCD" for rank in range(4)]
    calls = {key: re.findall(r"^    (\w+) \(train\.py:(\d+)\)$", dump, re.MULTILINE) for key, dump in dumps.items()}
    for job, (odd_rank, _) in HUNG_JOBS.items():
        others = [calls[job, rank][0] for rank in range(4) if rank != odd_rank]
        assert len(set(others)) == 1  # all at one line
        assert odd_rank is None or calls[job, odd_rank][0] not in others
    assert [function for function, _ in calls["A", 2]] == ["save_checkpoint", "main"]
    assert [function for function, _ in calls["B", 1]] == ["download", "next_batch", "main"]
    assert "Pdb.interaction" in dumps["D", 3]
    assert all("all_reduce (torch/" in dumps["C", rank] for rank in range(4))
    assert all('(idle): "MainThread"' in dump for dump in dumps.values())  # nobody computes


# --- 2.2b: which weights differ --------------------------------------------------------------------------------------


def all_models(changes):
    """The weights of three ranks, as the check's script makes them."""
    models = []
    for rank in range(3):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).double()
        models.append({name: parameter.detach() for name, parameter in model.named_parameters()})
        for changed_rank, name, change in changes:
            if changed_rank == rank:
                weights = models[rank][name]
                models[rank][name] = weights.flip(0) if change == "flip" else weights + change
    return models


@pytest.fixture
def answering(monkeypatch, tmp_path):
    """Lets a test say what a rank answers, from the weights of all ranks, without starting any.

    It takes how a rank finds a difference, or how the ranks fail, and what it changes; or the text of the script.
    """

    def prepare(given):
        differs, changed = ("", ()) if isinstance(given, str) else given

        def compare_models(script):
            if isinstance(differs, Exception):
                raise differs
            cases = []
            for changes, _ in chapter_2.DRIFTED:
                models = all_models(changes)
                answers = [
                    [name for name in models[0] if differs(rank, [m[name] for m in models])] for rank in range(3)
                ]
                cases.append([{"answer": answer, "changed": list(changed)} for answer in answers])
            return cases

        monkeypatch.setattr(chapter_2, "compare_models", compare_models)
        script = tmp_path / "differing.py"
        script.write_text(given if isinstance(given, str) else "def differing_parameters(model): ...")
        return script

    return prepare


def by_extremes(rank, weights):
    stacked = torch.stack(weights)
    return not torch.equal(stacked.amax(0), stacked.amin(0))


def by_extremes_of_numbers(rank, weights):
    largest = functools.reduce(torch.fmax, weights)  # as a maximum over the ranks may do, it skips NaN
    return not torch.equal(largest, functools.reduce(torch.fmin, weights))


def from_rank_zero(rank, weights):
    return not torch.equal(weights[rank], weights[0])


def from_the_mean(rank, weights):
    return not torch.allclose(weights[1], sum(weights) / 3, rtol=0, atol=1e-13)


def by_closeness(rank, weights):
    return not all(torch.allclose(each, weights[0]) for each in weights)


def by_checksum(rank, weights):
    return len({round(each.sum().item(), 13) for each in weights}) > 1


def always(rank, weights):
    return True


test_2_2b = judge(checks.exercise_2_2b, [(by_extremes, ())], [
    ("def differing_parameters(model):\n    raise NotImplementedError\n", "not done yet"),
    ((from_rank_zero, ()), "1.weight of rank 2 is +9e-13 off. But rank 0 says [], rank 1 says [], rank 2 says ['1"),
    ((from_rank_zero, ()), "How does a rank learn what another one has found?"),
    ((by_closeness, ()), "Expected ['1.weight']; your ranks say []. They differ by 1e-12. Copies of the"),
    ((from_the_mean, ()), "case 3: 0.bias of rank 0 is +1e+00 off and 0.bias of rank 2 is -1e+00 off. Expected"),
    ((from_the_mean, ()), "they cancel in a sum."),
    ((by_checksum, ()), "case 4: 0.weight of rank 1 is upside down and 1.bias of rank 0 is +1e+00 off. Exp"),
    ((by_checksum, ()), "your ranks say ['1.bias']. The same numbers in other places are different weights."),
    ((by_extremes_of_numbers, ()),
     "case 5: 0.weight of rank 1 is NaN. Expected ['0.weight']; your ranks say []. NaN is"),
    ((always, ()), "case 1: all ranks have the same weights. Expected []; your ranks say ['0.bias', '0.weight', "),
    ((always, ()), "0.bias is the same on all ranks."),
    ((by_extremes, ["0.weight"]), "Your function has changed 0.weight on rank 0: a collective writes its result into"),
    ((machinery.Wrong("one rank waited for another in vain."), ()), "one rank waited for another in vain."),
], prepare="answering")  # fmt: skip


def test_2_2b_rejects_what_is_no_list(monkeypatch, answering, capsys):
    script = answering((by_extremes, ()))
    nothing = [[{"answer": "None", "changed": []}] * 3 for _ in chapter_2.DRIFTED]
    monkeypatch.setattr(chapter_2, "compare_models", lambda script: nothing)
    assert_rejects(checks.exercise_2_2b, script, "return a list of names on every rank; rank 0 returns None", capsys)


def test_2_2b_the_lesson_s_stub_is_not_done_yet(tmp_path, capsys):
    (tmp_path / "differing.py").write_text(script_of(CHAPTER / "02_nothing_changed.ipynb", "differing.py"))
    assert_rejects(checks.exercise_2_2b, tmp_path / "differing.py", "not done yet", capsys)


# --- 2.3a: five streams to diagnose ----------------------------------------------------------------------------------

STREAMS = {"A": "files only", "B": "rows dropped", "C": "nothing", "D": "idle rank", "E": "same order"}
test_2_3a = judge(checks.exercise_2_3a, [STREAMS], [
    (stub, "not done yet"),
    (STREAMS | {"A": "nothing"}, "stream A: it is not 'nothing'. How many rows does each rank get, how are they mix"),
    (STREAMS | {"B": "nothing"}, "stream B: it is not 'nothing'. How many rows does each rank get, how are they mix"),
    (STREAMS | {"C": "rows dropped"}, "stream C: it is not 'rows dropped'. Then some of the 101 ids reach neither"),
    (STREAMS | {"D": "not split"}, "stream D: it is not 'not split'. Then each rank would receive all 101 samples."),
    (STREAMS | {"E": "files only"}, "stream E: it is not 'files only'. Then the rows of a file still arrive one aft"),
    (STREAMS | {"C": "idle rank"}, "stream C: it is not 'idle rank'. Then one rank receives nothing."),
    (STREAMS | {"C": "same order"}, "stream C: it is not 'same order'. Compare the two epochs on one rank."),
    (STREAMS | {"D": "one block"},
     "for D you say 'one block', which is not one of 'nothing', 'rows dropped', 'idle rank'"),
    ({"A": "nothing"}, "return a dict with the keys A, B, C, D and E"),
    (None, "return a dict with the keys A, B, C, D and E; yours is None"),
], prepare="returned")  # fmt: skip


@pytest.mark.parametrize("stream", STREAMS)
def test_2_3a_each_stream_has_its_fault_and_no_other(stream):
    ranks = checks.recorded("ray_data_sample_ids.json")[stream].values()
    fault = STREAMS[stream]
    for epoch in (0, 1):
        received = [orders[epoch] for orders in ranks]
        every_id = sorted(received[0] + received[1])
        assert len(every_id) == len(set(every_id)) == (100 if fault == "rows dropped" else 101)
        assert (min(map(len, received)) == 0) == (fault == "idle rank")
        for order in filter(None, received):
            neighbors = sum(second == first + 1 for first, second in pairwise(order))
            assert (neighbors > len(order) / 2) == (fault == "files only")
    for first, second in filter(all, ranks):  # a rank that receives nothing has no order
        assert (first == second) == (fault == "same order")


# --- 2.3b: an error that every rank must learn of --------------------------------------------------------------------

WEIGHTS = [1.0] * 640


def ends(ending="returns", steps=3, weights=WEIGHTS):
    return {"ending": ending, "steps": steps, "weights": weights, "expected": WEIGHTS}


COMPLETE = [ends(), ends()]
AT_ONCE, AT_THE_END = ([ends("ValueError", steps), ends("ValueError", steps)] for steps in (2, 4))
CLOSED = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] "
    "Connection closed by peer [127.0.0.1]:40131"
)


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Lets a test say how train_epoch ends on both ranks, without and with a bad image, without starting any."""

    def prepare(endings):
        monkeypatch.setattr(chapter_2, "run_train_epoch", lambda script, *calls: endings)
        script = tmp_path / "bad_image.py"
        script.write_text("def train_epoch(ddp_model, stream, optimizer): ...")
        return script

    return prepare


test_2_3b = judge(checks.exercise_2_3b, [(COMPLETE, AT_ONCE), (COMPLETE, AT_THE_END)], [
    (([ends(CLOSED), ends(CLOSED)], None), "every image can be read, but on rank 0 train_epoch ends with RuntimeError"),
    (([ends(), ends("ValueError")], None),
     "but on rank 1 train_epoch ends with ValueError. Does every rank call every"),
    (([ends(steps=1), ends(steps=1)], None), "on rank 0 the optimizer takes 1 steps, expected 3"),
    (([ends(weights=[0.0] * 640)] * 2, None), "on rank 0 the weights are not those of one process. Keep the loss"),
    ((COMPLETE, COMPLETE), "rank 1 cannot read an image, and both ranks return as if the epoch were complete"),
    ((COMPLETE, [ends(CLOSED), ends("ValueError")]), f"and on rank 0 train_epoch ends with {CLOSED}"),
    ((COMPLETE, [ends(), ends("ValueError")]), "rank 1 cannot read an image, and rank 0 returns. How could it know"),
    ((COMPLETE, [ends("ValueError", 4), ends("ValueError", 2)]), "have taken 4 and 2 steps: their weights differ"),
], prepare="trained")  # fmt: skip


def test_2_3b_the_stub_is_not_done_yet_and_without_its_line_leaves_a_rank_waiting(launched, tmp_path, capsys):
    (tmp_path / "bad_image.py").write_text(script_of(RAY_DATA, "bad_image.py"))
    assert_rejects(checks.exercise_2_3b, tmp_path / "bad_image.py", "not done yet", capsys)
    said, _ = launched
    assert "rank 1 cannot read an image, and on rank 0 train_epoch ends with RuntimeError" in said


# --- 2.3: the lesson -------------------------------------------------------------------------------------------------


def class_named(name: str, source: str) -> str:
    """The syntax tree of the class `name` in Python source."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    return ast.dump(found[0])


def test_the_lesson_shows_the_class_that_the_script_uses() -> None:
    shown = next(cell.source for cell in Notebook(RAY_DATA).code if "class EverySample" in cell.source)
    script = (CHAPTER / "ray_images.py").read_text()
    assert class_named("EverySample", shown) == class_named("EverySample", script)


# --- 2.4a: five resumes to diagnose ----------------------------------------------------------------------------------

RESUMES = record_resumed_runs.RUNS
test_2_4a = judge(checks.exercise_2_4a, [RESUMES], [
    (stub, "not done yet"),
    (RESUMES | {"A": "optimizer"}, "run A: you say 'optimizer'. Then both ranks' first losses are right and both"),
    (RESUMES | {"B": "random"}, "run B: you say 'random'. Then both ranks' first losses are wrong, on the r"),
    (RESUMES | {"C": "scheduler"}, "run C: you say 'scheduler'. Then several losses are right on both ranks, until"),
    (RESUMES | {"D": "optimizer"}, "both ranks' second losses are wrong. Is that what you see in run D?"),
    (RESUMES | {"D": "random on rank 1"}, "Then rank 1's first loss is wrong on the right samples, and rank 0's"),
    (RESUMES | {"E": "model"}, "Then both ranks' losses jump back to those of an untrained model. Is that"),
    (RESUMES | {"E": "samples"}, "for E you say 'samples', which is not one of 'nothing', 'model', 'optimizer'"),
    ({"A": "scheduler"}, "return a dict with the keys A, B, C, D and E"),
    (None, "return a dict with the keys A, B, C, D and E; yours is None"),
], prepare="returned")  # fmt: skip


def test_2_4a_the_log_holds_what_the_check_says_of_it():
    logs = checks.recorded("resumed_run_losses.json")
    assert list(logs) == ["uninterrupted", *RESUMES]

    def first_wrong(run, column):
        pairs = ([logs[name][f"rank {rank}"][column] for name in ("uninterrupted", run)] for rank in (0, 1))
        return [
            next((n for n, (a, b) in enumerate(zip(*pair, strict=True), start=1) if a != b), None) for pair in pairs
        ]

    assert {run: first_wrong(run, "loss") for run in RESUMES} == {
        "A": [7, 7], "B": [2, 1], "C": [None, None], "D": [3, 2], "E": [1, 1],
    }  # fmt: skip
    assert [run for run in RESUMES if first_wrong(run, "samples") != [None, None]] == ["E"]


def test_2_4a_the_log_is_what_the_ranks_see(launched):
    seen, expected = json.loads(launched[1].read_text()), checks.recorded("resumed_run_losses.json")
    assert list(seen) == list(expected)
    for run, ranks in expected.items():
        for rank, columns in ranks.items():
            assert seen[run][rank]["samples"] == columns["samples"]
            assert seen[run][rank]["loss"] == pytest.approx(columns["loss"], abs=1e-6)


# --- 2.4b: save and resume on two ranks ------------------------------------------------------------------------------

REFERENCE = [[1, step, 2.0 + step / 100] for step in range(1, 13)]
LOGS = {  # what both ranks have logged if all is well
    **{f"reference-{rank}": REFERENCE for rank in (0, 1)},
    **{f"run-{rank}": [*REFERENCE[:9], *([2, *line[1:]] for line in REFERENCE[6:])] for rank in (0, 1)},
}
RESTARTED = "attempt 1 begins\nRuntimeError: Connection closed by peer\nattempt 2 begins\nattempt 2 begins\n"


def resumed_at(step):
    logs = copy.deepcopy(LOGS)
    for rank in (0, 1):
        logs[f"run-{rank}"] = [*REFERENCE[:9], *([2, *line[1:]] for line in REFERENCE[step - 1 :])]
    return logs


def wrong_from(step, *ranks):
    logs = copy.deepcopy(LOGS)
    for rank in ranks:
        for line in logs[f"run-{rank}"]:
            line[2] += (line[0] == 2 and line[1] >= step) * 1e-3
    return logs


@pytest.fixture
def resumed(monkeypatch, tmp_path):
    """Lets a test say how the two ranks ended and what they logged, without starting any; and the script's text."""

    def prepare(changes):
        ended = {"exit_code": 0, "errors": RESTARTED, "killed": True, "logs": LOGS} | changes
        script = tmp_path / "save_and_resume.py"
        script.write_text(ended.pop("text", "def save(path, model, optimizer, scheduler, step, rank): ..."))
        monkeypatch.setattr(chapter_2, "kill_in_save", lambda script: tuple(ended.values()))
        return script

    return prepare


test_2_4b = judge(checks.exercise_2_4b, [{}], [
    ({"text": "def save():\n    raise NotImplementedError\n"}, "not done yet"),
    ({"text": "from shared import checkpoint"}, "shared.checkpoint is what you are building"),
    ({"text": "from shared import distributed, checkpoint"}, "shared.checkpoint is what you are building"),
    ({"text": "import shared.checkpoint"}, "shared.checkpoint is what you are building"),
    ({"killed": False}, "rank 0 never called it: which rank writes?"),
    ({"exit_code": 1, "errors": RESTARTED + "RuntimeError: PytorchStreamReader failed: finding central directory"},
     "resume() reads that half. What should be at `path` while a new checkpoint is"),
    ({"exit_code": 1, "errors": RESTARTED + "OSError: [Errno 22] Invalid argument"}, "resume() reads that half."),
    ({"exit_code": 1, "errors": RESTARTED + "TypeError: resume() should return the number of steps done, and returns"},
     "after the kill, the script failed: TypeError: resume() should return the number of steps done"),
    ({"exit_code": 1, "killed": False, "errors": "attempt 1 begins\nRuntimeError: Timed out waiting 30000ms for recv"},
     "before the kill, the script failed: RuntimeError: Timed out waiting 30000ms for recv. Does every rank call"),
    ({"exit_code": 1, "killed": False, "errors": "attempt 1 begins\nKeyError: 'x': "}, "before the kill, the script f"),
    ({"logs": resumed_at(1)}, "rank 0 begins with step 1, expected step 7, after the last whole checkpoint. Is there"),
    ({"logs": resumed_at(10)}, "rank 0 begins with step 10, expected step 7, after the last whole checkpoint. Rank 0"),
    ({"logs": resumed_at(6)}, "rank 0 begins with step 6, expected step 7, after the last whole checkpoint. What does"),
    ({"logs": wrong_from(7, 1)}, "the loss of step 7 is wrong on rank 1 alone. Both ranks have the same weights. Wh"),
    ({"logs": wrong_from(7, 0, 1)}, "the loss of step 7 is wrong on both ranks. What does the first loss depend on, b"),
    ({"logs": wrong_from(8, 1)}, "the loss of step 8 is wrong on rank 1 alone. Step 7 was right, so its update was"),
    ({"logs": wrong_from(10, 0, 1)}, "the loss of step 10 is wrong on both ranks. The steps before it are right."),
], prepare="resumed")  # fmt: skip


# --- 2.5a: a port -----------------------------------------------------------------------------------------------------

LOSSES = [2.0, 1.5, 1.25, 1.125]
RIGHT_2_5a = {"epochs": [0, 1, 2, 2, 3], "crashed": True, "losses": LOSSES, "exit_code": 0, "errors": "", "text": ""}

# The end of what a driver writes to stderr, shortened. A worker's lines have a prefix, in color.
DRIVER = """\
\x1b[36m(RayTrainWorker pid=3263)\x1b[0m     step_losses[-1].backward()
\x1b[36m(RayTrainWorker pid=3263)\x1b[0m RuntimeError: Connection closed by peer [127.0.0.1]:14241.
Traceback (most recent call last):
  File "ported.py", line 61, in <module>
    TorchTrainer(train, scaling_config=scaling_config, run_config=run_config).fit()
ray.train.WorkerGroupError: Training failed due to worker errors:
"""
KILLED = """\
[Rank 1 Error Snippet]:
A worker health check failed.
Worker info: Worker(
    pid=3292,
  ),
)
The actor died unexpectedly before finishing this task.
	ip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR
"""
DISCONNECTED = """\
[Rank 0 Error Snippet]:
Traceback (most recent call last):
    step_losses[-1].backward()
RuntimeError: [pair.cc:561] Connection closed by peer [127.0.0.1]:14241.
"""
RAISED = """\
[Rank 0 Error Snippet]:
Traceback (most recent call last):
  File "ported.py", line 33, in restore
    return state["loss"]
           ~~~~~^^^^^^^^
KeyError: 'loss'
"""
RELATIVE = """\
Traceback (most recent call last):
    raise value
ray.exceptions.ActorDiedError: The actor died because of an error raised in its creation task
    return pyarrow.fs.FileSystem.from_uri(storage_path)
pyarrow.lib.ArrowInvalid: URI has empty scheme: 'runs/ray'
"""


@pytest.fixture
def left_behind(monkeypatch, tmp_path):
    """Lets a test say what a port's run leaves, where it differs from a right one; the script is next to a ddp.py."""

    def prepare(changes):
        left = RIGHT_2_5a | changes
        script = tmp_path / "ported.py"
        script.write_text(left["text"])

        def run_command(words, timeout, **variables):
            assert words[0] == str(script)
            folder = Path(words[1])
            if left["epochs"]:
                (folder / "epochs.txt").write_text("".join(f"{epoch}\n" for epoch in left["epochs"]))
            if left["crashed"]:
                (folder / "crashed").touch()
            if left["losses"]:
                (folder / "metrics.json").write_text(json.dumps({"losses": left["losses"]}))
            return left["exit_code"], left["errors"]

        def run_script(path, nproc, folder):
            assert (path, nproc) == (tmp_path / "ddp.py", 2) and Path(folder, "crashed").exists()
            Path(folder, "metrics.json").write_text(json.dumps({"losses": LOSSES}))

        monkeypatch.setattr(chapter_2, "run_command", run_command)
        monkeypatch.setattr(chapter_2, "run_script", run_script)
        return script

    return prepare


WRONG_2_5a = {
    "the stub": ({"text": "raise NotImplementedError  # put ddp.py here instead, and port it\n"}, "not done yet"),
    "no failure permitted": (
        {"exit_code": 1, "epochs": [0, 1, 2], "losses": None, "errors": DRIVER + KILLED},
        "the run ended when a worker died in epoch 2: how many failures does your RunConfig permit?",
    ),
    "no failure permitted, and both ranks report": (
        {"exit_code": 1, "epochs": [0, 1, 2], "losses": None, "errors": DRIVER + DISCONNECTED + KILLED},
        "the run ended when a worker died in epoch 2: how many failures does your RunConfig permit?",
    ),
    "an error": (
        {"exit_code": 1, "epochs": [], "crashed": False, "losses": None, "errors": "NameError: name 'worker' is ..."},
        "the script failed: NameError: name 'worker'",
    ),
    "an error of Ray": (
        {"exit_code": 1, "epochs": [], "crashed": False, "losses": None, "errors": RELATIVE},
        "the script failed: pyarrow.lib.ArrowInvalid: URI has empty scheme: 'runs/ray'",
    ),
    "an error as it restores": (
        {"exit_code": 1, "epochs": [0, 1, 2], "losses": None, "errors": DRIVER + RAISED},
        "the script failed after the restart: KeyError: 'loss'",
    ),
    "an error in the second attempt": (
        {"exit_code": 1, "epochs": [0, 1, 2, 2], "losses": None, "errors": DRIVER + RAISED},
        "the script failed after the restart: KeyError: 'loss'",
    ),
    "one worker": ({"crashed": False, "epochs": [0, 1, 2, 3]}, "no worker died: are there two"),
    "no checkpoint": ({"epochs": [0, 1, 2, 0, 1, 2, 3]}, "0, 1, 2, 0, 1, 2, 3; expected 0, 1, 2, 2, 3. The second"),
    "the last epoch again": ({"epochs": [0, 1, 2, 1, 2, 3]}, "the first epoch that is not done"),
    "a relative path": ({"losses": None}, "give it an absolute path"),
    "the losses of the second attempt": ({"losses": LOSSES[2:]}, "2 losses, expected 4: keep those of the first"),
    "weights alone": ({"losses": [2.0, 1.5, 1.25, 1.3]}, "the loss of epoch 3 is 1.3, expected 1.125. This epoch"),
    "the whole batch on both": ({"losses": [1.9, 1.4, 1.2, 1.1]}, "the loss of epoch 0 is 1.9, expected 2. Do both"),
}
test_2_5a = judge(checks.exercise_2_5a, [{}], WRONG_2_5a, prepare="left_behind")


def test_2_5a_asks_a_port_that_hangs_for_reports(left_behind, monkeypatch, capsys):
    script = left_behind({})

    def hang(words, timeout, **variables):
        raise chapter_2.Wrong(f"it hangs: still running after {timeout} s. Does every rank reach every collective?")

    monkeypatch.setattr(chapter_2, "run_command", hang)
    assert_rejects(checks.exercise_2_5a, script, "every collective? report() waits for all", capsys)
