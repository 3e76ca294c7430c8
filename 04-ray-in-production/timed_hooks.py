"""Train a small model with several communication hooks, on one network after another, and time each step.

torchrun ... timed_hooks.py HOOKS.py OUT.json SEED STEPS MBIT/HOOK...

HOOKS.py has a dictionary HOOKS: for each name a function that returns the state and the hook for `register_comm_hook`,
or None for no hook. Every MBIT/HOOK trains a new network, with the same seed and batches. Rank 0 writes a list with one
entry for each: its `mbit` and `hook`, and for each rank `step_ms` (milliseconds of each step after the warm-up), `sent`
(bytes per step after the warm-up), `losses` (of the rank's own rows, all steps) and `weights_apart` (the largest
difference from rank 0's weights after the last step). checks/data/recorded_hooks.json has such entries.

Lesson 4.4 calls `why_refused`, `start` and `median_ms`.
"""

import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from shared import datasets, distributed, measure, models

TWO_NODES = Path(__file__).resolve().parents[1] / "benchmarks" / "two_nodes.sh"
OWN_NETWORK = ["unshare", "--user", "--map-root-user", "--net", "bash", str(TWO_NODES)]
WARMUP = 8  # steps that are neither timed nor counted
BATCH_SIZE = 64  # over all ranks


def set_rate(mbit: int) -> None:
    """Limit this node's end of the wire to `mbit` Mbit/s. Without a wire of its own, do nothing."""
    if os.environ.get("GLOO_SOCKET_IFNAME") == "wire":  # two_nodes.sh sets it
        limit = f"tbf rate {mbit}mbit burst 64kb latency 1s"
        subprocess.run(["tc", "qdisc", "replace", "dev", "wire", "root", *limit.split()], check=True)


def sent_bytes() -> int:
    """Return the bytes that this rank has sent since it started, or 0 where the system does not count them."""
    dist.barrier()  # whatever was sent before has arrived
    return measure.tcp_bytes_sent()


def train(make_hook: Callable[[], tuple], steps: int, seed: int) -> dict:
    """Train for WARMUP + `steps` steps, and return this rank's measurements."""
    images, labels = datasets.digits().train.tensors
    distributed.seed_everything(seed)
    # One bucket for all gradients: on gloo, PyTorch's PowerSGD hook hangs with two.
    ddp_model = DistributedDataParallel(models.MLP(64, 768, dropout=0), bucket_cap_mb=100)
    if (hook := make_hook()) is not None:
        ddp_model.register_comm_hook(*hook)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.15)
    losses, step_ms = [], []
    for step in range(WARMUP + steps):
        if step == WARMUP:
            sent_before = sent_bytes()
        started = time.perf_counter()
        rows = torch.randperm(len(images))[:BATCH_SIZE][dist.get_rank() :: dist.get_world_size()]
        loss = F.cross_entropy(ddp_model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step_ms.append(1e3 * (time.perf_counter() - started))
    sent = (sent_bytes() - sent_before) / steps
    weights = torch.nn.utils.parameters_to_vector(ddp_model.parameters()).detach()
    apart = (weights - distributed.from_rank_zero(weights)).abs().max().item()
    return {"step_ms": step_ms[WARMUP:], "sent": sent, "losses": losses, "weights_apart": apart}


def why_refused() -> str:
    """Return why this machine allows no network of our own, or "" if it does."""
    try:
        attempt = subprocess.run(OWN_NETWORK, capture_output=True, text=True)
    except OSError as error:  # there is no unshare
        return str(error)
    return (attempt.stderr.strip() or f"exit code {attempt.returncode}") if attempt.returncode else ""


def start(script: Path, seed: int, steps: int, runs: list[str], own_network: bool) -> list[dict]:
    """Run this file on two ranks with the hooks of `script`, and return what rank 0 wrote.

    Each rank is on a node of its own if `own_network`; otherwise both talk over loopback, at no limited rate.
    """
    out = script.with_suffix(".json")
    launcher = [*OWN_NETWORK, "1"] if own_network else ["torchrun", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launcher, __file__, str(script), str(out), str(seed), str(steps), *runs], check=True)
    return json.loads(out.read_text())


def median_ms(run: dict) -> float:
    """Return the median over a run's steps; each step takes as long as its slowest rank."""
    return statistics.median(map(max, *run["step_ms"]))


def main(hooks_path: str, out: str, seed: str, steps: str, *runs: str) -> None:
    worker, hooks, done = distributed.join(), runpy.run_path(hooks_path)["HOOKS"], []
    for run in runs:
        mbit, hook = run.split("/")
        set_rate(int(mbit))
        ranks = distributed.gather_objects(train(hooks[hook], int(steps), int(seed)))
        done.append({"mbit": int(mbit), "hook": hook, **{key: [rank[key] for rank in ranks] for key in ranks[0]}})
        if worker.rank == 0:
            print(f"{int(mbit):6,} Mbit/s, {hook}: {median_ms(done[-1]):.0f} ms per step", flush=True)
    if worker.rank == 0:
        Path(out).write_text(json.dumps(done))
    distributed.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
