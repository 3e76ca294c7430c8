"""A Ray cluster on this machine whose nodes can be killed, and the log of a run on it: the helpers of lesson 4.1."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt
import psutil
import ray
import ray.train
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.train import Checkpoint, UserCallback

from shared import plots
from shared.on_ray import cluster

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import from a lesson's folder
PARTS = ("detection", "restart", "replay")
STORE_BYTES = 80 * 2**20  # of a node's object store, which needs little here
PATIENCE_S = 300


class RunLog:
    """Files in which the processes of a run note what happens, and in which they read how far they may go."""

    def __init__(self, folder: Path, upload_s: float = 0.0) -> None:
        self.folder, self.upload_s = folder, upload_s
        self.allow(0)

    def write(self, kind: str, **line: object) -> None:
        """Append a line, with the time, to the file of its kind."""
        with open(self.folder / f"{kind}.jsonl", "a") as file:
            file.write(json.dumps({"time": time.time(), **line}) + "\n")

    def read(self, kind: str) -> list[dict]:
        """Return the lines of a kind so far, in the order of their times."""
        path = self.folder / f"{kind}.jsonl"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []  # not one being written
        return sorted(map(json.loads, lines), key=lambda line: line["time"])

    def step(self) -> int:
        """Return the last step that rank 0 completed."""
        lines = self.read("steps")
        return lines[-1]["step"] if lines else 0

    def started(self, rank: int) -> dict:
        """Return what the newest process with this rank noted when it started."""
        return [line for line in self.read("starts") if line["rank"] == rank][-1]

    def allow(self, step: int) -> None:
        """Let the ranks continue, up to and including this step."""
        (self.folder / "until").write_text(str(step))

    def wait_for_permission(self, step: int) -> None:
        """Called by each rank before each step."""
        while int((self.folder / "until").read_text() or 0) < step:  # empty for a moment while it is written
            time.sleep(0.02)

    def take_disk_away(self) -> None:
        """Make rank 1's disk stop answering, at the beginning of its next step."""
        (self.folder / "disk-is-away").touch()

    def disk_is_away(self) -> bool:
        """Return whether the disk has stopped answering. It does so once: the rank's successor finds it working."""
        try:
            (self.folder / "disk-is-away").unlink()
        except FileNotFoundError:
            return False
        self.write("hangs")
        return True

    def upload(self, reported: Checkpoint, name: str) -> Checkpoint:
        """Copy a checkpoint to the storage as Ray would, but as slowly as `upload_s` says."""
        time.sleep(self.upload_s)
        stored = shutil.copytree(reported.path, self.folder / "failures" / name)  # Ray demands a place in the run
        return Checkpoint.from_directory(stored)


class NoteDetection(UserCallback):
    """Notes when Ray Train's controller learns that a worker has failed."""

    def __init__(self, log: RunLog) -> None:
        self.log = log

    def after_exception(self, run_context: object, worker_exceptions: dict[int, Exception]) -> None:
        """Ray calls this in the controller, before it ends the other workers."""
        self.log.write("detected", ranks=sorted(worker_exceptions))


class Nodes:
    """A Ray cluster of separate nodes, each a group of processes on this machine. Its head runs no workers."""

    def __init__(self, number: int) -> None:
        self.options = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
        head = {**self.options, "num_cpus": 0, "include_dashboard": False, "dashboard_port": None}  # None: a free one
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.alive = [self.cluster.add_node(**self.options) for _ in range(number)]
        ray.init(self.cluster.address, logging_config=ray.LoggingConfig(log_level="ERROR"), log_to_driver=False)

    def kill(self, node_id: str) -> None:
        """Send SIGKILL to all processes of a node at once."""
        victim = next(node for node in self.alive if node.node_id == node_id)
        self.alive.remove(victim)
        raylet = psutil.Process(victim.all_processes["raylet"][0].process.pid)
        cluster.kill([raylet, *raylet.children(recursive=True)])
        self.cluster.remove_node(victim, allow_graceful=False)  # and forget it

    def add(self) -> str:
        """Start a new node, as an autoscaler would, and return its ID."""
        self.alive.append(self.cluster.add_node(**self.options))
        return self.alive[-1].node_id

    def announce_loss(self, node_id: str, notice_s: float) -> float:
        """Tell Ray that a cloud takes this node back in so many seconds, as `ray drain-node` does; return the time."""
        reason, deadline_ms = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, int(1000 * (time.time() + notice_s))
        gcs = ray._raylet.GcsClient(address=self.cluster.address)
        accepted, why = gcs.drain_node(node_id, reason, "the cloud takes it back", deadline_ms)
        assert accepted, why
        return deadline_ms / 1000

    def stop(self) -> None:
        """End the cluster with every process in it."""
        started = psutil.Process().children(recursive=True)
        ray.shutdown()
        self.cluster.shutdown()
        psutil.wait_procs(started, timeout=5)
        cluster.kill(started)  # agents that would outlive it


