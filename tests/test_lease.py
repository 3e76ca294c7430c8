"""shared.running.lease: one writer per run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from runs import LIMIT, ROOT, Fork

from shared import checkpoint
from shared.distributed import Worker
from shared.errors import UsageError
from shared.on_ray.storage import RayRun
from shared.running import lease, runs

HOLDS = """
import sys, time
from shared.running import lease, runs
from shared.distributed import Worker
run = runs.Run(sys.argv[1])
run.make_folder()
lease.acquire(run, Worker())
print("holds it", flush=True)
time.sleep(10_000)
"""


@pytest.fixture(autouse=True)
def nothing_is_held_afterwards():
    yield
    lease.release()


@pytest.fixture(params=["files", "Ray's storage"])
def run(request, tmp_path) -> runs.Run:
    made = runs.Run(tmp_path) if request.param == "files" else RayRun(str(tmp_path))
    made.make_folder()
    return made


def again(run: runs.Run) -> runs.Run:
    """The same run, as a different process would open it."""
    return type(run)(run.folder)


def holder_of(run: runs.Run) -> dict:
    while not (text := Path(run.folder, lease.NAME).read_text()):  # it is being written
        time.sleep(0.01)
    return json.loads(text)


def become_a_different_host(run: runs.Run, age_s: float = 0) -> None:
    """The lease looks as if a process of a different host had renewed it `age_s` seconds ago."""
    path = Path(run.folder, lease.NAME)
    path.write_text(json.dumps(holder_of(run) | {"host": "far-away", "boot": "a different one", "token": "its-token"}))
    os.utime(path, (time.time() - age_s,) * 2)


@pytest.fixture
def holder(run):
    """A different process that holds the run's lease."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(run.folder)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"holds it\n"
    yield process
    process.kill()
    process.wait(LIMIT)


def test_a_second_writer_is_refused_while_the_first_one_lives(run, holder):
    message = (
        rf"{run.folder} is being written by process {holder.pid} on \S+, since \d{{4}}-\d\d-\d\d \d\d:\d\d:.*: stop"
    )
    with pytest.raises(ValueError, match=message):
        lease.acquire(run, Worker())
    holder.send_signal(signal.SIGSTOP)  # it may go on at any time
    with pytest.raises(ValueError, match=message):
        lease.acquire(run, Worker())
    assert holder_of(run)["pid"] == holder.pid and lease.held is None


def test_a_writer_that_was_killed_makes_room_at_once_even_as_a_zombie(run, holder, capsys):
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is still in the table of processes
    lease.acquire(run, Worker())
    assert holder_of(run)["token"] == run.token and capsys.readouterr().out == ""


def test_a_script_that_is_to_continue_a_run_which_is_being_trained_is_refused(tmp_path):
    """The one that trains holds the run; the moment it is killed, the other one may continue."""
    options = ("--model", "mlp", "--run-name", "one", "--quiet")
    first = Fork(0, tmp_path, *options, "--epochs", 10_000)
    first.wait_for_epoch(2)
    second = Fork(0, tmp_path, *options, "--resume", "--epochs", 1)
    assert second.finish() == 2
    assert f"train_ddp.py: error: {tmp_path}/one is being written by process {first.process.pid} on" in second.text
    first.kill()
    assert Fork(0, tmp_path, *options, "--resume", "--epochs", 1).finish() == 0
    assert not (tmp_path / "one" / lease.NAME).exists()


def test_a_clock_that_is_set_makes_no_living_process_a_dead_one(run, holder, monkeypatch):
    """psutil's time of creation is by the clock: it moves with it."""
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + 60)
    with pytest.raises(ValueError, match=f"is being written by process {holder.pid}"):
        lease.acquire(run, Worker())


def test_a_lease_that_is_given_back_makes_room(run):
    lease.acquire(run, Worker())
    lease.release()
    assert not Path(run.folder, lease.NAME).exists()
    lease.acquire(again(run), Worker())


