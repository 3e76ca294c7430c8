"""Allow one writer per run, by a lease: a small file in the run's folder that its writer renews every ten seconds.

Two processes that continue the same run would overwrite and delete each other's checkpoints. So the process that opens
a run writes its token into the file, and renews the file until it has finished. Every save checks the token first. The
storage may be a cloud's, where no file can be created atomically. So a process that takes over a lease reads the file
back. For the same reason a process that was frozen between its look at the file and its write may still write once.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Protocol

import psutil

from shared.distributed import Worker

NAME = ".writer.json"
RENEW_S, EXPIRY_S = 10, 60
held: "Lease | None" = None  # the lease that this process holds


class Leasable(Protocol):
    """What a lease needs of a run: a token, and small files in the run's folder."""

    folder: object
    token: str
    is_leased: bool

    def write_file(self, name: str, text: str) -> None:
        """Write a small file to the run's folder."""

    def read_file(self, name: str) -> tuple[str, float] | None:
        """Return (text, modification time in seconds by the storage's clock) of such a file, or None."""

    def delete_file(self, name: str) -> None: ...


class Lease:
    """This process's right to write to a run. A thread renews it until `release`."""

    def __init__(self, run: Leasable) -> None:
        self.run, self.ended = run, threading.Event()
        self.thread = threading.Thread(target=self.renew, daemon=True)
        self.text = json.dumps({"token": run.token, **this_process(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")})
        run.write_file(NAME, self.text)
        run.is_leased = True

    def renew(self) -> None:
        """Write the file again every RENEW_S seconds, unless a different process has taken over."""
        while not self.ended.wait(RENEW_S):
            with contextlib.suppress(Exception):  # the storage may be reachable again the next time
                if not taken_over_by(self.run):
                    self.run.write_file(NAME, self.text)


def pid_namespace() -> str:
    """Return the number of this process's PID namespace, or "" if there is none, as on macOS.

    Processes can see each other only within a namespace.
    """
    link = Path("/proc/self/ns/pid")
    return str(link.stat().st_ino) if link.exists() else ""


def start_time(pid: int) -> float:
    """Return when a process started, as a number that stays the same when the clock is set.

    Raises psutil.NoSuchProcess.
    """
    process = psutil.Process(pid)
    stat = Path(f"/proc/{pid}/stat")  # its 22nd field is in clock ticks since boot
    return float(stat.read_text().rpartition(")")[2].split()[19]) if stat.exists() else process.create_time()


def this_process() -> dict:
    """Return this process's host and process ID, and what shows whether another process can see it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "host": socket.gethostname(), "boot": boot.read_text().strip() if boot.exists() else str(uuid.getnode()),
        "pid_namespace": pid_namespace(), "pid": os.getpid(), "started": start_time(os.getpid()),
    }  # fmt: skip


def is_visible(holder: dict) -> bool:
    """Return whether the holder's process can be seen from here: on this host, in the same container."""
    here = this_process()
    return all(holder.get(name) == here[name] for name in ("host", "boot", "pid_namespace"))


def is_running(holder: dict) -> bool:
    """Return whether a visible holder is still running."""
    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
        same = start_time(holder["pid"]) == holder["started"]
        return same and psutil.Process(holder["pid"]).status() != psutil.STATUS_ZOMBIE
    return False


def read_holder(run: Leasable) -> tuple[dict, float] | None:
    """Return (holder, time of the last renewal by the store's clock), or None if nobody holds the lease.

    The holder is empty while the file is being written.
    """
    if (entry := run.read_file(NAME)) is None:
        return None
    with contextlib.suppress(ValueError):
        return json.loads(entry[0]), entry[1]
    return {}, entry[1]  # the file is being written


def acquire(run: Leasable, worker: Worker) -> None:
    """Take the lease of a run, and renew it from now on. Raises ValueError if its holder is alive.

    Three kinds of holder do not count: this process itself, an earlier attempt of the same job, which has the same
    token, and a process of this host that has ended. If the holder is on a different host, only the file shows whether
    it is alive. It counts as dead once the file is EXPIRY_S seconds old.
    """
    global held
    release()
    first_seen, started = None, time.monotonic()
    while (entry := read_holder(run)) is not None:
        holder, renewed = entry
        if holder.get("token") == run.token:
            break
        in_use = f"{run.folder} is being written by {describe(holder)}: stop it first, or choose a new --run-name"
        if is_visible(holder):
            if holder["pid"] == os.getpid() or not is_running(holder):
                break
            raise ValueError(in_use)
        if first_seen is not None and renewed > first_seen:
            raise ValueError(in_use)
        age = max(store_time(run) - renewed, time.monotonic() - started)  # the file may carry a later time than now
        if age >= EXPIRY_S:
            break
        if first_seen is None:
            first_seen = renewed
            worker.log(
                f"waiting {EXPIRY_S - age:.0f} s at most for a sign of the run's last writer: {describe(holder)}"
            )
        time.sleep(2)
    lease = Lease(run)
    # A different process may have written at the same moment: the last one to write has the lease.
    time.sleep(0.1 if entry is None or entry[0].get("token") == run.token else 1)
    if other := taken_over_by(run):
        raise ValueError(f"{run.folder} is being written by {other}: stop it first, or choose a new --run-name")
    held = lease
    lease.thread.start()


def store_time(run: Leasable) -> float:
    """Return the time in seconds, by the storage's clock."""
    name = f".clock-{run.token}"
    run.write_file(name, "")
    _, now = run.read_file(name)
    run.delete_file(name)
    return now


def taken_over_by(run: Leasable) -> str | None:
    """Return who has taken over a run whose lease was acquired, or None if nobody has."""
    entry = read_holder(run)
    if entry is None:
        return "a different process, which has finished" if run.is_leased else None
    return None if entry[0].get("token", run.token) == run.token else describe(entry[0])


def describe(holder: dict) -> str:
    """Return a phrase that names the holder."""
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"


def check(run: Leasable) -> None:
    """Raise ValueError if a different process has taken over the run. Call it before each save."""
    if other := taken_over_by(run):
        raise ValueError(f"not saved: {run.folder} has been taken over by {other}")


def release() -> None:
    """Give back the lease that this process holds, if any, so that the run can be continued."""
    global held
    lease, held = held, None
    if lease is not None:
        lease.ended.set()
        lease.thread.join(timeout=5)  # otherwise it might write the file again
        with contextlib.suppress(Exception):  # if the storage is unreachable, the lease ends with this process
            if lease.run.read_file(NAME)[0] == lease.text:  # it may belong to a later attempt of the same job
                lease.run.delete_file(NAME)
        lease.run.is_leased = False
