"""benchmarks/check_regression.py: its verdict on noise, real runs of two checkouts, files, mistakes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import LIMIT, ROOT

SCRIPT = ROOT / "benchmarks/check_regression.py"
PAIRS, STEPS, REPEATS = 8, 40, 20
SLEEP_S = 2  # in each step; what a step takes beside it, both checkouts' runs have


@pytest.fixture(scope="module")
def check():
    """The program as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        import check_regression

        yield check_regression


def call(*words: object, code: int) -> str:
    """Run it; what it has said. A mistake is one line on standard error, and nothing else."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * LIMIT)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def refused(*words: object) -> str:
    (line,) = call(SCRIPT, *words, code=2).splitlines()
    assert line.startswith("check_regression.py: error: ")
    return line


# --- the verdict -----------------------------------------------------------------------------------------------------

# What a machine does to the step times of all runs, one row a run, in the order in which they ran: each kind leaves the
# fastest quarter of a run, or most of the runs (of 16 all but 3 that take twice as long), nearly as they were.
NOISE = {
    "lognormal": lambda rng, runs: rng.lognormal(0, 0.15, (runs, STEPS)),
    "runs differ": lambda rng, runs: rng.lognormal(0, 0.04, (runs, 1)) * rng.lognormal(0, 0.1, (runs, STEPS)),
    "drift": lambda rng, runs: np.linspace(1, 1.6, runs)[:, None] * rng.lognormal(0, 0.1, (runs, STEPS)),
    "bursts": lambda rng, runs: (1 + (rng.permutation(runs)[:, None] < 3)) * rng.lognormal(0, 0.1, (runs, STEPS)),
    "heavy tails": lambda rng, runs: 1 + rng.pareto(1.2, (runs, STEPS)) * (rng.random((runs, STEPS)) < 0.5),
}


@pytest.mark.parametrize("kind", NOISE)
def test_no_false_alarm_and_each_planted_slowdown_caught(check, kind):
    for planted, expected in ((1.0, 0), (1.2, REPEATS)):
        alarms = 0
        for repeat in range(REPEATS):
            rng = np.random.default_rng([repeat, list(NOISE).index(kind)])
            runs = (0.2 * NOISE[kind](rng, 2 * PAIRS)).reshape(PAIRS, 2, STEPS)
            for pair, new_first in zip(runs, rng.permutation(PAIRS) % 2, strict=True):
                pair[:] = pair[::-1] if new_first else pair
            old, new = ([check.run_seconds(steps * by) for steps in runs[:, i]] for i, by in ((0, 1), (1, planted)))
            alarms += check.slowdown(old, new) > check.ALARM
        assert alarms == expected, (kind, planted)


def test_the_tables_of_the_page_are_those_of_the_program(check):
    import alarm_on_noise

    page = (ROOT / "docs/regression-alarm.md").read_text()
    for table in alarm_on_noise.tables(1000).split("\n\n"):
        assert table in page, table


# --- two checkouts ---------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """Copies of what a run needs, by name."""

    def copy(name: str) -> Path:
        shutil.copytree(ROOT / "shared", tmp_path / name / "shared", ignore=shutil.ignore_patterns("__pycache__"))
        script = tmp_path / name / "01-ddp-pytorch-only/train_ddp.py"
        script.parent.mkdir()
        shutil.copy(ROOT / "01-ddp-pytorch-only/train_ddp.py", script)
        return tmp_path / name

    return copy


SLOWLY = f"""
prompt_batches = even_batches


def even_batches(*args):
    import time

    return (time.sleep({SLEEP_S}) or batch for batch in prompt_batches(*args))
