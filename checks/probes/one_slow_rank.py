"""Let three ranks step through planned delays, for exercise 4.3a: several runs at a time.

    python one_slow_rank.py OUT.json STEPS RUNS

RUNS: JSON, for each run its name and a list of delays [rank, part, seconds, step]. The rank is a number, "all", or "in
turn" for one rank per step. The part is "reading", "computing" or "network". The step is a number, or null for every
step. All ranks of all runs are forked from this process and run at the same time, since they mostly sleep. Without a
delay a step reads and computes for PART_S seconds each. OUT.json gets the lines of each run by its name.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

NUM_RANKS, PART_S, PATIENCE_S = 3, 0.015, 120


def main(out: str, steps: str, planned: str) -> None:
    runs = json.loads(planned)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = []
        for number, delays in enumerate(runs.values()):
            for rank in range(NUM_RANKS):
                if (pid := os.fork()) == 0:
                    be_rank(folder, number, rank, int(steps), delays)
                processes.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in processes]
        if any(codes):
            sys.exit(1)
        lines = {
            run: [line for rank in range(NUM_RANKS) for line in json.loads((folder / f"{number}-{rank}").read_text())]
            for number, run in enumerate(runs)
        }
    Path(out).write_text(json.dumps(lines))


def be_rank(folder: Path, number: int, rank: int, steps: int, delays: list) -> None:
    """Do all steps in this fork, write their lines, and end it."""
    code = 1
    try:
        dist.init_process_group(
            "gloo", f"file://{folder}/store-{number}", timedelta(seconds=PATIENCE_S), world_size=NUM_RANKS, rank=rank
        )
        dist.barrier()
        (folder / f"{number}-{rank}").write_text(json.dumps([timed_step(rank, step, delays) for step in range(steps)]))
        dist.barrier()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def timed_step(rank: int, step: int, delays: list) -> dict:
    """Sleep for reading and computing, and wait for the other ranks in an all-reduce. Return the step's line."""

    def delay(part: str) -> float:
        mine = (rank, "all", "in turn") if step % NUM_RANKS == rank else (rank, "all")
        return sum(seconds for who, where, seconds, when in delays
                   if who in mine and where == part and when in (step, None))  # fmt: skip

    start = time.perf_counter()
    time.sleep(PART_S + delay("reading"))
    read = time.perf_counter()
    time.sleep(PART_S + delay("computing"))
    computed = time.perf_counter()
    dist.all_reduce(torch.zeros(1))
    time.sleep(delay("network"))
    end = time.perf_counter()
    return {"rank": rank, "step": step + 1, "reading": read - start, "computing": computed - read,
            "waiting": end - computed}  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
