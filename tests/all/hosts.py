"""Hosts that share nothing but a wire: network, mounts, processes, host name, /tmp, /dev/shm and home of their own.

Made of Linux namespaces, which needs root. Names and networks are random, so that two runs on one machine do not meet.
As on Debian and Ubuntu, a host's own name leads to 127.0.1.1 there, and the names of the others to their addresses.
With a shared folder they are a cluster's nodes: each name leads to the same address everywhere, its own host included.
"""

import contextlib
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from runs import LIMIT, ROOT

KEPT = (str(ROOT), sys.prefix, sys.base_prefix)  # what a host sees of this machine, even below /tmp or the home


def why_not() -> str | None:
    """Why there can be no such hosts on this machine; None if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "isolated hosts need root on Linux"
    try:
        with tempfile.TemporaryDirectory() as folder, hosts(1, Path(folder)) as (_, (host,)):
            process = host.start([sys.executable, "-c", "import shared"], Path(folder, "output"))
            if process.wait(LIMIT) != 0:
                return f"a host cannot import what this machine can: {Path(folder, 'output').read_text()}"
    except (OSError, ValueError, AssertionError, subprocess.SubprocessError) as error:
        return f"no isolated host can be made here: {error}"
    return None


def call(*words: object) -> None:
    subprocess.run(list(map(str, words)), check=True, timeout=LIMIT)


class Host:
    """A host. tmp: its /tmp, as this machine sees it. pid: of its first process, as this machine numbers it."""

    def __init__(self, name: str, address: str, tmp: Path, wire: str, pid: int) -> None:
        self.name, self.address, self.tmp, self.wire, self.pid = name, address, tmp, wire, pid

    def start(self, command: list[object], output: Path, **variables: str) -> subprocess.Popen:
        """Start a command there, with its output in a file."""
        kept = ("PATH", "LANG", "OMP_NUM_THREADS")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "HOME": str(Path.home()), "PYTHONPATH": str(ROOT), **variables}
        enter = ["nsenter", "--target", self.pid, "--net", "--mount", "--uts", "--ipc", "--pid", f"--wd={ROOT}"]
        with open(output, "w") as file:
            words = list(map(str, [*enter, *command]))
            return subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def call(self, *words: str) -> None:
        """Run a command in its network."""
        call("nsenter", "--target", self.pid, "--net", *words)

    def cut(self) -> None:
        """Cut its wire. Nobody is told."""
        call("ip", "link", "set", self.wire, "down")


def free_network() -> str:
    """The first three numbers of a network that this machine does not know."""
    known = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    while True:
        network = f"10.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}"
        if not any(address.startswith(f"{network}.") for address in known):
            return network


@contextlib.contextmanager
def hosts(number: int, folder: Path, shared: Path | None = None) -> Iterator[tuple[str, list[Host]]]:
    """(this machine's address on the wire, the hosts). folder: for their private files. shared: one that all see."""
    token, network = secrets.token_hex(3), free_network()
    bridge, first_processes, made = f"br{token}", [], []
    call("ip", "link", "add", bridge, "type", "bridge")
    try:
        call("ip", "addr", "add", f"{network}.254/24", "dev", bridge)
        call("ip", "link", "set", bridge, "up")
        addresses = {f"h{token}-{index}": f"{network}.{index}" for index in range(1, number + 1)}
        for index, (name, address) in enumerate(addresses.items(), start=1):
            private, wire = folder / name, f"v{token}{index}"
            for part in ("tmp", "home"):
                (private / part).mkdir(parents=True)
            known = addresses if shared else addresses | {name: "127.0.1.1"}
            lines = [f"{known[other]} {other}" for other in known]
            (private / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            script, kept = ["mount -t tmpfs tmpfs /mnt"], [*KEPT, *([str(shared)] if shared else [])]
            for slot, path in enumerate(kept):
                script.append(f"mkdir /mnt/{slot} && mount --rbind {shlex.quote(path)} /mnt/{slot}")
            script += [
                f"mount --bind {private}/hosts /etc/hosts", "mount -t tmpfs -o size=2g tmpfs /dev/shm",
                f"mount --bind {private}/home {Path.home()}", f"mount --bind {private}/tmp /tmp",
            ]  # fmt: skip
            for slot, path in enumerate(kept):
                where = shlex.quote(path)
                script.append(f"[ -e {where}/bin ] || [ -e {where}/Makefile ] || "
                              f"{{ mkdir -p {where} && mount --rbind /mnt/{slot} {where}; }}")  # fmt: skip
            script += [f"hostname {name}", "ip link set lo up", "echo ready", "sleep infinity & wait"]
            spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
            # If this process is killed, its hosts end with it.
            tied = ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces]
            process = subprocess.Popen([*tied, "sh", "-ec", "\n".join(script)], stdout=subprocess.PIPE)
            first_processes.append(process)
            assert process.stdout.readline() == b"ready\n"
            (inner,) = psutil.Process(process.pid).children()
            call("ip", "link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", inner.pid)
            call("ip", "link", "set", wire, "master", bridge, "up")
            made.append(Host(name, address, private / "tmp", wire, inner.pid))
            made[-1].call("ip", "addr", "add", f"{address}/24", "dev", "eth0")
            made[-1].call("ip", "link", "set", "eth0", "up")
        yield f"{network}.254", made
    finally:
        for process in first_processes:  # the first process of a host takes all others with it, and its wire
            process.kill()
        for process in first_processes:
            process.wait(LIMIT)
        deadline = time.monotonic() + LIMIT
        while subprocess.run(["ip", "link", "del", bridge], capture_output=True).returncode:
            assert time.monotonic() < deadline, f"the bridge {bridge} cannot be removed"
            time.sleep(0.2)
