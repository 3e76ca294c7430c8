"""Run a function on several ranks of this machine, from a notebook, and return what each rank returned.

The ranks are forked from a process that has imported torch already, so only the first call waits for imports. Python's
`multiprocessing` calls such a process a fork server. It starts with the first call and ends with the notebook.
"""

import faulthandler
import io
import linecache
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import ChainMap
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from types import CodeType
from typing import ClassVar
from unittest import mock

import cloudpickle
import psutil
import torch
import torch.distributed as dist

PRELOADED = ["shared.ranks", "torch._dynamo", "torch.distributed.tensor"]  # torch.optim imports torch._dynamo late
QUIET_S = 10  # if no rank has used a processor for this long, they all wait
CAUSE_S = 1  # the same, once a rank has failed
POLLING = 0.04  # the share of a processor that waiting may take: gloo's threads look for messages every 10 ms
ANSWER_S = 5  # for a rank that hangs to write down where


class RanksFailed(Exception):
    """A rank raised an error, was ended, or the ranks hang. The message says which rank, and where."""


def run(function: Callable, num_ranks: int, *args: object, limit_s: float = 300) -> list:
    """Call `function(*args)` on `num_ranks` ranks of a gloo process group, and return their results in rank order.

    function: may be defined in the notebook; it finds its rank by `dist.get_rank()`. It runs on CPUs, with one thread.
    Arguments and results may be whatever cloudpickle takes. What the ranks print appears when they have ended, rank by
    rank.

    Raises RanksFailed with the error of the rank that failed first, or with the line in which each rank waits: if no
    rank has used a processor for `QUIET_S` seconds, or if they have not ended after `limit_s` seconds. A rank that
    sleeps counts as one that waits.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, context, call = Path(name), fork_server(), pickled((function, args))
        ranks = [context.Process(target=run_rank, args=(rank, num_ranks, call, folder)) for rank in range(num_ranks)]
        try:
            for rank in ranks:
                rank.start()
            problem = wait_for_ranks(ranks, folder, limit_s)
        finally:  # Ctrl-C too leaves nothing running
            for rank in filter(lambda rank: rank.pid, ranks):
                rank.kill()
                rank.join()
        for output in sorted(folder.glob("*.out"), key=lambda path: int(path.stem)):
            print(output.read_text(), end="")
        if problem:
            raise RanksFailed(problem)
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(num_ranks)]


class Pickler(cloudpickle.Pickler):
    """Pickle functions of a notebook together with the file names of their code, which cloudpickle leaves out."""

    @staticmethod
    def reduce_code(code: CodeType) -> tuple:
        constructor, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
        return constructor, tuple(code.co_filename if each == "<dynamic-code>" else each for each in arguments)

    dispatch_table: ClassVar = ChainMap({CodeType: reduce_code}, cloudpickle.Pickler.dispatch_table)


def pickled(value: object) -> bytes:
    """Return `value` as bytes, with the functions and classes of a notebook."""
    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def fork_server() -> multiprocessing.context.BaseContext:
    """Return the context whose processes are forked from the fork server, and start that server if it does not run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # A fork of a process with OpenMP threads may hang in its first operation.
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""):
        multiprocessing.forkserver.ensure_running()
    return context


