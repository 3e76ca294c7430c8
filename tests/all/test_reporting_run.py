"""The program of docs/watching.md on a Ray with a dashboard: what Ray's pages, logs and metrics say of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import LIMIT
from watching import CHAPTER_4, panels, reporting_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of a run that has ended."""
    place = tmp_path_factory.mktemp("reporting")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, CHAPTER_4 / "reporting_run.py", place / "run"]
    done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return place / "run"


@pytest.fixture(scope="module")
def answers(folder) -> dict:
    return json.loads((folder / "answers.json").read_text())


@pytest.fixture(scope="module")
def lines(folder) -> list[dict]:
    return [json.loads(line) for path in folder.glob("steps-*.jsonl") for line in path.read_text().splitlines()]


def test_ray_knows_the_processes_of_the_run_and_their_ranks(answers, lines):
    processes = {str(line["rank"]): line["pid"] for line in lines}
    asked = answers["ray"]
    workers = {int(pid) for pid, name in asked["actors"].items() if name == "RayTrainWorker"}
    assert workers == set(processes.values()) and len(workers) == 2
    assert asked["run"] == {"name": "reporting", "status": "RUNNING", "attempts": 1}
    assert asked["processes"] == processes
    assert asked["jobs"] == [{"type": "DRIVER", "status": "RUNNING"}]


def test_the_logs_hold_every_line_of_both_ranks(answers):
    logged = answers["ray"]["logged"]
    assert {rank for rank, _ in logged} == {0, 1} and len(logged) == 2 * (reporting_run.ASK_AFTER // 10)


def test_the_metrics_grow_by_what_each_rank_does(answers, lines):
    steps = reporting_run.STEPS - 1 - reporting_run.ASK_AFTER
    before, after = answers["samples"]
    for rank in ("0", "1"):
        seen = sum(line["samples"] for line in lines if str(line["rank"]) == rank)
        per_step = seen / reporting_run.STEPS
        assert before[rank] == reporting_run.ASK_AFTER * per_step and after[rank] - before[rank] == steps * per_step
    slow = str(reporting_run.SLOW_RANK)
    assert answers["grown"][reporting_run.WORK][slow] >= steps * reporting_run.SLOW_S
    names = ("samples_total", "work_seconds_total", "wait_seconds_total", "step_seconds_bucket", "memory_bytes")
    assert {f"ray_training_{name}" for name in names} <= set(answers["exported"])


def test_two_ranks_send_twice_the_bytes_of_the_gradients(lines):
    sent = sum(line["sent"] for line in lines if line["rank"] == 0 and line["step"] > 1)
    gradients = 4 * 176_650 * (reporting_run.STEPS - 1)
    assert sent >= 0.99 * 2 * gradients


def test_the_dashboard_has_our_panels_below_those_of_ray(folder):
    together = json.loads((folder / "train_and_ours.json").read_text())["panels"]
    ours = together[-len(panels()) :]
    assert [panel["title"] for panel in ours] == [panel["title"] for panel in panels()]
    theirs = together[: -len(panels())]
    assert theirs and min(panel["gridPos"]["y"] for panel in ours) >= max(panel["gridPos"]["y"] for panel in theirs)
    assert len({panel["id"] for panel in together}) == len(together)
    assert {path.parent.name for path in (folder / "tensorboard").glob("*/events*")} == {"rank-0", "rank-1"}