def test_the_same_process_and_the_same_job_may_go_on(run):
    lease.acquire(run, Worker())
    lease.acquire(again(run), Worker())
    become_a_different_host(run)
    third = again(run)
    third.token = "its-token"  # a restart, on a different host
    lease.acquire(third, Worker())
    assert holder_of(run)["pid"] == os.getpid()


def test_of_a_different_host_only_the_age_tells_and_it_is_waited_for(run, monkeypatch, capsys):
    lease.acquire(run, Worker())
    monkeypatch.setattr(lease, "EXPIRY_S", 3)
    become_a_different_host(run)
    started = time.monotonic()
    lease.acquire(again(run), Worker())
    assert time.monotonic() - started > 3
    assert "waiting 3 s at most for a sign of the run's last writer: process" in capsys.readouterr().out
    become_a_different_host(run, age_s=100)
    lease.acquire(again(run), Worker())
    assert capsys.readouterr().out == ""


def test_a_different_host_that_renews_is_alive(run, monkeypatch):
    lease.acquire(run, Worker())
    become_a_different_host(run, age_s=10)
    monkeypatch.setattr("shared.running.lease.time.sleep", lambda seconds: os.utime(Path(run.folder, lease.NAME)))
    with pytest.raises(ValueError, match=r"is being written by process .* on far-away"):
        lease.acquire(again(run), Worker())


def test_the_lease_is_renewed_until_it_is_lost(run, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_S", 0.1)
    lease.acquire(run, Worker())
    path = Path(run.folder, lease.NAME)
    os.utime(path, (0, 0))
    deadline = time.monotonic() + LIMIT
    while path.stat().st_mtime < 1e9 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.stat().st_mtime > 1e9
    monkeypatch.setattr(lease, "RENEW_S", 1)
    time.sleep(0.5)  # from now on the thread has nearly a second to wait
    become_a_different_host(run, age_s=1000)
    time.sleep(2)
    assert holder_of(run)["host"] == "far-away" and time.time() - path.stat().st_mtime > 900
    lease.release()
    assert path.exists()  # it belongs to the other one


@pytest.mark.parametrize("has_finished", [False, True])
def test_who_has_lost_the_lease_saves_nothing_more(run, has_finished, tmp_path):
    lease.acquire(run, Worker())
    become_a_different_host(run)
    if has_finished:
        Path(run.folder, lease.NAME).unlink()
    writer = "a different process, which has finished" if has_finished else r"process \d+ on far-away, since"
    with pytest.raises(UsageError, match=rf"not saved: .* has been taken over by {writer}"):
        if isinstance(run, RayRun):
            run.report({"progress": {"step": 1}}, {}, Worker())
        else:
            run.save({"progress": {"step": 1}}, Worker())
    assert run.list_newest_first() == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_neither_saved_nor_resumed(run, value, tmp_path):
    state = {"model": {"layer.weight": torch.tensor([1.0, value])}, "progress": {"step": 8}}
    with pytest.raises(UsageError, match=r"diverged: layer.weight is not finite \(not saved\): start a new run"):
        if isinstance(run, RayRun):
            run.report(state, {}, Worker())
        else:
            run.save(state, Worker())
    assert run.list_newest_first() == []
    for step, weights in ((4, torch.ones(2)), (8, state["model"]["layer.weight"])):  # of an earlier version
        path = checkpoint.path_for_step(tmp_path, step)
        if isinstance(run, RayRun):
            path = tmp_path / f"checkpoint-{step:08d}-abc" / "state.pt"
            path.parent.mkdir()
        checkpoint.save_atomically({"model": {"layer.weight": weights}, "progress": {"step": step}}, path)
    _, found, skipped = run.load_newest(Worker())
    assert found["progress"]["step"] == 4 and "diverged: layer.weight is not finite" in skipped[0]
