"""What docs/cluster.md says of launchers, growing clusters and costs."""

import importlib
import json
import re

import numpy as np
import pytest
import ray
import yaml
from notebook_rules import ROOT

CHAPTER = ROOT / "04-ray-in-production"
PAGE = (ROOT / "docs/cluster.md").read_text()
HEAD_PRICE, SPOT_PRICE, MTBF_H = 0.3, 0.35, 2000  # per hour, of the full price of a worker's machine; hours
WORK_H, WORKERS, SAVE_S, RESTART_S = 24, 8, 30, 300


@pytest.fixture(scope="module")
def costs():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CHAPTER))
        yield importlib.import_module("failure_costs")


def job_mtbf_h(share: float, spot_mtbf_h: float) -> float:
    return 1 / (WORKERS * (share / spot_mtbf_h + (1 - share) / MTBF_H))


def plan(costs, share: float, spot_mtbf_h: float, save_s: float = SAVE_S, restart_s: float = RESTART_S):
    """The hours of a run with this share of spot machines, and its bill."""
    mtbf_s = 3600 * job_mtbf_h(share, spot_mtbf_h)
    hours = WORK_H * costs.relative_time(costs.young(save_s, mtbf_s), save_s, restart_s, mtbf_s)
    return hours, hours * (HEAD_PRICE + WORKERS * (share * SPOT_PRICE + 1 - share))


def test_failure_rates_add_up():
    draw = np.random.default_rng(7)
    spot, full = draw.exponential(24, (200_000, 4)), draw.exponential(MTBF_H, (200_000, 4))
    first_h = np.minimum(spot.min(axis=1), full.min(axis=1)).mean()
    assert abs(first_h / job_mtbf_h(0.5, 24) - 1) < 0.01


def test_without_saves_and_restarts_the_bill_is_hours_times_price(costs):
    assert plan(costs, 0, 24, 1e-9, 0)[1] == pytest.approx(WORK_H * (WORKERS + HEAD_PRICE), rel=1e-6)


def test_the_table_of_spot_machines(costs):
    rows = re.findall(r"^\| (\d+) h \| ([\d.]+) \| (\d+) \|$", PAGE, re.MULTILINE)
    full = plan(costs, 0, 24)[1]
    computed = [(h, plan(costs, 1, int(h))) for h, *_ in rows]
    assert rows == [(h, f"{bill / full:.2f}", f"{hours:.0f}") for h, (hours, bill) in computed] and len(rows) == 4
    shares = np.linspace(0.01, 1, 100)
    dearer = shares[[plan(costs, share, 2)[1] > full for share in shares]]
    assert f"a share of up to {round(dearer.max(), 1):.0%}".replace("%", " %") in PAGE


def test_an_idle_weekend():
    left_on, grown, own = 62 * (WORKERS + HEAD_PRICE), 10 / 60 * WORKERS + 62 * HEAD_PRICE, 10 / 60 * (WORKERS + 0.3)
    assert own < grown < left_on / 20
    assert all(part in PAGE for part in (f"cost {left_on:.0f}.", f"down to {grown:.0f},", f"job's own to {own:.1f}."))


def test_the_cluster_files_keep_the_head_free_and_have_one_gpu_per_worker():
    def read(path: str) -> dict:
        return yaml.safe_load((CHAPTER / "program/deployment" / path).read_text())

    aws, pods, anyscale = (
        read("cluster.yaml"),
        read("kubernetes/raycluster.yaml")["spec"],
        read("anyscale/compute.yaml"),
    )
    kinds, (group,), (pool,) = aws["available_node_types"], pods["workerGroupSpecs"], anyscale["worker_nodes"]
    assert kinds["head"]["resources"]["CPU"] == anyscale["head_node"]["resources"]["CPU"] == 0
    assert pods["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0" and pods["rayVersion"] == ray.__version__
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert kinds["gpu-worker"]["resources"]["GPU"] == int(limits["nvidia.com/gpu"]) == 1
    assert pool["instance_type"] == "g4dn.xlarge"  # it has one GPU


def test_the_recorded_cluster_grows_from_no_node_to_two_busy_ones_and_back():
    record = json.loads(sorted((ROOT / "benchmarks/results").glob("autoscale-*.json"))[-1].read_text())
    count, busy = ([change[name] for change in record["changes"]] for name in ("nodes", "busy"))
    assert count[0] == count[-1] == 0 and max(count) == max(busy) == 2
