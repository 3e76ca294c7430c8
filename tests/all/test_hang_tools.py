"""What lesson 1.4 says of PyTorch's debug server, and of its flight recorder on gloo: on ranks that really hang."""

import inspect
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from urllib.error import HTTPError

import psutil
import pytest
from notebook_rules import ROOT, Notebook
from runs import LIMIT, TORCHRUN
from torch.distributed.debug import start_debug_server
from torch.distributed.flight_recorder import fr_trace

CHAPTER = ROOT / "01-ddp-pytorch-only"


@pytest.fixture
def script(monkeypatch, tmp_path):
    """The module hang_with_debug_page.py; the current folder is an empty one."""
    monkeypatch.syspath_prepend(str(CHAPTER))
    monkeypatch.chdir(tmp_path)
    import hang_with_debug_page

    return hang_with_debug_page


def open_ports(process: psutil.Process) -> set[int]:
    """The ports where a process listens on all network interfaces."""
    listening = [each.laddr for each in process.net_connections("tcp6") if each.status == psutil.CONN_LISTEN]
    return {address.port for address in listening if address.ip == "::"}


def test_the_debug_page_shows_a_hang_to_everyone(script, tmp_path, capsys):
    with script.hanging_job() as (job, port):
        script.report(port)
        printed = capsys.readouterr().out.splitlines()
        quoted = "".join(cell.source for cell in Notebook(CHAPTER / "04_torchrun.ipynb").cells).splitlines()
        assert len(printed) == 4 and set(printed) < set(quoted)
        assert printed[0].startswith("rank 0: all_reduce (distributed_c10d.py:")
        assert printed[1].startswith("rank 1: hang (hang_with_debug_page.py:")
        source = (CHAPTER / "hang_with_debug_page.py").read_text().splitlines()
        lines = [int(re.search(r"hang \(hang_with_debug_page\.py:(\d+)\)", stack)[1]) for stack in printed[:2]]
        assert source[lines[0] - 1].strip() == "dist.all_reduce(loss, group=patient)"
        assert source[lines[1] - 1].strip() == "time.sleep(60)"
        assert printed[2:] == [
            "rank 0: gloo:all_reduce in group patient, still waiting",
            "rank 1: gloo:barrier in group default_pg, completed",
        ]

        # The tables of the recorder fail on gloo. Nobody asks who starts the profiler.
        with pytest.raises(HTTPError, match="KeyError"):
            script.read("fr_trace", port)
        profiles = f"http://localhost:{port}/profile?duration=0.1"
        assert b'"traceEvents"' in script.build_opener(script.ProxyHandler({})).open(profiles).read()

        ranks = psutil.Process(job.pid).children()
        (page,) = [each for each in ranks[0].children() if port in open_ports(each)]
        assert len(ranks) == 2 and all(open_ports(rank) for rank in ranks)

        # A file with all stacks, too. Its headings have the addresses of the ranks.
        stacks, deadline = "", time.monotonic() + LIMIT
        while f"=== Rank 1: http://{socket.gethostname()}:" not in stacks:
            assert job.poll() is None and time.monotonic() < deadline, stacks
            stacks = "".join(path.read_text() for path in tmp_path.glob("runs/lesson-1-4/stacks/stacks_*.txt"))

        ranks[0].kill()
        job.wait(LIMIT)
        try:
            assert port in open_ports(page)  # it outlives rank 0
        finally:
            page.kill()


def test_the_debug_server_cannot_be_bound_to_an_address_and_needs_a_package_that_it_does_not_list():
    parameters = inspect.signature(start_debug_server).parameters
    assert set(parameters) == {
        "port", "worker_port", "start_method", "dump_dir", "dump_interval", "enabled_dumps", "handlers",
        "fetch_timeout",
    }  # fmt: skip
    assert parameters["port"].default == 25999 and parameters["dump_interval"].default == 60
    assert "Jinja2" in start_debug_server.__doc__ and "tabulate" not in start_debug_server.__doc__
    code = "import sys; sys.modules['tabulate'] = None; import torch.distributed.debug._debug_handlers"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert failed.returncode == 1 and "ModuleNotFoundError: import of tabulate" in failed.stderr


HANG_TWICE = """
import os
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

from shared import distributed

worker = distributed.join()
for _ in range(2000):
    dist.all_reduce(torch.ones(1))
for level in ("OFF", "DETAIL"):
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
    dist.set_debug_level_from_env()
    dist.barrier()  # both are here, and have six seconds to connect
    group = dist.new_group(timeout=timedelta(seconds=6), group_desc=level)
    if worker.rank == 0:
        with suppress(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
            raise SystemExit("no timeout")
    with_collectives, with_stacks, only_active = True, False, False
    records = _dump_fr_trace(with_collectives, with_stacks, only_active)
    Path(sys.argv[1], f"{level}_{worker.rank}").write_bytes(records)
dist.barrier()  # rank 1 stays until rank 0 has waited in vain
distributed.leave()
"""


def test_the_flight_recorder_on_gloo_and_what_it_lacks(tmp_path):
    script = tmp_path / "hang_twice.py"
    script.write_text(HANG_TWICE)
    environment = {**os.environ, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_ON_TIMEOUT": "1"}
    environment["TORCH_FR_DUMP_TEMP_FILE"] = str(tmp_path / "at_timeout_")
    command = [*TORCHRUN, "--nproc-per-node", "2", str(script), str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=LIMIT)

    def records(level: str, rank: int) -> list[tuple]:
        entries = pickle.loads((tmp_path / f"{level}_{rank}").read_bytes())["entries"]
        assert len(entries) == 2000
        return [(each["profiling_name"], each["process_group"][1], each["collective_seq_id"]) for each in entries]

    waiting = ("gloo:all_reduce", "OFF", 1)
    assert records("OFF", 0)[-2:] == [("gloo:barrier", "default_pg", 2002), waiting]  # barriers and 2,000 all-reduces
    assert records("OFF", 1)[-1] == ("gloo:barrier", "default_pg", 2002)
    later = records("DETAIL", 0)
    later = later[later.index(waiting) + 1 :]
    assert ("gloo:barrier", "default_pg", 2003) in later and not any("all_reduce" in name for name, _, _ in later)
    assert list(tmp_path.glob("at_timeout_*")) == []
    with pytest.raises(KeyError):
        fr_trace.main([str(tmp_path), "--prefix", "OFF_"])  # the command torchfrtrace
