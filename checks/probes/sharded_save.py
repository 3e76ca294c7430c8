"""Save four times with the learner's function, on ranks that are slow or whose disk is full, for exercise 3.3b.

torchrun --nproc-per-node 3 sharded_save.py FOLDER FILE

FILE defines save(folder, rank, data, write). Each rank writes to FOLDER/RANK.json, for each case, what save returned or
raised, what was wrong when a rank wrote, and whether the checkpoint is complete. A rank that is delayed continues as
soon as the others wait for it in a collective or have made the mistake, so nothing depends on speed.
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from shared import distributed

COLLECTIVES = (
    "barrier", "all_reduce", "all_gather_object", "gather_object", "gather", "all_gather", "all_gather_single",
    "all_gather_into_tensor", "broadcast", "broadcast_object_list", "reduce", "monitored_barrier",
)  # fmt: skip
CASES = (
    "slow",  # rank 2 writes last
    "full",  # rank 1 cannot write
    "older",  # nor can it here, where the folder holds an older checkpoint
    "mark",  # rank 0 cannot write the mark
)

results, path = Path(sys.argv[1]), sys.argv[2]
worker = distributed.join(timeout_s=30)
wait_for_all = distributed.wait_for_all
rank, report, now = worker.rank, {}, {}  # now: the case, its folder, and whether this rank wrote its slice


def watched(function: Callable) -> Callable:
    """Note, before a collective, that this rank waits."""

    def call(*args, **kwargs):
        now["folder"].with_suffix(f".waits-{rank}-{now['wrote']}").touch()
        return function(*args, **kwargs)

    return call


def happened(*names: str) -> bool:
    return any(now["folder"].with_suffix(f".{name}").exists() for name in names)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def write(name: str, data: bytes) -> None:
    """Write a file of the checkpoint, unless the case says that this rank cannot."""
    folder, case = now["folder"], now["case"]
    if name == "complete":
        report[case]["missing"] = [other for other in range(3) if not (folder / f"{other}.slice").exists()]
        report[case]["marks"] = True
        if case == "mark":
            raise OSError(28, "No space left on device")
        (folder / name).write_bytes(data)
        folder.with_suffix(".marked").touch()
        return
    report[case]["mixed"] = (folder / "complete").exists()
    folder.with_suffix(f".tried-{rank}").touch()
    if case == "slow" and rank == 2:
        wait_until(lambda: happened("marked", "waits-0-True"))
    if case in ("full", "older") and rank == 1:
        raise OSError(28, "No space left on device")
    (folder / name).write_bytes(data)
    now["wrote"] = True


def others_have_tried() -> bool:
    return all(happened(f"tried-{other}", f"waits-{other}-False") for other in (1, 2))


for name in COLLECTIVES:
    if hasattr(dist, name):
        setattr(dist, name, watched(getattr(dist, name)))
distributed.wait_for_all = watched(wait_for_all)
save = runpy.run_path(path)["save"]
for case in CASES:
    folder = results / case
    if rank == 0:
        folder.mkdir()
        if case == "older":
            for name in ("0.slice", "1.slice", "2.slice", "complete"):
                (folder / name).write_bytes(b"old")
    now.update(folder=folder, case=case, wrote=False)
    report[case] = {"marks": False, "mixed": False}
    wait_for_all()
    if case == "older" and rank == 0:
        wait_until(others_have_tried)
    try:
        returned = save(folder, rank, b"new", write)
        report[case]["returned"] = returned if isinstance(returned, bool | None) else repr(returned)
    except OSError as error:
        report[case]["raised"] = str(error)
    (results / f"{rank}.json").write_text(json.dumps(report))
    if "raised" in report[case]:
        os._exit(1)
    wait_for_all()
    report[case]["complete"] = (folder / "complete").exists()
    (results / f"{rank}.json").write_text(json.dumps(report))
    wait_for_all()
distributed.leave()