"""


def test_a_checkout_that_sleeps_in_each_step_raises_the_alarm(checkout):
    old, new = checkout("old"), checkout("new")
    with open(new / "shared/sampling.py", "a") as file:
        file.write(SLOWLY)
    said = call(SCRIPT, old, new, "--pairs", 1, "--steps", 4, code=1)
    assert "1 pair of 4 steps" in said and "drawn with seed 0" in said
    assert f"old  {old}, " in said and f"new  {new}, " in said
    (pair,) = (line.split() for line in said.splitlines() if line.startswith("pair "))
    assert pair[2] == "old" and float(pair[-3].rstrip(",")) >= SLEEP_S
    assert "; the same for both" in said and "ALARM: a step of NEW takes" in said


def test_a_verdict_below_the_alarm_is_fine(check, capsys):
    assert check.verdict(1.09, "a step of NEW takes") is False and check.verdict(1.11, "it takes") is True
    assert capsys.readouterr().out.startswith("fine: a step of NEW takes 1.090 times as long")


def test_each_side_runs_first_in_half_of_the_pairs(check):
    orders = {seed: check.first_of_each_pair(8, seed) for seed in range(20)}
    assert all(sorted(order) == ["new"] * 4 + ["old"] * 4 for order in orders.values())
    assert len(set(map(tuple, orders.values()))) > 10 and orders[0] == check.first_of_each_pair(8, 0)


def test_a_run_by_another_shared_is_refused(tmp_path):
    step_times = SCRIPT.with_name("step_times.py")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}  # it has no `shared`: Python takes the installed one
    done = subprocess.run(
        [sys.executable, step_times, tmp_path, tmp_path / "steps.json"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and f"not from {tmp_path / 'shared'}" in done.stderr
    assert not (tmp_path / "steps.json").exists()


# --- two files -------------------------------------------------------------------------------------------------------

RESULT = {"date": "2026-11-23", "device": "a CPU, 2 CPUs", "cpus": 2, "torch": "2.15.0", "one_process": {"ratio": 1.0},
          "two_processes": [{"local_batch": 32, "accumulation": 2, "ratio": 0.8}]}  # fmt: skip


@pytest.fixture
def result(tmp_path):
    """Files of results that differ from RESULT in something."""

    def write(name: str, **change: object) -> Path:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**RESULT, **change}))
        return path

    return write


def test_files_are_compared_by_their_ratios(result):
    old, same = result("old"), result("same", date="2026-11-24")
    said = call(SCRIPT, old, same, code=0)
    assert "two_processes 32 x 2: 0.800, then 0.800" in said and "weaker" in said and "date: 2026-11-23 and" in said
    slower = result("slower", one_process={"ratio": 0.8})
    said = call(SCRIPT, old, slower, code=1)
    assert "one_process: 1.000, then 0.800  <- slower" in said
    assert "ALARM: at worst (one_process), relative to its baseline, it takes 1.250 times as long" in said
    assert "fine: " in call(SCRIPT, slower, old, code=0)  # faster


def test_files_of_two_kinds_are_refused(result):
    old = result("old")
    line = refused(old, result("new", device="another", torch="2.16.0"))
    assert "device a CPU, 2 CPUs and another; torch 2.15.0 and 2.16.0" in line
    assert "smoke run" in refused(old, result("quick", quick=True))
    assert "no ratio in common" in refused(old, result("other", one_process=0, two_processes=[], data={"ratio": 1}))


def test_what_is_refused(tmp_path, result):
    assert "does not exist" in refused(ROOT, tmp_path / "nope")
    assert "is not a checkout of this repository: it has no 01-ddp-pytorch-only/train_ddp.py" in refused(tmp_path, ROOT)
    assert "not one of each" in refused(ROOT, result("old"))
    (tmp_path / "text").write_text("{")
    assert "text is not JSON" in refused(tmp_path / "text", result("old"))
    (tmp_path / "list").write_text("[]")
    assert "has no ratios" in refused(tmp_path / "list", result("old"))
    assert "--pairs: 0 is not above 0 (see --help)" in refused(ROOT, ROOT, "--pairs", "0")
    assert "--steps 3 is too few" in refused(ROOT, ROOT, "--steps", "3")
    assert "the following arguments are required: NEW" in refused(ROOT)
