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
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from shared.distributed import Worker

if TYPE_CHECKING:
    from shared.runs import Run

NAME, CLOCK_NAME = ".writer.json", ".clock"
RENEW_S, EXPIRY_S = 10, 60
held: "Lease | None" = None  # by this process


class Lease:
    """This process's right to write to a run, renewed by a thread until `release`."""

    def __init__(self, run: "Run") -> None:
        self.run, self.ended = run, threading.Event()
        self.text = json.dumps({"token": run.token, **this_process(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")})
        run.write_file(NAME, self.text)

    def renew(self) -> None:
        """Write the file again every RENEW_S seconds, unless a different process has taken over."""
        while not self.ended.wait(RENEW_S):
            with contextlib.suppress(Exception):  # storage that is away may be back the next time
                if not is_lost(self.run):
                    self.run.write_file(NAME, self.text)


def pid_namespace() -> str:
    """Which processes this one can see: the number of its namespace of processes, or "" if there are none (macOS)."""
    link = Path("/proc/self/ns/pid")
    return str(link.stat().st_ino) if link.exists() else ""


def this_process() -> dict:
    """Who this process is: host and process number, and what tells whether the process is visible from here."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "host": socket.gethostname(), "boot": boot.read_text().strip() if boot.exists() else "",
        "pid_namespace": pid_namespace(), "pid": os.getpid(), "started": psutil.Process().create_time(),
    }  # fmt: skip


def read_holder(run: "Run") -> tuple[dict, float] | None:
    """(what the lease says of its holder, when it was renewed, by the store's clock); None if nobody holds it."""
    if (entry := run.read_file(NAME)) is None:
        return None
    with contextlib.suppress(ValueError):
        return json.loads(entry[0]), entry[1]
    return {}, entry[1]  # it is being written


def is_lost(run: "Run") -> bool:
    """Whether a different process has taken over the run."""
    entry = read_holder(run)
    return entry is not None and entry[0].get("token", run.token) != run.token


def is_running(holder: dict) -> bool | None:
    """Whether the holder is running; None if that cannot be seen from here."""
    here = this_process()
    if any(holder.get(name) != here.get(name) for name in ("host", "boot", "pid_namespace")):
        return None
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(holder["pid"])
        return process.create_time() == holder["started"] and process.status() != psutil.STATUS_ZOMBIE
    return False


def acquire(run: "Run", worker: Worker) -> None:
    """Take the lease of a run, and renew it from now on. Raises ValueError if its holder is alive.

    Of a holder on a different host only the file tells whether it is alive: it is dead when the file is EXPIRY_S
    seconds old. The run's own earlier attempts, and this process, may always take over.
    """
    global held
    release()
    first_seen = None
    while (entry := read_holder(run)) is not None:
        holder, renewed = entry
        running = False if holder.get("token") == run.token else is_running(holder)
        if running is False or (holder.get("pid") == os.getpid() and running):
            break
        process = f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"
        if running or renewed > (first_seen or renewed):
            raise ValueError(f"{run.folder} is being written by {process}: stop it first, or choose a new --run-name")
        run.write_file(CLOCK_NAME, "")
        age = run.read_file(CLOCK_NAME)[1] - renewed
        run.delete_file(CLOCK_NAME)
        if age >= EXPIRY_S:
            break
        if first_seen is None:
            first_seen = renewed
            worker.log(f"waiting {EXPIRY_S - age:.0f} s at most for a sign of the run's last writer: {process}")
        time.sleep(2)
    lease = Lease(run)
    if entry is not None and entry[0].get("token") != run.token:
        time.sleep(1)  # a third process may have taken over at the same moment: the last one has the lease
        if is_lost(run):
            raise ValueError(f"{run.folder} has been taken over by a different process a moment ago")
    held = lease
    threading.Thread(target=lease.renew, daemon=True).start()


def check(run: "Run") -> None:
    """Raises ValueError if a different process has taken over the run. Call it before each save."""
    if is_lost(run):
        holder = read_holder(run)[0]
        writer = f"process {holder['pid']} on {holder['host']}"
        raise ValueError(f"not saved: {run.folder} has been taken over by {writer}, since {holder['since']}")


def release() -> None:
    """Give back the lease that this process holds, if any: the run can be continued from now on."""
    global held
    lease, held = held, None
    if lease is not None:
        lease.ended.set()
        with contextlib.suppress(Exception):  # storage that is away: the lease ends when this process does
            if not is_lost(lease.run):
                lease.run.delete_file(NAME)
