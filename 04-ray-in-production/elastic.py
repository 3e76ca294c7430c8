"""Train while nodes leave and join: on two nodes, then on one, then on two again, all of them on this machine.

    python elastic.py --out record.json      # five minutes or more on two CPU cores
    python elastic.py --out FOLDER           # to a file there, named after date and device, as `make bench` does

Starts a Ray cluster with a head without CPUs and two nodes with one CPU each. Runs train_ray_ddp.py on it, with
`--num-workers 1:2 --save-every-steps 5`. After some steps are saved, one node gets a SIGKILL; later a new one joins.
Prints the cost of each change, and asserts that the losses equal those of one undisturbed process.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster

from shared.distributed import Worker
from shared.doctor import cpu_name
from shared.on_ray import storage
from shared.paths import ray_temp_dir
from shared.running.script import run_main

ROOT = Path(__file__).parents[1]
SAVE_EVERY = 5
OPTIONS = ["--model", "resnet8", "--precision", "fp64", "--epochs", "1000"]
ELASTIC = ["--num-workers", "1:2", "--no-use-gpu", "--save-every-steps", SAVE_EVERY, "--run-name", "elastic"]
LIMIT_S = 600  # the longest wait


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the measurements to FILE, or to a file in FOLDER, as JSON"
    )
    args = parser.parse_args()
    exit_on_signals()
    with ray_folder() as folder:
        steps, changes, losses = train_on_changing_nodes(folder)
        expected = train_in_one_process(folder, len(losses))
    phases = [list(phase) for _, phase in groupby(steps, key=lambda step: step[2])]
    worlds = [phase[0][2] for phase in phases]
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    assert worlds == [2, 1, 2], worlds
    print("change       workers  steps replayed  seconds until the next step     of them without steps")
    for change, (before, after) in zip(changes, pairwise(phases), strict=True):
        change |= {"workers": f"{before[0][2]} to {after[0][2]}", "replayed": before[-1][1] - after[0][1] + 1}
        change |= {"seconds": after[0][0] - change["time"], "idle_s": after[0][0] - before[-1][0]}
        print("{what:11}  {workers:7}  {replayed:14}  {seconds:30.1f}  {idle_s:21.1f}".format(**change))
    print(f"largest difference from one process, {len(losses)} losses in float64: {difference:.1e}")
    if args.out is not None:
        record = {**machine(), "save_every_steps": SAVE_EVERY, "steps": len(losses), "worlds": worlds,
                  "changes": changes, "largest_difference": difference}  # fmt: skip
        if args.out.is_dir():
            name = re.sub(r"[^a-z0-9]+", "-", f"elastic-{record['date']}-{record['device']}".lower()).strip("-")
            args.out /= f"{name}.json"
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    assert all(0 <= change["replayed"] <= SAVE_EVERY for change in changes), changes
    assert difference < 1e-9


def exit_on_signals() -> None:
    """End by an exception on SIGTERM and SIGHUP, so that all child processes are ended too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))


@contextlib.contextmanager
def ray_folder() -> Iterator[str]:
    """Make a temporary folder, and let Ray use it: this cluster must not replace a running one in Ray's address file.

    Raises UsageError if Ray could not work in it.
    """
    parent = ray_temp_dir("tmp12345678")
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        yield folder


def machine() -> dict:
    """Return date, device and versions for the record."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "ray": ray.__version__}
    device = {"device": f"{cpu_name()}, {os.cpu_count()} CPUs", "cpus": os.cpu_count(), "threads_per_process": 1}
    return {"date": time.strftime("%Y-%m-%d"), **device, **versions, "system": platform.platform()}


def train_on_changing_nodes(folder: str) -> tuple[list[tuple[float, int, int]], list[dict], list[float]]:
    """Return the steps as (time, step, workers), the changes of the nodes, and the losses up to the last checkpoint."""
    log, changes = Path(folder, "steps"), []
    log.touch()

    def steps() -> list[tuple[float, int, int]]:
        return [(float(moment), int(step), int(size)) for moment, step, size in map(str.split, log.open())]

    def wait_for_steps(workers: int) -> None:
        """Wait until this many workers have taken more steps since the last change than there are between two saves."""
        since, deadline = changes[-1]["time"] if changes else 0, time.monotonic() + LIMIT_S
        while sum(step[0] > since and step[2] == workers for step in steps()) <= SAVE_EVERY:
            assert training.poll() is None and time.monotonic() < deadline, "no progress"
            time.sleep(0.1)

    def change(what: str) -> None:
        changes.append({"what": what, "time": time.time()})
        print(f"{what}, after {steps()[-1][1]} steps", flush=True)

    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    nodes = Cluster(
        initialize_head=True, head_node_args={**node, "num_cpus": 0, "include_dashboard": False, "dashboard_port": None}
    )
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(nodes.shutdown)
        node_to_kill, _ = nodes.add_node(**node), nodes.add_node(**node)
        script = ROOT / "02-ddp-pytorch-ray/train_ray_ddp.py"
        command = [Path(__file__).with_name("log_steps.py"), script, *OPTIONS, *ELASTIC, "--storage-path", folder]
        variables = {"RAY_ADDRESS": nodes.address, "STEPS_LOG": str(log), "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
        training = cleanup.enter_context(process(command, variables, Path(folder, "output")))
        wait_for_steps(workers=2)
        change("node killed")
        nodes.remove_node(node_to_kill, allow_graceful=False)
        wait_for_steps(workers=1)
        change("node added")
        nodes.add_node(**node)
        wait_for_steps(workers=2)
        training.send_signal(signal.SIGINT)
        training.wait(LIMIT_S)
    _, state, _ = storage.RayRun(f"{folder}/elastic").load_newest(Worker())
    epochs = [*state["progress"]["metrics"], state["progress"]]  # the last one is unfinished
    return steps(), changes, [loss for epoch in epochs for loss in epoch["step_losses"]]


def train_in_one_process(folder: str, num_steps: int) -> list[float]:
    """Run train_ddp.py in one process and return its losses."""
    metrics, script = Path(folder, "metrics.jsonl"), ROOT / "01-ddp-pytorch-only/train_ddp.py"
    command = [script, *OPTIONS, "--max-steps", num_steps, "--storage-path", folder, "--metrics-out", metrics]
    with process(command, {"CUDA_VISIBLE_DEVICES": ""}, Path(folder, "output")) as training:
        assert training.wait(10 * LIMIT_S) == 0
    return [loss for line in metrics.read_text().splitlines() for loss in json.loads(line)["step_losses"]]


@contextlib.contextmanager
def process(command: list, variables: dict[str, str], output: Path) -> Iterator[subprocess.Popen]:
    """Run a Python script, and print its lines at the end; if it succeeded, only those of the driver and the ranks."""
    arguments, environment = [sys.executable, *map(str, command)], {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with open(output, "w") as file:
        running = subprocess.Popen(arguments, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield running
    finally:
        running.kill()
        running.wait()
        prefixes = ("[driver]", "[rank") if running.returncode in (0, 128 + signal.SIGINT) else ""
        print(*[line for line in output.read_text().splitlines() if line.startswith(prefixes)], sep="\n", flush=True)


if __name__ == "__main__":
    run_main(main)
