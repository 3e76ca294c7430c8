"""torchrun restarts train_ddp.py: after one of four ranks is killed, a rank on one of two nodes, and rank 0's host."""

import re
import time
from pathlib import Path

import psutil
import pytest
from kills import assert_equal_runs, options_for_kills, saved_after
from runs import Fork, Run

from shared.rendezvous import free_port


def test_one_rank_is_killed_and_torchrun_restarts_all(small_mnist, undisturbed, tmp_path):
    """One of four. (Of two: lesson 1.4, a ResNet.)"""
    run = Fork(4, tmp_path, *options_for_kills(small_mnist), max_restarts=1)
    run.wait_for(tmp_path / "run", saved_after(1))
    time.sleep(0.15)
    psutil.Process(run.process.pid).children()[-1].kill()
    assert run.finish() == 0, run.text
    assert "resuming from" in run.text
    assert_equal_runs(tmp_path, run.metrics(), undisturbed(4))


def start_nodes(tmp_path: Path, min_nodes: int, options: tuple, *storage: Path) -> list[Run]:
    """One torchrun agent for each storage path, as on hosts of their own; the first one's number 0 is rank 0."""
    port, nodes = free_port(), []
    for number, path in enumerate(storage):
        folder = tmp_path / f"node-{number}"
        folder.mkdir()
        torchrun = {
            "min_nodes": min_nodes, "max_nodes": len(storage), "max_restarts": 2, "run_id": tmp_path.name,
            "rdzv_endpoint": f"127.0.0.1:{port}", "local_addr": f"127.0.0.{number + 1}",
            # The meeting point is on the last node, so that it outlives the first. Agents number themselves by address.
            "rdzv_configs": {"is_host": number == len(storage) - 1, "last_call_timeout": 3, "keep_alive_interval": 1},
            "start_method": "spawn",  # ranks of the other nodes come while this one's are made: see run_rank
        }  # fmt: skip
        nodes.append(Fork(1, folder, *options, "--storage-path", path, **torchrun))
    return nodes


def test_two_nodes_restart_from_the_storage_that_they_share(small_mnist, undisturbed, tmp_path):
    nodes = start_nodes(tmp_path, 2, options_for_kills(small_mnist), tmp_path, tmp_path)
    nodes[0].wait_for(tmp_path / "run", saved_after(2))
    psutil.Process(nodes[1].process.pid).children()[-1].kill()
    for node in nodes:
        assert node.finish() == 0, node.text
    assert "resuming from" in nodes[0].text + nodes[1].text
    (metrics,) = [node.metrics() for node in nodes if node.metrics_file.exists() and node.metrics_file.read_text()]
    assert_equal_runs(tmp_path, metrics, undisturbed(2))


@pytest.mark.parametrize("shared", [True, False])
def test_rank_0s_host_is_lost(shared, small_mnist, tmp_path):
    """The other node becomes rank 0. It goes on from storage that they share, and refuses to begin anew elsewhere."""
    storage = [tmp_path / "here", tmp_path / ("here" if shared else "there")]
    options = options_for_kills(small_mnist)
    nodes = start_nodes(tmp_path, 1, options, *storage)
    nodes[0].wait_for(storage[0] / "run", saved_after(1))
    nodes[0].kill()  # its rank too, which is of the same session
    assert nodes[1].finish() == (0 if shared else 1), nodes[1].text
    if shared:
        assert "resuming from" in nodes[1].text
        assert [line["epoch"] for line in nodes[1].metrics()] == [1, 2, 3, 4, 5]
    else:
        assert re.search(r"error: the checkpoint after step \d+ is not in .*/there/run on", nodes[1].text), nodes[
            1
        ].text
        assert not list((storage[1] / "run").glob("*.pt"))
