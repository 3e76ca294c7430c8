"""The program's set-up script over ssh: two hosts that an sshd of the test's own answers for, both this machine."""

import getpass
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import clusters
import psutil
import pytest
from clusters import SETUP, call
from runs import LIMIT, below

from shared.rendezvous import free_port

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
SEPARATION = Path("/run/sshd")  # an sshd that root starts wants this folder; the system's service makes it
pytestmark = pytest.mark.skipif(
    not (SSHD and shutil.which("ssh")), reason="no sshd here (Debian: apt-get install openssh-server)"
)


@pytest.fixture
def folder() -> Iterator[str]:
    """Where the script keeps its notes, and Ray what it writes: a short path, in it Ray makes sockets."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.fixture
def path(tmp_path, folder) -> Iterator[str]:
    """PATH with an `ssh` that knows the hosts one and two; nobody's ~/.ssh is read or written."""
    keys = tmp_path / "ssh"
    keys.mkdir(mode=0o700)
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    port = free_port()
    (keys / "sshd.conf").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {keys}/host\nPidFile {keys}/pid\nUsePAM no\n"
        f"AuthorizedKeysFile {keys}/key.pub\nAuthenticationMethods publickey\nStrictModes no\n"
        f"SetEnv RAY_TMPDIR={folder}\n"
    )
    (keys / "config").write_text(
        f"Host one two\n HostName 127.0.0.1\n Port {port}\n User {getpass.getuser()}\n IdentityFile {keys}/key\n"
        f" IdentitiesOnly yes\n UserKnownHostsFile {keys}/known\n StrictHostKeyChecking accept-new\n LogLevel ERROR\n"
    )
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "ssh").write_text(
        f'#!/bin/sh\necho "$@" >> {keys}/calls\nexec {shutil.which("ssh")} -F {keys}/config "$@"\n'
    )
    (commands / "ssh").chmod(0o755)
    if os.geteuid() == 0:
        SEPARATION.mkdir(mode=0o755, exist_ok=True)
    with open(keys / "log", "w") as log:
        server = subprocess.Popen([SSHD, "-f", keys / "sshd.conf", "-D", "-e"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + LIMIT
        while "Server listening" not in (keys / "log").read_text():
            assert server.poll() is None and time.monotonic() < deadline, (keys / "log").read_text()
            time.sleep(0.05)
        yield f"{commands}:{os.environ['PATH']}"
    finally:
        server.terminate()
        server.wait()


def test_a_cluster_is_started_shown_and_stopped_over_ssh(path, folder, tmp_path):
    notes = {"RAY_CLUSTER_DIR": f"{folder}/notes", "RAY_PORT": "0", "DASHBOARD_PORT": "0", "PATH": path}
    try:
        said = call(SETUP, "start", "one", "two", **notes)
        assert "one: head is up (process " in said and "two: node-1 is up (process " in said
        assert "its dashboard, here: ssh -N -L " in said and said.count(":127.0.0.1:") == 1
        pids = [int(line.split()[1]) for line in Path(folder, "notes/nodes").read_text().splitlines()]
        started = [
            each for pid in pids for each in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        ]
        assert len({each.pid for pid in pids for each in below(psutil.Process(pid), clusters.RAYLET)}) == 2
        deadline = time.monotonic() + LIMIT
        while call(SETUP, "status", **notes).partition("Pending:")[0].count(" node_") != 2:  # it lags by some seconds
            assert time.monotonic() < deadline
        said = call(SETUP, "stop", **notes)
        assert "one: process " in said and "two: process " in said and said.count("has ended") == 2
        assert not psutil.wait_procs(started, timeout=60)[1] and not Path(folder, "notes/nodes").exists()
    finally:
        if Path(folder, "notes/nodes").exists():
            call(SETUP, "stop", **notes)
    hosts = {line.split("ConnectTimeout=10 ")[1] for line in (tmp_path / "ssh/calls").read_text().splitlines()}
    assert hosts == {"one bash -s", "two bash -s"}  # no token in a command line


def test_a_host_that_does_not_let_one_in(path, tmp_path):
    (tmp_path / "ssh/key.pub").write_text("")
    said = call(SETUP, "start", "one", code=2, RAY_CLUSTER_DIR=str(tmp_path / "notes"), RAY_PORT="0", PATH=path)
    assert "Permission denied (publickey)" in said and "no head on one: does `ssh one` work?" in said
    assert not (tmp_path / "notes").exists()