def run_rank(rank: int, num_ranks: int, call: bytes, folder: Path) -> None:
    """Join the group, call the function, and write its result, or its error, into `folder`."""
    Thread(target=end_with_parent, daemon=True).start()
    for file in (sys.stdout, sys.stderr):
        os.dup2(os.open(folder / f"{rank}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND), file.fileno())
    faulthandler.register(signal.SIGUSR1, file=open(folder / f"{rank}.stack", "w"), all_threads=False)  # noqa: SIM115
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(hours=1))
    try:
        function, args = pickle.loads(call)
        (folder / f"{rank}.result").write_bytes(pickled(function(*args)))
        dist.barrier()  # a rank that left now could end the others' connections
    except BaseException as error:
        places = [(at.filename, at.lineno, at.name) for at in traceback.extract_tb(error.__traceback__)]
        content = pickle.dumps((time.time(), f"{type(error).__name__}: {error}", places))
        (folder / f"{rank}.part").write_bytes(content)
        (folder / f"{rank}.part").rename(folder / f"{rank}.error")
        sys.exit(1)
    dist.destroy_process_group()


def end_with_parent() -> None:
    """End this rank when the notebook's process has ended."""
    multiprocessing.parent_process().join()
    os._exit(1)


def wait_for_ranks(ranks: list[BaseProcess], folder: Path, limit_s: float) -> str:
    """Wait until all ranks have ended. Return an empty string, or what is wrong."""
    deadline, used, changed = time.monotonic() + limit_s, [0.0] * len(ranks), time.monotonic()
    while any(rank.is_alive() for rank in ranks):
        now = [processor_seconds(rank.pid) for rank in ranks]
        failed = any(rank.exitcode for rank in ranks)
        quiet_s = CAUSE_S if failed else QUIET_S
        if max(abs(a - b) for a, b in zip(now, used, strict=True)) > POLLING * quiet_s:
            used, changed = now, time.monotonic()
        # The first failure that we see need not be the cause, so the other ranks have a moment to fail too.
        if time.monotonic() > deadline or time.monotonic() - changed > quiet_s:
            if not failed:
                return "\n".join(
                    ["the ranks hang:", *(f"  {describe_wait(*each, folder)}" for each in enumerate(ranks))]
                )
            break
        time.sleep(0.02)
    return first_error(ranks, folder) if any(rank.exitcode for rank in ranks) else ""


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process and its children have used so far, in seconds."""
    try:
        process = psutil.Process(pid)
        return sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0.0


def describe_wait(number: int, rank: BaseProcess, folder: Path) -> str:
    """Say in which line of the function, or of what it calls, a rank waits."""
    if not rank.is_alive():
        return f"rank {number} has ended"
    path, deadline = folder / f"{number}.stack", time.monotonic() + ANSWER_S
    os.kill(rank.pid, signal.SIGUSR1)
    while "in run_rank" not in path.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    frames = re.findall(r'File "(.+)", line (\d+) in (\w+|<\w+>)', path.read_text())
    line = own_line([(file, int(line), name) for file, line, name in reversed(frames)])
    return f"rank {number} waits in {line}" if line else f"rank {number} has returned from its function"


def own_line(calls: list[tuple[str, int, str]]) -> str:
    """Return the innermost line of the caller's own code, and where it is. calls: outermost first."""
    inside = [file for file, *_ in calls].index(__file__) + 1
    own = [call for call in calls[inside:] if not call[0].startswith((str(Path(torch.__file__).parent), __file__))]
    if not own:
        return ""
    file, line, name = own[-1]
    cell = "the cell" if "ipykernel" in file else Path(file).name
    return f"{name}, line {line} of {cell}: {linecache.getline(file, line).strip()}"


def first_error(ranks: list[BaseProcess], folder: Path) -> str:
    """Return the error of the rank that failed first. Many a rank's error is only that it lost a connection."""
    errors = sorted((*pickle.loads(path.read_bytes()), path.stem) for path in folder.glob("*.error"))
    causes = [error for error in errors if not re.search("Connection|closed by peer|reset by peer", error[1])]
    for number, rank in enumerate(ranks):
        if (rank.exitcode or 0) < 0 and not causes:
            aborted = ". Gloo aborts a rank that receives more than it expects" * (rank.exitcode == -signal.SIGABRT)
            return f"rank {number} was ended by {signal.Signals(-rank.exitcode).name}{aborted}"
    if not errors:
        number, rank = next((number, rank) for number, rank in enumerate(ranks) if rank.exitcode)
        ended = f"rank {number} ended with exit code {rank.exitcode}, without an error of your function"
        return f"{ended}. In a script, call run under `if __name__ == '__main__':`"
    _, message, calls, _ = (causes or errors)[0]
    number = min(int(rank) for _, said, _, rank in errors if said == message)  # often all ranks fail in the same way
    return f"rank {number}: {message}" + (f"\n  in {own_line(calls)}" if own_line(calls) else "")
