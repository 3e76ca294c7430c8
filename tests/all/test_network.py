"""Two nodes on this machine and the benchmark that uses them: what is written, what is sent, and what stays behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from runs import ROOT
from tables import table_rows

BENCHMARKS = ROOT / "benchmarks"


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