class Fit:
    """A trainer's `fit` in a thread, so that the notebook can break things in the meantime."""

    def __init__(self, fit: Callable) -> None:
        self.future: Future = ThreadPoolExecutor(1).submit(fit)

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Wait until something is true. Raises the run's error if it ends first, or TimeoutError."""
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            if self.future.done() or time.monotonic() > deadline:
                self.future.result(timeout=0)
                raise TimeoutError("the run has ended before that")
            time.sleep(0.05)

    def result(self) -> ray.train.Result:
        """Wait for the end of the run."""
        return self.future.result(timeout=PATIENCE_S)


def split_costs(log: RunLog, failed_at: float) -> dict[str, float]:
    """Return the seconds of detection, restart and replay after a failure at that time, and the steps replayed.

    Detection ends when the controller knows, and takes no time if it knew before. Restart ends when the new ranks can
    train, and replay when the step that the run had reached is done again. Without replayed steps it takes no time.
    """
    steps = log.read("steps")
    reached = max((line["step"] for line in steps if line["time"] <= failed_at), default=0)
    resumed = next(line for line in log.read("resumes") if line["rank"] == 0 and line["time"] > failed_at)
    detected = [line["time"] for line in log.read("detected") if failed_at < line["time"] < resumed["time"]]
    known_at = min(detected, default=failed_at)
    again = [line for line in steps if line["time"] > resumed["time"] and line["step"] <= reached]
    replay_s = max((line["time"] for line in again), default=resumed["time"]) - resumed["time"]
    seconds = (known_at - failed_at, resumed["time"] - known_at, replay_s)
    return dict(zip(PARTS, seconds, strict=True)) | {"steps": len({line["step"] for line in again})}


def draw_costs(log: RunLog, failures: Mapping[str, float]) -> None:
    """Draw the step that the run has reached over the seconds since each failure, and shade its three costs."""
    steps = log.read("steps")
    _, panels = plt.subplots(1, len(failures), figsize=(11, 3.6), layout="constrained", sharex=True, sharey=True)
    longest = max(sum(split_costs(log, failed_at)[part] for part in PARTS) for failed_at in failures.values())
    for axes, (what, failed_at) in zip(panels, failures.items(), strict=True):
        costs, begin = split_costs(log, failed_at), 0.0
        reached = max(line["step"] for line in steps if line["time"] <= failed_at)
        for part, color in zip(PARTS, plots.COLORS[1:], strict=False):
            axes.axvspan(begin, begin + costs[part], color=color, alpha=0.3, label=f"{part} {costs[part]:.1f} s")
            begin += costs[part]
        resumed = [line for line in log.read("resumes") if line["rank"] == 0]  # at the step of the checkpoint
        lines = sorted(steps + resumed, key=lambda line: line["time"])
        times, numbers = [line["time"] - failed_at for line in lines], [line["step"] - reached for line in lines]
        axes.step(times, numbers, where="post", color=plots.COLORS[0], linewidth=2)
        axes.set_title(what, loc="left", fontsize=12)
        axes.set(yticks=range(-8, 7, 4), xlabel="seconds since the failure", xlim=(-3, longest + 3), ylim=(-22, 6))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.legend(title=f"{costs['steps']} steps replayed", framealpha=1, edgecolor="none", loc="lower right")
    panels[0].set_ylabel("step, counted from the failure")
