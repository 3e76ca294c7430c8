"""The checks of lesson 2.1: right answers pass, the stub and plausible wrong ones are rejected with help."""

import json
from collections import Counter

import pytest
import torch
from answers import assert_accepts, assert_rejects, stub
from notebook_rules import ROOT
from torch.utils.data import DistributedSampler

from shared import checks, sampling
from shared.checks import chapter_2, machinery

# --- 2.1a: a port to repair ------------------------------------------------------------------------------------------

RIGHT = {  # what the repaired function returns; the orders are shortened
    "step_losses": [2.3 - step / 20 for step in range(40)],
    "orders": [[6, 3, 6, 0], [1, 2, 1, 1]],
    "test": [250.0, 261.0],
    "weights": {"layers.1.weight": torch.ones(1), "layers.1.bias": torch.ones(1)},
}
SAME_IMAGES = RIGHT | {"orders": [order[::2] for order in RIGHT["orders"]]}  # what rank 0 of two workers takes


@pytest.fixture
def ported(monkeypatch, tmp_path):
    """Lets a test say what the port returns on one worker and on two, or how it fails, without starting any."""

    def returns(one, two):
        def start_port(num_workers, runner, script, results):
            outcome = {1: one, 2: two}[num_workers]
            if isinstance(outcome, Exception):
                raise outcome
            torch.save(outcome, results)

        monkeypatch.setattr(chapter_2, "start_port", start_port)
        script = tmp_path / "ported.py"
        script.write_text("def train_function(config): ...")
        return script

    return returns


def losses_that_differ_from(step):
    return [loss + (number >= step) * 1e-6 for number, loss in enumerate(RIGHT["step_losses"], start=1)]


def test_2_1a_accepts(ported, capsys):
    script = ported(RIGHT, RIGHT | {"step_losses": [loss * (1 + 1e-13) for loss in RIGHT["step_losses"]]})
    assert_accepts(checks.exercise_2_1a, script, capsys)


def test_2_1a_a_stub_is_not_done_yet(ported, capsys):
    script = ported(None, None)
    script.write_text("raise NotImplementedError  # delete this line")
    assert_rejects(checks.exercise_2_1a, script, "not done yet", capsys)


NO_MODULE = machinery.Wrong(
    "the script failed: AttributeError: 'MLP' object has no attribute 'module'. Did you mean: 'x'?"
)
NO_SET_EPOCH = machinery.Wrong("the script failed: AttributeError: 'RandomSampler' object has no attribute 'set_epoch'")


