"""launch_multinode_ddp.sh is interrupted: on this machine, and with nodes that it reaches by ssh."""

import json
import re
import signal
from pathlib import Path

import pytest
from launcher import ENDS_WITHIN, alive, assert_nothing_runs, start_training

from shared.rendezvous import free_port

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind_and_says_how_to_go_on(tmp_path, number):
    marker = tmp_path / "storage"
    process = start_training(["localhost", "localhost"], tmp_path, marker)
    assert len(alive(marker)) >= 5  # the launcher, two agents, two ranks
    process.send_signal(number)
    assert process.wait(timeout=ENDS_WITHIN) == 128 + number
    assert_nothing_runs(marker)
    assert re.search(r"\[node 0 localhost\] \[rank 0/2\] stopped by .*--resume", (tmp_path / "output.txt").read_text())


def test_remote_nodes_end_with_the_launcher(tmp_path, fake_ssh):
    """Two loopback addresses as hosts, reached through the stand-in for ssh, from a folder with a blank in its name."""
    folder, marker = tmp_path / "a folder", tmp_path / "storage"
    folder.mkdir()
    (folder / "hosts.txt").write_text("# the cluster\n127.0.0.1\n\n  127.0.0.2  # the second\r\n")
    words = ["--hostfile", "hosts.txt", "--port", str(free_port())]  # not the default: another test run may hold it
    process = start_training(words, folder, marker, OMP_NUM_THREADS="1", **fake_ssh)
    calls = [json.loads(line) for line in Path(fake_ssh["FAKE_SSH_LOG"]).read_text().splitlines()]
    checks, agents = [call for call in calls if "-n" in call], [call for call in calls if "-tt" in call]
    assert [call[-2] for call in checks] == ["127.0.0.1", "127.0.0.2"] == sorted(call[-2] for call in agents)
    assert all("OMP_NUM_THREADS=1" in call[-1] and "BatchMode=yes" in call for call in agents)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=ENDS_WITHIN) == 130
    assert_nothing_runs(marker)
    text = (folder / "output.txt").read_text()
    assert "[node 0 127.0.0.1] [rank 0/2] stopped by SIG" in text and "\r" not in text
