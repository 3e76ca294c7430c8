"""A head without CPUs and nodes that join it, some with a mount table of their own, started by the program's script."""

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from runs import LIMIT, ROOT

from shared.rendezvous import free_port

PROGRAM = ROOT / "04-ray-in-production/program"
SETUP = PROGRAM / "deployment/ray_cluster_setup.sh"
AT_ONCE = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}  # a node that ends has nothing to hand over: no 30 s
RAYLET = ".*/core/src/ray/raylet/raylet "  # how the command line of a node's scheduler begins
UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]


def call(*command: object, code: int = 0, **environment: str) -> str:
    """Run a script to its end; what it has said."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables |= {"OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        list(map(str, command)), env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    return done.stdout


def can_mount() -> bool:
    """Whether a process may have a mount table of its own here."""
    return subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0


@contextlib.contextmanager
def head() -> Iterator[dict[str, str]]:
    """The variables that lead to a head without CPUs: started by the program's script, and stopped by it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        notes = {"RAY_CLUSTER_DIR": f"{folder}/notes", "RAY_PORT": "0", "DASHBOARD_PORT": "0", "RAY_TMPDIR": folder}
        notes |= AT_ONCE
        call(SETUP, "start", "localhost", **notes, HEAD_CPUS="0")
        try:
            words = Path(folder, "notes/env").read_text().replace("export ", "").split()
            yield {"RAY_TMPDIR": folder, **AT_ONCE, **dict(word.split("=", maxsplit=1) for word in words)}
        finally:
            call(SETUP, "stop", **notes)


def ray_start(cluster: dict[str, str], *options: str) -> list[str]:
    """The command that adds a node of one CPU to a cluster."""
    options = ("--block", "--num-cpus=1", "--disable-usage-stats", "--include-log-monitor=false", *options)
    where = [f"--address={cluster['RAY_ADDRESS']}", f"--dashboard-agent-listen-port={free_port()}"]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *where]


@contextlib.contextmanager
def node(
    cluster: dict[str, str], output: Path, *options: str, before: str = "", **variables: str
) -> Iterator[psutil.Process]:
    """A node that has joined. Its shell first runs the commands `before`, with a mount table of its own."""
    environment = {**os.environ, **cluster, **variables, "OMP_NUM_THREADS": "1"}
    script = f"{before}\nexec {shlex.join(ray_start(cluster, *options))}"
    with open(output, "w") as file:
        command = [*(UNSHARE if before else []), "sh", "-ec", script]
        process = psutil.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + LIMIT
        while "Ray runtime started" not in output.read_text():
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.2)
        yield process
    finally:
        all_of_it = [process, *process.children(recursive=True)]
        for each in all_of_it:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(all_of_it, timeout=60)
