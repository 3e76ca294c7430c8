"""The checks of lesson 2.2: right answers pass, the stub and plausible wrong ones are rejected with help."""

import functools
import json
import re

import pytest
import torch
from answers import assert_accepts, assert_rejects, stub
from notebook_rules import ROOT

from shared import checks
from shared.checks import chapter_2, machinery

# --- 2.2a: four jobs that hang ---------------------------------------------------------------------------------------

DIAGNOSIS = {
    "A": (2, "left the loop"),
    "B": (1, "waits for data"),
    "C": (None, "different collectives"),
    "D": (3, "waits for a person"),
}


def test_2_2a_a_stub_is_not_done_yet(capsys):
    assert_rejects(checks.exercise_2_2a, stub, "not done yet", capsys)


def test_2_2a_accepts(capsys):
    assert_accepts(checks.exercise_2_2a, lambda: DIAGNOSIS, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (DIAGNOSIS | {"A": (0, "waits for data")}, "job A is not 'waits for data'. Is a rank fetching"),
    (DIAGNOSIS | {"A": (2, "different collectives")}, "job A is not 'different collectives'. Three ranks"),
    (DIAGNOSIS | {"A": (0, "left the loop")}, "job A: the cause is right, but look again for the rank. Which"),
    (DIAGNOSIS | {"B": (1, "left the loop")}, "job B is not 'left the loop'. Has a rank reached a function that"),
    (DIAGNOSIS | {"B": (1, "slow")}, "job B is not 'slow'. No rank computes anything"),
    (DIAGNOSIS | {"C": (None, "slow")}, "job C is not 'slow'. All ranks are idle at the same line. Would they"),
    (DIAGNOSIS | {"C": (0, "different collectives")}, "job C: the cause is right, but look again for the rank. Four"),
    (DIAGNOSIS | {"D": (3, "waits for data")}, "job D is not 'waits for data'."),
    (DIAGNOSIS | {"D": (3, "deadlock")}, "job D: 'deadlock' is not one of the causes 'left the loop'"),
    (DIAGNOSIS | {"D": "waits for a person"}, "job D: answer with a rank and a cause, such as (0, \"slow\"), not 'wai"),
    ({"A": (2, "left the loop")}, "return a dict with the keys A, B, C and D"),
    (None, "return a dict with the keys A, B, C and D; yours is None"),
])  # fmt: skip
def test_2_2a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_2_2a, lambda: answer, because, capsys)


def test_2_2a_the_dumps_show_what_the_check_says_of_them():
    text = (ROOT / "02-ddp-pytorch-ray/hung_jobs.txt").read_text()
    parts = re.split(r"^-+ job (\w), rank (\d) -+$", text, flags=re.MULTILINE)[1:]
    dumps = {(job, int(rank)): dump for job, rank, dump in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}
    assert list(dumps) == [(job, rank) for job in "ABCD" for rank in range(4)]
    calls = {key: re.findall(r"^    (\w+) \(train\.py:(\d+)\)$", dump, re.MULTILINE) for key, dump in dumps.items()}
    for job, (odd_rank, _) in DIAGNOSIS.items():
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
    """Lets a test say what a rank answers, from the weights of all ranks, without starting any."""

    def prepare(differs, changed=()):
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
        script.write_text("def differing_parameters(model): ...")
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


def test_2_2b_accepts(answering, capsys):
    assert_accepts(checks.exercise_2_2b, answering(by_extremes), capsys)


def test_2_2b_a_stub_is_not_done_yet(answering, capsys):
    script = answering(by_extremes)
    script.write_text("def differing_parameters(model):\n    raise NotImplementedError\n")
    assert_rejects(checks.exercise_2_2b, script, "not done yet", capsys)


@pytest.mark.parametrize(("differs", "changed", "because"), [
    (from_rank_zero, (), "1.weight of rank 2 is +9e-13 off. But rank 0 says [], rank 1 says [], rank 2 says ['1"),
    (from_rank_zero, (), "How does a rank learn what another one has found?"),
    (by_closeness, (), "Expected ['1.weight']; your ranks say []. They differ by 1e-12. Copies of the"),
    (from_the_mean, (), "case 3: 0.bias of rank 0 is +1e+00 off and 0.bias of rank 2 is -1e+00 off. Expected"),
    (from_the_mean, (), "they cancel in a sum."),
    (by_checksum, (), "case 4: 0.weight of rank 1 is upside down and 1.bias of rank 0 is +1e+00 off. Exp"),
    (by_checksum, (), "your ranks say ['1.bias']. The same numbers in other places are different weights."),
    (by_extremes_of_numbers, (), "case 5: 0.weight of rank 1 is NaN. Expected ['0.weight']; your ranks say []. NaN is"),
    (always, (), "case 1: all ranks have the same weights. Expected []; your ranks say ['0.bias', '0.weight', "),
    (always, (), "0.bias is the same on all ranks."),
    (by_extremes, ["0.weight"], "Your function has changed 0.weight on rank 0: a collective writes its result into"),
    (machinery.Wrong("one rank waited for another in vain."), (), "one rank waited for another in vain."),
])  # fmt: skip
def test_2_2b_rejects(differs, changed, because, answering, capsys):
    assert_rejects(checks.exercise_2_2b, answering(differs, changed), because, capsys)


def test_2_2b_rejects_what_is_no_list(monkeypatch, answering, capsys):
    script = answering(by_extremes)
    nothing = [[{"answer": "None", "changed": []}] * 3 for _ in chapter_2.DRIFTED]
    monkeypatch.setattr(chapter_2, "compare_models", lambda script: nothing)
    assert_rejects(checks.exercise_2_2b, script, "return a list of names on every rank; rank 0 returns None", capsys)


def test_2_2b_the_lesson_s_stub_is_not_done_yet(tmp_path):
    cells = json.loads((ROOT / "02-ddp-pytorch-ray/02_nothing_changed.ipynb").read_text())["cells"]
    (source,) = ("".join(cell["source"]) for cell in cells if cell["id"] == "differing")
    (tmp_path / "differing.py").write_text(source.partition("\n")[2])
    with pytest.raises(AssertionError, match="not done yet"):
        checks.exercise_2_2b(tmp_path / "differing.py", strict=True)
