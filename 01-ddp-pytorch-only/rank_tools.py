"""Start ranks, kill one, and inspect all of them from outside: the helpers of lesson 1.4."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def start(command: list[str], log: Path, **environment: str) -> subprocess.Popen:
    """Start a command in the background, with its output in the file `log`."""
    with open(log, "w") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **environment})


def wait_until(happened: Callable[[], bool], job: subprocess.Popen, log: Path) -> None:
    """Wait until `happened()` is true.

    Raises AssertionError with the job's output if the job ends before that.
    """
    while not happened():
        time.sleep(0.05)
        assert job.poll() is None, log.read_text()


def kill_last_rank(job: subprocess.Popen) -> None:
    """Send SIGKILL, which no program can catch, to the rank that torchrun started last."""
    psutil.Process(job.pid).children()[-1].send_signal(signal.SIGKILL)


def py_spy(job: subprocess.Popen) -> list[subprocess.CompletedProcess]:
    """Run `py-spy dump` on all ranks of a torchrun job at once, and return what each dump printed, rank by rank."""
    plain = {**os.environ, "CLICOLOR_FORCE": "0"}  # color codes would split a location such as script.py:3
    commands = [["py-spy", "dump", "--pid", str(rank.pid)] for rank in psutil.Process(job.pid).children()]
    pipe = subprocess.PIPE
    dumps = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=plain) for command in commands]
    printed = [dump.communicate() for dump in dumps]
    return [
        subprocess.CompletedProcess(dump.args, dump.returncode, *text)
        for dump, text in zip(dumps, printed, strict=True)
    ]
