"""Let a job hang, and show where its ranks are, with PyTorch's debug page and flight recorder: for lesson 1.4.

python hang_with_debug_page.py                                    # start the job, print what the page shows, end it
CUDA_VISIBLE_DEVICES= torchrun --standalone --nproc-per-node 2 hang_with_debug_page.py  # look at http://localhost:25999
"""

import inspect
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import rank_tools
import torch
import torch.distributed as dist
from torch.distributed.debug import start_debug_server

from shared import distributed
from shared.rendezvous import free_port

FOLDER = Path("runs/lesson-1-4")


def hang() -> None:
    """Call a collective on rank 0 only, with the debug page switched on."""
    worker = distributed.join()
    port = int(os.getenv("DEBUG_PORT", "25999"))
    # On every rank. "spawn": a forked server would inherit rank 0's connections, and keep them open if rank 0 dies.
    start_debug_server(port, start_method="spawn", dump_dir=str(FOLDER / "stacks"), enabled_dumps={"stacks"})
    patient = dist.new_group(timeout=timedelta(seconds=60), group_desc="patient")
    loss = torch.tensor([float(worker.rank)], device=worker.device)
    if worker.rank == 0:
        dist.all_reduce(loss, group=patient)
    time.sleep(60)


def read(page: str, port: int) -> list[str]:
    """Return what one of the server's pages shows for each rank, in rank order."""
    open_without_proxy = build_opener(ProxyHandler({})).open
    with open_without_proxy(f"http://localhost:{port}/{page}") as reply:
        return re.findall(r"<pre>(.*?)</pre>", reply.read().decode(), re.DOTALL)


def last_collectives(port: int) -> list[dict]:
    """Return the newest record of each rank's flight recorder, in rank order."""
    return [json.loads(text)["entries"][-1] for text in read("fr_trace_json", port)]


@contextmanager
def hanging_job() -> Iterator[tuple[subprocess.Popen, int]]:
    """Start the job on two CPU ranks, yield it and the page's port once both ranks hang, and end it on exit.

    Raises AssertionError with the job's output if it ends early.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    port, log = free_port(), FOLDER / "hang_with_debug_page.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    job = rank_tools.start(command, log, DEBUG_PORT=str(port), CUDA_VISIBLE_DEVICES="", TORCH_DISTRIBUTED_DEBUG="OFF")

    lines, first = inspect.getsourcelines(hang)
    sleeps = f"line {first + len(lines) - 1} in hang"

    def both_hang() -> bool:
        try:
            waits = last_collectives(port)[0]["profiling_name"] == "gloo:all_reduce"
            return waits and sleeps in read("stacks", port)[1]
        except URLError:  # no page yet
            return False

    try:
        rank_tools.wait_until(both_hang, job, log)
        yield job, port
    finally:
        job.terminate()
        job.wait()


def report(port: int) -> None:
    """Print the Python stack of each rank, innermost frame first, and its last collective."""
    for rank, text in enumerate(read("stacks", port)):
        frames = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\S+)', text)
        print(f"rank {rank}:", " < ".join(f"{function} ({file}:{line})" for file, line, function in frames))
    for rank, last in enumerate(last_collectives(port)):
        state = "completed" if last["retired"] else "still waiting"
        print(f"rank {rank}: {last['profiling_name']} in group {last['process_group'][1]}, {state}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        hang()
    else:
        with hanging_job() as (_, port):
            report(port)
