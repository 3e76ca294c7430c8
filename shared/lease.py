"""One writer per run: a lease, a small file in the run's folder that its writer renews every ten seconds.

Two processes that continue the same run would overwrite and delete each other's checkpoints. So the process that opens
a run writes its token into the file, and renews the file until it has finished. Whoever saves checks the token first.
The store may be a cloud's, where no file can be created atomically: a process that takes over a lease reads it back.
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
held: "Lease | None" = None  # by this process


class Run(Protocol):
    """What a lease uses of a `shared.runs.Run`: its token, and small files in its folder, wherever that is."""

    folder: object
    token: str
    is_leased: bool

    def write_file(self, name: str, text: str) -> None: ...
    def read_file(self, name: str) -> tuple[str, float] | None: ...
    def delete_file(self, name: str) -> None: ...


class Lease:
    """This process's right to write to a run, renewed by a thread until `release`."""

    def __init__(self, run: Run) -> None:
        self.run, self.ended = run, threading.Event()
        self.thread = threading.Thread(target=self.renew, daemon=True)
        self.text = json.dumps({"token": run.token, **this_process(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")})
        run.write_file(NAME, self.text)
        run.is_leased = True

    def renew(self) -> None:
        """Write the file again every RENEW_S seconds, unless a different process has taken over."""
        while not self.ended.wait(RENEW_S):
            with contextlib.suppress(Exception):  # storage that is away may be back the next time
                if not taken_over_by(self.run):
                    self.run.write_file(NAME, self.text)


def pid_namespace() -> str:
    """Which processes this one can see: the number of its namespace of processes, or "" if there are none (macOS)."""
    link = Path("/proc/self/ns/pid")
    return str(link.stat().st_ino) if link.exists() else ""


def start_time(pid: int) -> float:
    """When a process started: a number that stays the same when the clock is set. Raises psutil.NoSuchProcess."""
    process = psutil.Process(pid)
    stat = Path(f"/proc/{pid}/stat")  # the 22nd field: clock ticks since the machine was booted
    return float(stat.read_text().rpartition(")")[2].split()[19]) if stat.exists() else process.create_time()


def this_process() -> dict:
    """Who this process is: host and process number, and what tells whether it is visible from a different one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "host": socket.gethostname(), "boot": boot.read_text().strip() if boot.exists() else str(uuid.getnode()),
        "pid_namespace": pid_namespace(), "pid": os.getpid(), "started": start_time(os.getpid()),
    }  # fmt: skip


def is_visible(holder: dict) -> bool:
    """Whether the holder is or was a process that can be seen from here: on this host, in the same container."""
    here = this_process()
    return all(holder.get(name) == here[name] for name in ("host", "boot", "pid_namespace"))


def is_running(holder: dict) -> bool:
    """Whether a visible holder is still running."""
    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
        same = start_time(holder["pid"]) == holder["started"]
        return same and psutil.Process(holder["pid"]).status() != psutil.STATUS_ZOMBIE
    return False


def read_holder(run: Run) -> tuple[dict, float] | None:
    """(what the lease says of its holder, when it was renewed, by the store's clock); None if nobody holds it."""
    if (entry := run.read_file(NAME)) is None:
        return None
    with contextlib.suppress(ValueError):
        return json.loads(entry[0]), entry[1]
    return {}, entry[1]  # it is being written


def acquire(run: Run, worker: Worker) -> None:
    """Take the lease of a run, and renew it from now on. Raises ValueError if its holder is alive.

    Earlier attempts of the same job, which have the same token, and this very process make room. So does a process of
    this host that has ended. Of a different host only the file tells whether its process is alive: it is taken for dead
    when the file is EXPIRY_S seconds old.
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
        age = max(store_time(run) - renewed, time.monotonic() - started)  # the file may even be of the future
        if age >= EXPIRY_S:
            break
        if first_seen is None:
            first_seen = renewed
            worker.log(
                f"waiting {EXPIRY_S - age:.0f} s at most for a sign of the run's last writer: {describe(holder)}"
            )
        time.sleep(2)
    lease = Lease(run)
    # A different process may have come at the same moment: the last one has the lease.
    time.sleep(0.1 if entry is None or entry[0].get("token") == run.token else 1)
    check(run)
    held = lease
    lease.thread.start()


def store_time(run: Run) -> float:
    """What time it is by the store's clock, in seconds."""
    name = f".clock-{run.token}"
    run.write_file(name, "")
    _, now = run.read_file(name)
    run.delete_file(name)
    return now


def taken_over_by(run: Run) -> str | None:
    """Who has taken over a run whose lease was acquired; None if nobody has."""
    entry = read_holder(run)
    if entry is None:
        return "a different process, which has finished" if run.is_leased else None
    return None if entry[0].get("token", run.token) == run.token else describe(entry[0])


def describe(holder: dict) -> str:
    """The holder in words."""
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"


def check(run: Run) -> None:
    """Raises ValueError if a different process has taken over the run. Call it before each save."""
    if other := taken_over_by(run):
        raise ValueError(f"not saved: {run.folder} has been taken over by {other}")


def release() -> None:
    """Give back the lease that this process holds, if any: the run can be continued from now on."""
    global held
    lease, held = held, None
    if lease is not None:
        lease.ended.set()
        lease.thread.join(timeout=5)  # or it might write the file again
        with contextlib.suppress(Exception):  # storage that is away: the lease ends when this process does
            if lease.run.read_file(NAME)[0] == lease.text:  # not that of a later attempt of the same job
                lease.run.delete_file(NAME)
        lease.run.is_leased = False
