"""shared.distributed: what four ranks see of each other, and what one process does without a group."""

import subprocess
from pathlib import Path

import pytest
import torch
from runs import TORCHRUN

from shared import distributed


def test_four_ranks_meet(tmp_path):
    command = [*TORCHRUN, "--nproc-per-node", "4", Path(__file__).with_name("ranks_meet.py"), tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)  # above the ranks' own 600 s
    assert done.returncode == 0, done.stderr


def test_one_process_needs_no_group():
    values = torch.ones(2)
    assert distributed.global_sum(values).tolist() == [1.0, 1.0]
    assert distributed.gather_objects("mine") == ["mine"] and distributed.from_rank_zero("mine") == "mine"
    distributed.check_same("mine", "not raised")
    with pytest.raises(distributed.UsageError, match="disk full"), distributed.fail_together():
        raise OSError("disk full")
    with pytest.raises(KeyError), distributed.fail_together():
        raise KeyError("a bug is not the user's mistake")
    assert distributed.agent_store() is None
