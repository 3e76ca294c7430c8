"""Watch a cluster grow when work arrives and shrink when it is done: no node, two nodes, none, all on this machine.

    python autoscale.py                  # a minute or two on two CPU cores
    python autoscale.py --out FOLDER     # also writes a record to a file named after date and device

Starts a Ray cluster with a head without CPUs and its autoscaler. Runs train_ray_ddp.py on it, with two workers of one
CPU each. No machines are rented: Ray's provider for tests (`fake_multinode`) starts each node as processes on this
machine. The provider is fake, but the processes are real, and the autoscaler decides as it would in a cloud. Only the
minutes that a cloud machine takes to boot are missing.

Prints each change of the number of nodes, and asserts that both nodes were busy and both were removed.
"""

import argparse
import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

os.environ["RAY_AUTH_MODE"] = "token"  # for this cluster alone; ray reads it on import
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
import ray
from elastic import LIMIT_S, ROOT, exit_on_signals, machine, process, ray_folder

from shared.on_ray.cluster import kill
from shared.rendezvous import free_port
from shared.running.script import run_main

IDLE_S, STEPS = 15, 4
TRAINING = ["--num-workers", "2", "--no-use-gpu", "--model", "mlp", "--run-name", "autoscale", "--max-steps", STEPS]
HEAD, NODE = "ray.head.default", "node of one CPU"  # any other name makes this provider launch head after head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write a record to FILE, or to a file in FOLDER, as JSON"
    )
    args = parser.parse_args()
    exit_on_signals()
    with ray_folder() as folder, cluster(folder) as address:
        changes, started, ended = train_and_watch(folder, address)
    up, down = time_of(changes, nodes=2) - started, changes[-1]["seconds"] - ended
    print(f"two nodes {up:.1f} s after the work arrived, none {down:.1f} s after it was done")
    if args.out is not None:
        record = {**machine(), "provider": "fake_multinode: processes of this machine", "idle_timeout_s": IDLE_S,
                  "work_arrived_s": started, "work_done_s": ended, "changes": changes}  # fmt: skip
        if args.out.is_dir():
            name = re.sub(r"[^a-z0-9]+", "-", f"autoscale-{record['date']}-{record['device']}".lower()).strip("-")
            args.out /= f"{name}.json"
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    assert changes[0]["nodes"] == changes[-1]["nodes"] == 0, changes
    assert max(change["nodes"] for change in changes) == max(change["busy"] for change in changes) == 2, changes


@contextlib.contextmanager
def cluster(folder: str) -> Iterator[str]:
    """Run a head without CPUs and its autoscaler on ports of its own, and yield the head's address."""
    address = f"{ray.util.get_node_ip_address()}:{free_port()}"
    config = {
        "cluster_name": "autoscale",
        "max_workers": 2,
        "idle_timeout_minutes": IDLE_S / 60,
        "upscaling_speed": 1.0,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
        },
        "available_node_types": {
            HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            NODE: {
                "resources": {"CPU": 1, "object_store_memory": 100 * 2**20},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 2,
            },
        },
        "head_node_type": HEAD,
        "auth": {"ssh_user": "nobody"},  # this and the following keys are for nodes that are reached by ssh
        "docker": {},
        **{key: {} for key in ("file_mounts", "head_node", "worker_nodes")},
        **{key: [] for key in ("file_mounts_sync_files", "cluster_synced_files", "initialization_commands")},
        **{f"{kind}setup_commands": [] for kind in ("", "head_", "worker_")},
        **{f"{kind}_start_ray_commands": [] for kind in ("head", "worker")},
    }
    file, output = Path(folder, "autoscaling.json"), Path(folder, "head.log")
    file.write_text(json.dumps(config))  # JSON is YAML
    ports = {"port": address.rpartition(":")[2], "ray-client-server-port": free_port()}
    ports |= {"dashboard-agent-listen-port": free_port()}
    variables = {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        **{name: str(free_port()) for name in ("DASHBOARD_METRIC_PORT", "AUTOSCALER_METRIC_PORT")},
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # the head stops at once: it has no work to move elsewhere
        "OMP_NUM_THREADS": "1",
    }
    options = ["--head", "--block", "--num-cpus=0", f"--object-store-memory={100 * 2**20}", "--include-dashboard=false"]
    options += [f"--autoscaling-config={file}", "--disable-usage-stats", *[f"--{k}={v}" for k, v in ports.items()]]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
    with open(output, "w") as out:
        head = psutil.Popen(command, env={**os.environ, **variables}, stdout=out, stderr=subprocess.STDOUT)
    stopping = threading.Event()

    def report_early_exit() -> None:
        head.wait()
        if not stopping.is_set():
            print(f"error: the head has exited; its logs are in {folder}\n{output.read_text()}", file=sys.stderr)
            kill(psutil.Process().children(recursive=True))
            os._exit(1)  # the main thread would wait a minute for the head's answer, and then exit without a message

    try:
        deadline = time.monotonic() + LIMIT_S
        while "Ray runtime started" not in output.read_text():
            assert head.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.2)
        threading.Thread(target=report_early_exit, daemon=True).start()
        yield address
    finally:
        # Not `ray stop`, which stops every Ray cluster on the machine. The nodes are children of the autoscaler.
        stopping.set()
        children = head.children(recursive=True) if head.is_running() else []
        head.terminate()
        _, alive = psutil.wait_procs([head, *children], timeout=30)
        kill(alive)


def train_and_watch(folder: str, address: str) -> tuple[list[dict], float, float]:
    """Return each change of the nodes, and when the work arrived and was done, in seconds since the start."""
    ray.init(address, log_to_driver=False, logging_level="ERROR")
    start, changes = time.monotonic(), []

    def seconds() -> float:
        return round(time.monotonic() - start, 1)

    def record_nodes() -> int:
        """Record the number of nodes if it has changed, and return it. The head does not count."""
        free = ray._private.state.available_resources_per_node()
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        current = {"nodes": len(nodes), "busy": sum(free.get(node, {}).get("CPU", 0) < 1 for node in nodes)}
        if not changes or {**changes[-1], **current} != changes[-1]:
            changes.append({"seconds": seconds(), **current})
            print("{seconds:6.1f} s  nodes: {nodes}, busy: {busy}".format(**changes[-1]), flush=True)
        time.sleep(0.25)
        return len(nodes)

    record_nodes()
    script = ROOT / "02-ddp-pytorch-ray/train_ray_ddp.py"
    # Nodes on one machine share a log folder, and each would send all logs in it to the driver.
    variables = {"RAY_ADDRESS": address, "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0", "RAY_LOG_TO_DRIVER": "0"}
    started, deadline = seconds(), time.monotonic() + 3 * LIMIT_S
    print(f"{started:6.1f} s  work arrives: two workers with one CPU each", flush=True)
    with process([script, *TRAINING, "--storage-path", folder], variables, Path(folder, "output")) as training:
        while training.poll() is None:
            record_nodes()
            assert time.monotonic() < deadline, "training does not end"
        ended = seconds()
    assert training.returncode == 0, "training failed"
    print(f"{ended:6.1f} s  work is done", flush=True)
    while record_nodes():
        assert time.monotonic() < deadline, "the nodes are not removed"
    ray.shutdown()
    return changes, started, ended


def time_of(changes: list[dict], nodes: int) -> float:
    """Return when the number of nodes first was `nodes`, in seconds since the start."""
    return next((change["seconds"] for change in changes if change["nodes"] == nodes), float("nan"))


if __name__ == "__main__":
    run_main(main)
