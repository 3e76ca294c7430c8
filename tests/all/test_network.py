"""Two nodes on this machine, the benchmark on them, and what docs/communication.md says of sums and local SGD."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from notebook_rules import Notebook
from runs import LIMIT, ROOT
from tables import table_rows

from checks import machinery

BENCHMARKS = ROOT / "benchmarks"
OWN_NETWORK = ["unshare", "--user", "--map-root-user", "--net", "bash"]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import bench_network

    return bench_network


@pytest.fixture
def two_nodes(bench):
    if problem := bench.unavailable_reason():
        pytest.skip(f"no private network namespaces on this machine: {problem}")
    return bench


def test_where_it_is_refused_it_says_so_and_writes_nothing(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        bench, "OWN_NETWORK", ["bash", "-c", "echo 'unshare failed: Operation not permitted' >&2; exit 1"]
    )
    monkeypatch.setattr(sys, "argv", ["bench_network.py", "--quick", "--out", str(tmp_path / "out")])
    bench.main()
    assert "Operation not permitted" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_machine_without_unshare_is_told_so(bench, monkeypatch):
    monkeypatch.setattr(bench, "OWN_NETWORK", ["no-such-program"])
    assert "no-such-program" in bench.unavailable_reason()


def test_what_was_started_ends_with_the_script(two_nodes, tmp_path):
    """Also where it is killed and cannot tidy up: nothing of it runs on."""
    script = tmp_path / "sleeps.py"
    touch = f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).touch()"
    script.write_text(f"import os, pathlib, time\n{touch}\ntime.sleep(600)\n")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    process = subprocess.Popen([*two_nodes.OWN_NETWORK, "1", str(script)], env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not all((tmp_path / rank).exists() for rank in "01"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 5  # the process that holds a network, two agents, two ranks
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    _, alive = psutil.wait_procs(started, timeout=60)
    for one in alive:
        one.kill()
    assert not alive


def test_quick_run_writes_a_table_the_raw_numbers_and_a_figure(two_nodes, tmp_path):
    command = [sys.executable, BENCHMARKS / "bench_network.py", "--quick", "--out", tmp_path]
    done = subprocess.run(command, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("network-*.json")
    result = json.loads(path.read_text())
    page = path.with_suffix(".md").read_text()
    assert page == two_nodes.report(result, f"{path.stem}.svg") and "smoke run" in page

    for run in result["ways"]:
        size = two_nodes.EXPECTED[run["way"]]
        assert size < run["wire"] * 1.001 and run["wire"] < 1.02 * size + 20_000, run  # small ones: mostly headers
    levels = result["levels"]
    for way, size in {"flat": 1.5 * levels["bytes"], "hierarchical": levels["bytes"]}.items():
        assert abs(levels["wire"][way] / size - 1) < 0.02

    header, rule, *body = table_rows(page, "way")
    assert [row[0] for row in body] == list(two_nodes.EXPECTED)
    assert all(len(row) == len(header) == len(rule) for row in body)
    assert "goal 2%: reached" in page.replace("\n", " ") and "goal 1.2: " in page
    assert path.with_suffix(".svg").read_text().startswith("<?xml")


THREE_NODES = """
set -e
ip link add bridge type bridge
ip link set bridge up
ip link set lo up
nodes=
for number in 0 1 2; do
    setpriv --pdeathsig TERM unshare --net sleep infinity & node=$!
    until [ "$(readlink /proc/$node/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
    ip link add port$number type veth peer name wire netns $node
    ip link set port$number master bridge up
    nsenter --net --target $node ip address add 10.45.0.$((number + 1))/24 dev wire
    nsenter --net --target $node ip link set wire up
    nsenter --net --target $node ip link set lo up
    nodes="$nodes $node"
done
limit="tbf rate 50mbit burst 64kb latency 1s"  # of the last node, in both directions
nsenter --net --target $node tc qdisc add dev wire root $limit
tc qdisc add dev port2 root $limit

export GLOO_SOCKET_IFNAME=wire
meet="--nnodes 3 --master-addr 10.45.0.1 --master-port 29500 --nproc-per-node 1"
number=0 agents=
for node in $nodes; do
    setpriv --pdeathsig TERM nsenter --net --target $node torchrun $meet --node-rank $number "$@" & agents="$agents $!"
    number=$((number + 1))
done
for agent in $agents; do wait $agent; done
kill $nodes
"""


def test_one_slow_link_makes_every_rank_wait(two_nodes, tmp_path, monkeypatch):
    """Lesson 4.3: not only the rank behind the link waits, so its clocks show a slow network."""
    lesson = ROOT / "04-ray-in-production"
    monkeypatch.syspath_prepend(lesson)
    import watched_ranks

    (step,) = (cell.body for cell in Notebook(lesson / "03_watching.ipynb").code if cell.raw["id"] == "step")
    (tmp_path / "step.py").write_text(step)
    words = [lesson / "watched_ranks.py", tmp_path / "step.py", tmp_path, "7", "16", json.dumps(["one link", []])]
    command = [*OWN_NETWORK, "-c", THREE_NODES, "bash", *words]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    lines = watched_ranks.read_lines(tmp_path, "one link")
    assert len(lines) == 3 * 16
    for rank in range(3):  # 706,600 bytes have to pass the link, which takes 0.113 s less what the bucket lets through
        assert statistics.median(line["waiting"] for line in lines if line["rank"] == rank) >= 0.08, lines


LEVELS = """
import torch
import torch.distributed as dist

from shared import distributed

worker = distributed.join()
inside, _ = dist.new_subgroups(group_size=2)  # ranks 0 and 1, ranks 2 and 3: the nodes
across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
gradient = torch.randn(2**20, generator=torch.Generator().manual_seed(worker.rank))
flat, levels, part = gradient.clone(), gradient.clone(), gradient.new_empty(2**19)
dist.all_reduce(flat)
dist.reduce_scatter_tensor(part, levels, group=inside)
dist.all_reduce(part, group=across)
dist.all_gather_into_tensor(levels, part, group=inside)
print(((flat - levels).abs().max() / flat.abs().max()).item())
distributed.leave()
"""


def test_a_hierarchical_all_reduce_returns_the_sums_of_a_flat_one(tmp_path):
    (tmp_path / "levels.py").write_text(LEVELS)
    for printed in machinery.run_script(tmp_path / "levels.py", 4):
        assert float(printed) < 1e-6


APART = """
import sys

import torch
import torch.nn.functional as F
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel

sys.path.append("benchmarks")
import network_ranks

from shared import datasets, distributed

worker = distributed.join()
models = []
network_ranks.DistributedDataParallel = lambda *args, **options: models.append(
    DistributedDataParallel(*args, **options)) or models[-1]


def apart(model):
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return (weights - distributed.from_rank_zero(weights)).abs().max().item()


for way in ("baseline", "PowerSGD 4", "local SGD 4"):
    network_ranks.train({"way": way, "steps": 6, "bucket_mb": 100})
    before = apart(models[-1])
    average_parameters(models[-1].parameters(), None)
    print(way, before, apart(models[-1]), sep=",")
distributed.leave()
"""


def test_local_sgd_leaves_different_weights_until_one_more_average(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "apart.py").write_text(APART)
    for rank, printed in enumerate(machinery.run_script(tmp_path / "apart.py", 2)):
        for way, before, after in (line.split(",") for line in printed.splitlines()):
            assert (float(before) > 1e-4) == (way == "local SGD 4" and rank == 1), (rank, way)
            assert float(after) == 0
