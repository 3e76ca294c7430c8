"""Run CHECKOUT's train_ddp.py unchanged, and write the seconds of each optimizer step to FILE.

    torchrun --standalone --nproc-per-node 2 step_times.py CHECKOUT FILE OPTIONS...

check_regression.py uses this for each run. The times are those between two steps of rank 0. So the first step has none,
and the first step of a later epoch includes validation. FILE is JSON and also contains the versions. Fails if `shared`
is not CHECKOUT's own.
"""

import json
import platform
import runpy
import sys
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import shared


def main(checkout: str, file: str, *options: str) -> None:
    expected, imported = Path(checkout, "shared").resolve(), Path(shared.__path__[0]).resolve()
    assert imported == expected, f"shared is imported from {imported}, not from {expected}"
    moments, ranks = [], []

    def record_step(*_: object) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # otherwise this would be the moment at which the step was launched
        moments.append(time.perf_counter())
        ranks[:] = [torch.distributed.get_rank() if torch.distributed.is_initialized() else 0]

    register_optimizer_step_post_hook(record_step)
    script = Path(checkout, "01-ddp-pytorch-only/train_ddp.py")
    sys.argv = [str(script), *options]
    runpy.run_path(str(script), run_name="__main__")
    if ranks == [0]:
        versions = {name: version(name) for name in ("torch", "numpy")}
        versions = {"python": platform.python_version(), **versions}
        seconds = [after - before for before, after in pairwise(moments)]
        Path(file).write_text(json.dumps({"known": versions, "step_seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
