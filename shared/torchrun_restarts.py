"""Why a restart is no new start: what is left of a job when torchrun starts its processes again.

torchrun's agent, one a node, ends the processes of its node when one of them anywhere dies, and starts new ones, which
know nothing of the old ones. The store through which the ranks meet (not the agents' rendezvous store) is on the node
of rank 0 and is lost with it. So each node keeps a note in the run's folder: a file that is named after the agent,
which lives on, and holds the step of the newest checkpoint. A later start of the same script has another agent, and
does not find it.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import torch.distributed as dist


def note_name() -> str | None:
    """The name of the notes of this job on this node; None where no agent has started this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    agent = psutil.Process(os.getppid())
    return f".torchrun-{socket.gethostname()}-{agent.pid}-{agent.create_time():.0f}"


def note(folder: Path, step: int) -> None:
    """Note on this node that the run in `folder` is this job's, and saved after `step` steps; -1: not yet."""
    if (name := note_name()) is not None:
        folder.mkdir(parents=True, exist_ok=True)
        partial_note = folder / f"{name}.partial"
        partial_note.write_text(str(step))
        os.replace(partial_note, folder / name)


def noted(storage_path: Path) -> tuple[str, int] | None:
    """(run name, newest step or -1) that this node has noted under `storage_path` before a restart; else None."""
    name = note_name()
    found = [] if name is None else list(storage_path.glob(f"*/{name}"))
    return (found[0].parent.name, int(found[0].read_text())) if found else None


def name_of_attempt(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> str:
    """A word that all ranks of this start share, and no earlier start has used: rank 0 makes it up.

    torchrun keeps one store over all its restarts, and in it the addresses of processes that are dead: a rank that
    reads an old one waits for ever (pytorch/pytorch issue 135712). TORCHELASTIC_RESTART_COUNT does not tell the starts
    apart, because each node counts its own. So every rank calls with a random word, rank 0 answers the call with the
    name, and repeats that until the rank has confirmed this very name. Raises TimeoutError when a rank does not come.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    def until(reached: Callable[[], bool], missing: int) -> None:
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {missing} has not come within {timeout_s:.0f} s")
            time.sleep(0.01)

    def confirmed(other: int) -> bool:
        store.set(f"workshop/name/{other}", f"{mine} for {read(f'workshop/call/{other}')}")
        return read(f"workshop/confirmed/{other}") == mine

    if rank == 0:
        for other in range(1, world_size):
            until(partial(confirmed, other), missing=other)
        return mine
    store.set(f"workshop/call/{rank}", mine)
    until(lambda: read(f"workshop/name/{rank}").endswith(mine), missing=0)
    name = read(f"workshop/name/{rank}").split()[0]
    store.set(f"workshop/confirmed/{rank}", name)
    return name
