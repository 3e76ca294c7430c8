"""Measure what an all-reduce costs, for lesson 1.2. Run it under torchrun:

    torchrun --standalone --nproc-per-node 4 measure_all_reduce.py bytes FOLDER
    torchrun --standalone --nproc-per-node 2 measure_all_reduce.py seconds FOLDER

`bytes` writes bytes-RANK.json: the bytes that the rank sends, divided by the bytes of the 8 MB tensor. The operating
system counts them. On macOS, which does not, the value is null. `seconds` writes seconds.json: the seconds of the
fastest of several calls, for each size in bytes.
"""

import json
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

SIZES = (4, 400, 4_000, 40_000, 400_000, 4_000_000, 16_000_000, 45_000_000, 128_000_000)  # bytes


def times_sent(tensor: torch.Tensor) -> float | None:
    """Return the bytes that this process writes during an all-reduce, divided by the tensor's bytes."""
    process = psutil.Process()
    counted = hasattr(process, "io_counters")
    dist.barrier()  # every rank is connected now
    before = process.io_counters().write_chars if counted else 0
    dist.all_reduce(tensor)
    return (process.io_counters().write_chars - before) / tensor.nbytes if counted else None


def fastest(num_bytes: int) -> float:
    """Return the seconds that the fastest of several all-reduces of that many bytes takes."""
    tensor, seconds = torch.zeros(num_bytes // 4), []
    for _ in range(50 if num_bytes < 1_000_000 else 6):
        dist.barrier()  # start together
        started = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main() -> None:
    """Measure bytes or seconds, as the command line says, and write them to its folder."""
    what, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if what == "bytes":
        (folder / f"bytes-{rank}.json").write_text(json.dumps(times_sent(torch.ones(2_000_000))))
    else:
        seconds = {num_bytes: fastest(num_bytes) for num_bytes in SIZES}
        if rank == 0:
            (folder / "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