@pytest.mark.parametrize(("one", "two", "because"), [
    (NotImplementedError(), None, "not done yet"),
    (NO_MODULE, None, "on one worker the script failed: AttributeError: 'MLP' object has no attribute 'module'. p"),
    (NO_SET_EPOCH, None, "has no attribute 'set_epoch'. Which sampler is this? Skipping the call hides"),
    (machinery.Wrong("the script failed: NameError: name 'los' is not defined"), None, "NameError: name 'los' is not"),
    (RIGHT, machinery.Wrong("the script failed: Connection closed by peer [127.0.0.1]. This is typically caused by"),
     "on two workers the script failed: Connection closed by peer [127.0.0.1]. Does every rank call every collective?"),
    (RIGHT, machinery.Wrong("it hangs: no end after 240 s."), "on two workers it hangs: no end after 240 s. Does"),
    (RIGHT, RIGHT | {"step_losses": RIGHT["step_losses"][::2]}, "two workers take 20 steps in two epochs, expected 40"),
    (RIGHT, RIGHT | {"step_losses": 2 * RIGHT["step_losses"]}, "Does each worker train on all images"),
    (RIGHT | {"step_losses": RIGHT["step_losses"][:10]}, RIGHT, "one worker takes 10 steps in two epochs, expected 40"),
    (RIGHT, RIGHT | {"orders": [[6, 3, 6, 0]] * 2}, "on two workers, rank 0 gets the images in the same order in both"),
    (RIGHT | {"orders": [[6, 3, 6, 0]] * 2}, RIGHT, "on one worker, rank 0 gets the images in the same order"),
    (RIGHT, RIGHT | {"step_losses": losses_that_differ_from(1)}, "the loss of step 1 differs between one and two work"),
    (RIGHT, RIGHT | {"step_losses": losses_that_differ_from(1)}, "No weight has moved yet: the images differ."),
    (RIGHT, SAME_IMAGES | {"step_losses": losses_that_differ_from(1)}, "Both take the same images."),
    (RIGHT, RIGHT | {"step_losses": losses_that_differ_from(2)}, "Does Ray average the gradients of this model?"),
    (RIGHT, RIGHT | {"step_losses": losses_that_differ_from(21)}, "step 21 differs between one and two workers. The f"),
    (RIGHT, RIGHT | {"test": [126.0, 131.0]}, "two workers count 131 test images, expected 261. That is the part of o"),
    (RIGHT, RIGHT | {"test": [251.0, 262.0]}, "expected 261. An image counts twice: who has added it?"),
    (RIGHT, RIGHT | {"test": [500.0, 522.0]}, "expected 261. Each rank tests all images."),
    (RIGHT, RIGHT | {"test": [120.0, 261.0]}, "one and two workers get 250 and 120 test images right"),
    (RIGHT, RIGHT | {"weights": {f"module.{name}": torch.ones(1) for name in RIGHT["weights"]}},
     "\"weights\" begins with 'layers.1.weight' on one worker and with 'module.layers.1.weight' on two"),
    (RIGHT, RIGHT | {"orders": []}, "on two workers train_function should return a dict with step_losses, orders"),
    (None, None, "on one worker train_function should return a dict with step_losses"),
])  # fmt: skip
def test_2_1a_rejects(one, two, because, ported, capsys):
    assert_rejects(checks.exercise_2_1a, ported(one, two), because, capsys)


# --- 2.1b: four loaders to diagnose ----------------------------------------------------------------------------------

DIAGNOSIS = {"A": "different seeds", "B": "nothing", "C": "padding", "D": "no set_epoch"}


def test_2_1b_a_stub_is_not_done_yet(capsys):
    assert_rejects(checks.exercise_2_1b, stub, "not done yet", capsys)


def test_2_1b_accepts(capsys):
    assert_accepts(checks.exercise_2_1b, lambda: DIAGNOSIS, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (DIAGNOSIS | {"A": "nothing"}, "loader A: it is not 'nothing'. How often is each sample drawn in an epoch"),
    (DIAGNOSIS | {"A": "padding"}, "loader A: it is not 'padding'. Padding repeats a sample, so that all ranks have"),
    (DIAGNOSIS | {"B": "different seeds"}, "loader B: it is not 'different seeds'. Ranks that shuffle differently"),
    (DIAGNOSIS | {"C": "not split"}, "loader C: it is not 'not split'. Then each rank would draw all 101 samples."),
    (DIAGNOSIS | {"C": "no set_epoch"}, "loader C: it is not 'no set_epoch'. Compare the order of the two epochs"),
    (DIAGNOSIS | {"D": "nothing"}, "loader D: it is not 'nothing'."),
    (DIAGNOSIS | {"D": "shuffle"}, "for D you say 'shuffle', which is not one of 'nothing', 'padding', 'no set_epoch'"),
    ({"A": "padding"}, "return a dict with the keys A, B, C and D"),
    (None, "return a dict with the keys A, B, C and D; yours is None"),
])  # fmt: skip
def test_2_1b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_2_1b, lambda: answer, because, capsys)


def test_2_1b_the_log_holds_what_the_check_says_of_it():
    log = json.loads((ROOT / "02-ddp-pytorch-ray/four_loaders.json").read_text())
    assert list(log) == list(DIAGNOSIS)

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
    log = json.loads((ROOT / "02-ddp-pytorch-ray/four_loaders.json").read_text())
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
