"""shared.ranks: functions of a notebook on forked ranks, and what is reported of ranks that fail or hang."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil
import pytest
import torch
import torch.distributed as dist

from shared import ranks


@dataclass
class Report:
    rank: int
    total: torch.Tensor


def add_ranks(start):
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {torch.get_num_threads()} thread")
    return Report(dist.get_rank(), total)


def test_results_and_what_is_printed_come_in_rank_order(capfd):
    reports = ranks.run(add_ranks, 11, 0.5)
    assert [report.rank for report in reports] == list(range(11))
    assert all(report.total == 11 * 0.5 + 55 for report in reports)
    assert capfd.readouterr().out == "".join(f"rank {rank} of 11 on 1 thread\n" for rank in range(11))


def raise_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("the width must divide by 3")
    dist.all_reduce(torch.ones(1))


def read_from_rank_0_only():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    dist.barrier()


def return_early():
    if dist.get_rank() == 1:
        return
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))


def send_more():
    for numbers in (4, 5):
        dist.all_reduce(torch.ones(numbers if dist.get_rank() else 4))


def leave_with_a_code():
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (raise_on_rank_1, ["rank 1: ValueError: the width must divide by 3", "in raise_on_rank_1, line"]),
        (
            read_from_rank_0_only,
            [
                "rank 0 waits in read_from_rank_0_only, line",
                "dist.all_reduce(torch.ones(1))",
                "rank 1 waits in read_from_rank_0_only",
                "dist.barrier()",
            ],
        ),
        (return_early, ["rank 0 waits in return_early", "rank 1 has returned from its function"]),
        (send_more, ["rank 0 was ended by SIGABRT", "receives more than it expects"]),
        (leave_with_a_code, ["rank 1: SystemExit: 3"]),
    ],
)
def test_it_says_which_rank_fails_or_where_each_waits(function, parts):
    with pytest.raises(ranks.RanksFailed) as error:
        ranks.run(function, 2)
    for part in parts:
        assert part in str(error.value)
    assert "run_rank" not in str(error.value)  # nothing of our own


def compute_forever():
    while True:
        torch.ones(100).sum()


def test_ranks_that_do_not_end_are_ended_at_the_limit():
    with pytest.raises(ranks.RanksFailed, match="rank 0 waits in compute_forever"):
        ranks.run(compute_forever, 1, limit_s=8)


def wait_in_one_of_many_groups():
    groups = [dist.new_group() for _ in range(12)]  # each has a thread that looks for messages
    for group in groups:
        dist.barrier(group)
    if dist.get_rank() == 0:
        dist.barrier(groups[0])


def test_a_hang_is_seen_before_the_limit_with_many_groups_too():
    started = time.monotonic()
    with pytest.raises(ranks.RanksFailed, match="rank 0 waits in wait_in_one_of_many_groups"):
        ranks.run(wait_in_one_of_many_groups, 2, limit_s=600)
    assert time.monotonic() - started < 300


def test_a_script_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from shared import ranks\nranks.run(print, 2)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 1 and "call run under `if __name__ == '__main__':`" in done.stderr


def test_a_rank_may_have_processes_of_its_own():
    def load():
        data = torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=1)
        return [batch.tolist() for batch in data]

    assert ranks.run(load, 1) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


NOTEBOOK = """
import os, sys, time
from shared import ranks

def sleep(path):
    open(f"{path}/{os.getpid()}", "w").close()
    while True:
        sum(range(1000))

ranks.run(sleep, 2, sys.argv[1])
"""


def test_ranks_end_with_the_process_that_called(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", NOTEBOOK, str(tmp_path)])
    try:
        deadline = time.monotonic() + 120
        while len(os.listdir(tmp_path)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    started = [int(pid) for pid in os.listdir(tmp_path)]
    assert len(started) == 2
    while any(psutil.pid_exists(pid) for pid in started) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(psutil.pid_exists(pid) for pid in started)
