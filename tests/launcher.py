"""launch_multinode_ddp.sh as tests start it, and what stands in for ssh."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from runs import ROOT

CHAPTER = ROOT / "01-ddp-pytorch-only"
LAUNCHER = CHAPTER / "launch_multinode_ddp.sh"
ENDS_WITHIN = 120  # seconds; it takes a few, and a busy machine some more
CPU = {"CUDA_VISIBLE_DEVICES": ""}  # the stand-in for ssh leads back to this machine: its nodes would share a GPU

# Records its arguments, then runs the command here in a terminal of its own, as `ssh -tt` has sshd do over there.
FAKE_SSH = f"""#!{sys.executable}
import json, os, pty, sys
with open(os.environ["FAKE_SSH_LOG"], "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if "nowhere" in sys.argv:
    sys.exit("ssh: Could not resolve hostname nowhere: Name or service not known")
command = ["bash", "-c", sys.argv[-1]]
if "-tt" not in sys.argv:
    os.execvp("bash", command)
sys.exit(os.waitstatus_to_exitcode(pty.spawn(command)))
"""


def environment(**changes: str) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "PYTHON", "CUDA_VISIBLE_DEVICES")
    return {name: value for name, value in os.environ.items() if name not in names} | changes


def launch(*words: str | Path, folder: Path, timeout: float = 600, **changes: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [LAUNCHER, *words], cwd=folder, env=environment(**changes), capture_output=True, text=True, timeout=timeout
    )


def alive(marker: Path) -> list[str]:
    """The command lines of all processes that name `marker`, a path that only one test uses."""
    lines = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(marker) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            lines.append(line)
    return lines


def assert_nothing_runs(marker: Path) -> None:
    """What got a SIGKILL a moment ago may take that moment to end."""
    deadline = time.monotonic() + ENDS_WITHIN
    while lines := alive(marker):
        assert time.monotonic() < deadline, lines
        time.sleep(0.1)


def start_training(words: list[str], folder: Path, marker: Path, **changes: str) -> subprocess.Popen:
    """Start an endless training and return once it is in its second epoch."""
    output = open(folder / "output.txt", "w+")  # noqa: SIM115
    process = subprocess.Popen(
        [LAUNCHER, *words, "--", "--model", "mlp", "--epochs", "100000", "--storage-path", marker],
        cwd=folder, env=environment(**CPU, **changes), stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        # As in a terminal, even where the tests run in the background of a script, which ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 600
    while "epoch 1/" not in (folder / "output.txt").read_text():
        assert process.poll() is None and time.monotonic() < deadline, (folder / "output.txt").read_text()
        time.sleep(0.1)
    return process
