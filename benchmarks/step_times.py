"""One run of check_regression.py: CHECKOUT's train_ddp.py as it is; FILE gets the seconds of each optimizer step.

    torchrun --standalone --nproc-per-node 2 step_times.py CHECKOUT FILE OPTIONS...

The seconds are those between two steps of rank 0, so the first step has none; that after an epoch's end has validation
in it. FILE, in JSON, also gets the versions. `shared` must be CHECKOUT's, or nothing is measured.
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
    assert imported == expected, f"shared is that of {imported}, not that of {expected}"
    moments, ranks = [], []

    def note(*_: object) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # or it would be the moment at which the step was asked for
        moments.append(time.perf_counter())
        ranks[:] = [torch.distributed.get_rank() if torch.distributed.is_initialized() else 0]

    register_optimizer_step_post_hook(note)
    script = Path(checkout, "01-ddp-pytorch-only/train_ddp.py")
    sys.argv = [str(script), *options]
    runpy.run_path(str(script), run_name="__main__")
    if ranks == [0]:
        versions = {name: version(name) for name in ("torch", "numpy")}
        known = {"python": platform.python_version(), **versions}
        seconds = [after - before for before, after in pairwise(moments)]
        Path(file).write_text(json.dumps({"known": known, "step_seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
