"""Chapter 4's page and lesson 4.1: what failures cost, by formula, by simulation, and as their tables say."""

import importlib
import json
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.constants import default_pg_timeout
from notebook_rules import ROOT
from ray.train.torch import TorchConfig
from ray.train.v2._internal import constants

from shared.on_ray import cluster

PAGE = (ROOT / "04-ray-in-production/README.md").read_text()
GRID = np.geomspace(10, 20_000, 5000)


@pytest.fixture
def costs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "04-ray-in-production")
    return importlib.import_module("failure_costs")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of the page, without its head."""
    lines = PAGE.partition(f"### {heading}\n")[2].partition("\n#")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]


@pytest.mark.parametrize(("save_s", "restart_s", "mtbf_s"), [(30, 120, 21_600), (0.5, 20, 11_160), (200, 120, 3600)])
def test_the_formula_is_what_a_simulation_gives(costs, save_s, restart_s, mtbf_s):
    for times in (0.5, 1, 2):
        interval = times * costs.young(save_s, mtbf_s)
        case = {"save_s": save_s, "restart_s": restart_s, "mtbf_s": mtbf_s}
        assert abs(costs.simulated(interval, **case) / costs.relative_time(interval, **case) - 1) < 5e-3


def test_detection_and_restart_do_not_move_the_best_interval(costs):
    best = {GRID[np.argmin(costs.relative_time(GRID, 30, restart_s, 21_600))] for restart_s in (0, 120, 1800)}
    assert len(best) == 1 and abs(best.pop() / costs.young(30, 21_600) - 1) < 0.03


@pytest.mark.parametrize(("save_s", "youngs"), [(20, 0.0001), (200, 0.002), (2000, 0.06)])
def test_dalys_interval_is_closer_where_a_save_is_long(costs, save_s, youngs):
    case = {"save_s": save_s, "restart_s": 120, "mtbf_s": 3600}
    best = min(costs.relative_time(GRID, **case))
    young, daly = (
        max(0, costs.relative_time(rule(save_s, 3600), **case) / best - 1) for rule in (costs.young, costs.daly)
    )
    assert daly < 1e-3 and daly <= young
    assert round(young, 4 if young < 1e-3 else 3 if young < 0.01 else 2) == youngs


def test_a_factor_of_two_adds_a_quarter_of_the_cost_of_saves_and_replays(costs):
    """To first order, where a save is short: the rule behind lesson 4.1's "roughly a quarter"."""
    for save_s, mtbf_s in ((30, 21_600), (1, 21_600)):
        interval, share = costs.young(save_s, mtbf_s), np.sqrt(2 * save_s / mtbf_s)
        best = costs.relative_time(interval, save_s, 0, mtbf_s)
        assert best - 1 == pytest.approx(share, rel=0.1)
        for times in (0.5, 2):
            more = costs.relative_time(times * interval, save_s, 0, mtbf_s) / best - 1
            assert more == pytest.approx(share / 4, rel=0.15)


def test_the_bill_on_spot_machines(costs):
    hours = {"¼ hour": 0.25, "hour": 1, "6 hours": 6, "24 hours": 24}
    for every, *shown in rows("The bill on spot machines"):
        long, short = (costs.bill(0.35, 30, restart_s, hours[every]) for restart_s in (1200, 120))
        bills = (long, short, costs.bill(0.35, 30, 120, hours[every], notice=True))
        assert shown == [f"{bill:.2f}" for bill in bills]
        assert every == "¼ hour" or long < 1
    for mtbf_h in np.geomspace(0.03, 1000, 50):
        long, short = (costs.bill(0.35, 30, restart_s, mtbf_h) for restart_s in (1200, 120))
        assert long > short > costs.bill(0.35, 30, 120, mtbf_h, notice=True)


def test_how_often_jobs_fail():
    llama_h = 54 * 24 / 419
    assert round(llama_h, 1) == 3.1 and round(llama_h * 16, 1) == 49.5 and round(llama_h * 16 / 7.9, 1) == 6.3
    assert round(47.7 * 24 / 128, 1) == 8.9
    for shown in ("every 3.1 hours", "gives 8.9 hours", "gives 49.5 hours, 6.3 times"):
        assert shown in PAGE


def test_the_page_shows_the_recorded_elastic_run():
    path = sorted((ROOT / "benchmarks/results").glob("elastic-*.json"))[-1]
    record = json.loads(path.read_text())
    assert record["worlds"] == [2, 1, 2] and record["largest_difference"] < 1e-9
    assert max(change["replayed"] for change in record["changes"]) <= record["save_every_steps"] == 5
    for change, (what, *shown) in zip(record["changes"], rows("Fewer workers instead of none"), strict=True):
        assert change["workers"] in what
        assert shown == [f"{change[key]:.0f}" for key in ("replayed", "seconds", "idle_s")]


def test_the_timeouts_that_lesson_and_page_name():
    assert TorchConfig().timeout_s == 30 * 60 and constants.DEFAULT_WORKER_GROUP_START_TIMEOUT_S == 60
    assert constants.DEFAULT_WORKER_HEALTH_CHECK_TIMEOUT_S == 600
    assert cluster.ELASTIC == {constants.WORKER_GROUP_START_TIMEOUT_S_ENV_VAR: "10"}
    assert dist.constants.default_pg_timeout.total_seconds() == 30 * 60
    assert default_pg_timeout.total_seconds() == 10 * 60
    assert constants.COLLECTIVE_TIMEOUT_S_ENV_VAR == "RAY_TRAIN_COLLECTIVE_TIMEOUT_S"
    assert constants.DEFAULT_COLLECTIVE_TIMEOUT_S is None


def test_a_new_group_has_a_timeout_of_its_own(tmp_path):
    """`TorchConfig(timeout_s=...)` and `dist.set_timeout` change the default group alone."""

    def timeout_s(group):
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    dist.init_process_group("gloo", f"file://{tmp_path}/store", timedelta(seconds=10), world_size=1, rank=0)
    try:
        new = dist.new_group()
        assert (timeout_s(dist.group.WORLD), timeout_s(new)) == (10, 1800)
        assert timeout_s(dist.new_group(timeout=timedelta(seconds=7))) == 7
        dist.set_timeout(timedelta(seconds=3))
        assert (timeout_s(dist.group.WORLD), timeout_s(new)) == (3, 1800)
    finally:
        dist.destroy_process_group()
