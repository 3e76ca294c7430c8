"""Train on three ranks, slow some of them down on purpose, and log the parts of each step: the helpers of lesson 4.3.

torchrun ... watched_ranks.py STEP.py FOLDER SEED STEPS RUN.json...

STEP.py defines `hand_over(clock, bucket)`, a communication hook of DDP, and `timed_step(ddp_model, optimizer,
read_batch, clock)`, which returns a dict with the seconds of each part. RUN.json is a list [name, delays]; a delay is
[rank, part, seconds]. The rank is a number, "all", or "in turn" for one rank per step. The part is "reading",
"computing" (it sleeps in the forward pass), "network" (the average arrives later) or "between" (it sleeps after the
step). Every run trains a new model with the same seed. Each rank appends to FOLDER/RANK.jsonl one line per step, and
writes a trace of one more step to FOLDER/NAME-RANK.trace.json.

Lesson 4.3 calls `start`, `read_lines`, `all_reduces` and `draw_parts`.
"""

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

NUM_RANKS = 3
BATCH_SIZE = 96  # over all ranks
PARTS = ("reading", "computing", "waiting")
WARMUP = 2  # steps before the one in the trace, since a profiler slows the first step after its start


# --- for the notebook ------------------------------------------------------------------------------------------------


def start(step: Path, seed: int, steps: int, runs: Mapping[str, Sequence]) -> None:
    """Run this file on three ranks: `runs` gives the delays of each run by its name."""
    words = [json.dumps(run) for run in runs.items()]
    launch = ["torchrun", "--standalone", "--nproc-per-node", str(NUM_RANKS), __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, str(step), str(step.parent), str(seed), str(steps), *words]
    ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)  # the profiler writes there
    if ended.returncode:
        raise RuntimeError(f"the ranks failed:\n{ended.stderr}")


def read_lines(folder: Path, run: str) -> list[dict]:
    """Return the lines that the ranks of a run have written so far."""
    texts = (path.read_text() for path in sorted(folder.glob("*.jsonl")))
    whole = [line for text in texts for line in text[: text.rfind("\n") + 1].splitlines()]
    return [line for line in map(json.loads, whole) if line["run"] == run]


def all_reduces(folder: Path, run: str) -> list[list[float]]:
    """Return for each rank the milliseconds of each all-reduce in its trace of one step."""
    found = []
    for rank in range(NUM_RANKS):
        events = json.loads((folder / f"{run}-{rank}.trace.json").read_text())["traceEvents"]
        found.append([e["dur"] / 1e3 for e in events if e.get("ph") == "X" and e["name"] == "gloo:all_reduce"])
    return found


def draw_parts(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw for each title a panel with one stacked bar per rank: `panels[title][part]` lists the ranks' seconds."""
    import matplotlib.pyplot as plt

    from shared import plots

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (3.3 * columns, 0.5 + 1.8 * rows)
    _, grid = plt.subplots(rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained")
    colors = dict(zip(PARTS, plots.COLORS, strict=False)) | {"waiting for ranks": plots.COLORS[2]}
    colors |= {"shortest wait": plots.COLORS[3]}
    for axes, (title, parts) in zip(grid.flat, panels.items(), strict=False):
        left = [0.0] * NUM_RANKS
        for part, seconds in parts.items():
            axes.barh(range(NUM_RANKS), seconds, left=left, color=colors[part], label=part, height=0.65)
            left = [a + b for a, b in zip(left, seconds, strict=True)]
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_yticks(range(NUM_RANKS), [f"rank {rank}" for rank in range(NUM_RANKS)])
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    grid[0, 0].invert_yaxis()
    for axes in grid[-1]:
        axes.set_xlabel("seconds per step")
        axes.locator_params(axis="x", nbins=3)  # the labels of neighboring panels do not touch
    handles, labels = grid[0, 0].get_legend_handles_labels()
    grid[0, 0].figure.legend(handles, labels, frameon=False, fontsize=9, ncols=len(labels), loc="outside upper right")


# --- on each rank ----------------------------------------------------------------------------------------------------


def train(run: str, delays: Sequence[Sequence], step: Mapping, folder: Path, steps: int, seed: int) -> None:
    """Train a new model for `steps` steps, log each of them, and trace one more."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile, schedule

    from shared import datasets, distributed, models

    rank, number = dist.get_rank(), 0
    images, labels = datasets.digits().train.tensors

    def delay(part: str) -> None:
        """Sleep as long as the delays for this rank, part and step say."""
        mine = (rank, "all") if number % NUM_RANKS != rank else (rank, "all", "in turn")
        time.sleep(sum(seconds for who, where, seconds in delays if who in mine and where == part))

    def read_batch() -> tuple[torch.Tensor, torch.Tensor]:
        delay("reading")
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed + number))
        rows = order[:BATCH_SIZE][rank::NUM_RANKS]
        return images[rows], labels[rows]

    def over_the_network(clock: dict, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Call the hook. On a slow network, the average of its last bucket arrives later."""
        average = step["hand_over"](clock, bucket)
        return average.then(lambda average: (delay("network"), average.value())[1]) if bucket.is_last() else average

    distributed.seed_everything(seed)
    model = models.MLP(64, 384, dropout=0)
    model.register_forward_pre_hook(lambda *_: delay("computing"))
    ddp_model, clock = DistributedDataParallel(model, bucket_cap_mb=0.2), {}
    ddp_model.register_comm_hook(clock, over_the_network)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.15)
    dist.barrier()
    for number in range(1, steps + 1):
        line = {"run": run, "rank": rank, "step": number}
        line |= step["timed_step"](ddp_model, optimizer, read_batch, clock) | {"time": time.time()}
        with open(folder / f"{rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        delay("between")

    def save(trace: profile) -> None:
        trace.export_chrome_trace(str(folder / f"{run}-{rank}.trace.json"))

    one_step = schedule(wait=0, warmup=WARMUP, active=1, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=one_step, on_trace_ready=save) as trace:
        for _ in range(WARMUP + 1):
            step["timed_step"](ddp_model, optimizer, read_batch, clock)
            trace.step()


def main(step: str, folder: str, seed: str, steps: str, *runs: str) -> None:
    from shared import distributed

    distributed.join()
    defined: dict[str, Callable] = runpy.run_path(step)
    for name, delays in map(json.loads, runs):
        train(name, delays, defined, Path(folder), int(steps), int(seed))
    distributed.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
