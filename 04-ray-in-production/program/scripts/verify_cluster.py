"""Check whether a Ray cluster is fit for training. Prints each item as [OK], or as [FAIL] with a fix.

    python scripts/verify_cluster.py /mnt/shared             within a minute
    python scripts/verify_cluster.py /mnt/shared --all       also kills a worker, and keeps the GPUs busy
    python scripts/verify_cluster.py /mnt/shared --json      the same as JSON

The folder is the storage for training. Run it on a node of the cluster with RAY_ADDRESS=HEAD:6379. Without RAY_ADDRESS
it starts Ray on this machine. The exit code is 1 if an item fails, and 2 if nothing can be checked.
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

os.environ.setdefault("RAY_LOG_TO_DRIVER", "0")  # hides what workers print when one is killed; ray reads it on import
import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shared import checkpoint
from shared.distributed import Worker, gather_objects
from shared.errors import UsageError
from shared.on_ray import cluster, workers
from shared.on_ray.storage import STATE_FILE, report
from shared.paths import local_path
from shared.running import script
from shared.running.options import Parser, positive_int

PACKAGES = ("ray", "torch", "numpy", "pyarrow")
CLOCKS_S = 1.0  # how much two clocks may differ; the names of checkpoints and the lines of logs contain times
FREE_GB = 5
MEGABYTES = 16  # per all-reduce
STEPS, KILLED_AFTER = 6, 4


class Failed(Exception):
    """A failed item: what was seen, and how to fix it."""

    def __init__(self, seen: str, fix: str) -> None:
        super().__init__(seen)
        self.fix = fix


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages as this machine has them."""
    return {"Python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def inspect_node(storage: str, name: str) -> dict:
    """Describe this node, and write a file to the storage. Runs on each node."""
    try:
        (Path(storage) / name / ray.get_runtime_context().get_node_id()).write_text(socket.gethostname())
        problem = None
    except OSError as error:
        problem = f"{error.strerror}: {error.filename}"
    return {
        "versions": versions(),
        "gpus": torch.cuda.device_count(),
        "free_gb": shutil.disk_usage(tempfile.gettempdir()).free / 1e9,
        "storage": problem,
    }


def train_worker(config: dict) -> list[dict]:
    """Take steps with DDP, save checkpoints and time an all-reduce. Runs on each worker, resumes after a failure."""
    worker, resumed_from = workers.current_worker(), 0
    rank, device = worker.rank, worker.device
    torch.manual_seed(rank)  # DDP has to make the weights equal
    model = ray.train.torch.prepare_model(torch.nn.Linear(256, 256))
    if newest := ray.train.get_checkpoint():
        resumed_from = load_step(newest)
    for step in range(resumed_from + 1, STEPS + 1):
        loss = model(torch.randn(32, 256, device=device)).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        report({"progress": {"step": step}}, {"step": step}, worker)
        if config["kill"] and step == KILLED_AFTER and resumed_from == 0 and rank == worker.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu().numpy()
    numbers = torch.full((MEGABYTES * 2**18,), float(rank), device=device)
    dist.all_reduce(numbers)
    rank_sum = float(numbers[0])  # of 0 to world - 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(3):
        dist.all_reduce(numbers)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / 3

    step = load_step(ray.train.get_all_reported_checkpoints()[-1].checkpoint)  # written by rank 0, read by all
    utilization = keep_busy(device, 5) if config["busy"] and device.type == "cuda" else None
    findings = {
        "node": ray.get_runtime_context().get_node_id(), "read_step": step, "resumed_from": resumed_from,
        "utilization": utilization, "weights": hashlib.sha256(weights.tobytes()).hexdigest(), "rank_sum": rank_sum,
        "mb_per_s": MEGABYTES / seconds,
    }  # fmt: skip
    return gather_objects(findings)


def load_step(saved: ray.train.Checkpoint) -> int:
    """Load a checkpoint and return its step."""
    with saved.as_directory() as folder:
        return checkpoint.load(Path(folder) / STATE_FILE)["progress"]["step"]


def keep_busy(device: torch.device, seconds: float) -> int | None:
    """Multiply matrices, and return the GPU's utilization in percent at the end, or None if NVML is not available."""
    matrix = torch.randn(4096, 4096, device=device)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for _ in range(20):
            matrix = (matrix @ matrix).clamp(-1, 1)
        torch.cuda.synchronize()
    try:
        return torch.cuda.utilization(device)
    except (ModuleNotFoundError, RuntimeError):
        return None


class Checklist:
    """The items in order. Each one is printed as soon as it is known."""

    def __init__(self, out: TextIO | None) -> None:
        self.out, self.items = out, []

    def add(self, name: str, check: Callable[[], str]) -> bool:
        """Run a check and return whether it passed. The check returns what it has seen or raises Failed."""
        try:
            item = {"name": name, "ok": True, "seen": check(), "fix": ""}
        except Failed as error:
            item = {"name": name, "ok": False, "seen": str(error), "fix": error.fix}
        self.items.append(item)
        if self.out:
            fix = "" if item["ok"] else f"\n       {item['fix']}"
            print(f"{'[OK]  ' if item['ok'] else '[FAIL]'} {name}: {item['seen']}{fix}", file=self.out, flush=True)
        return item["ok"]


def main() -> None:
    """Inspect every node, then train on all of them."""
    parser = Parser(__doc__)
    parser.add_argument("storage", type=local_path, help="the folder for training, on all nodes")
    parser.add_argument("--all", action="store_true", help="also kill a worker and keep GPUs busy; takes a minute more")
    parser.add_argument("--json", action="store_true", help="print the items as JSON, and nothing else")
    parser.add_argument("--nodes", type=positive_int, help="the expected number of nodes (default: any number)")
    parser.add_argument("--patience", type=positive_int, default=60, metavar="SECONDS",
        help="how long to wait for a node's first worker process, or for a rank (default: %(default)s)")  # fmt: skip
    args = parser.parse_args()
    if not os.path.isdir(args.storage):
        raise UsageError(f"{args.storage} is not a folder on this machine")
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".verify-", dir=args.storage, ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(f"cannot write to {args.storage}: {error.strerror}") from error

    def clean_up() -> None:
        cluster.stop_at_once()
        scratch.cleanup()

    # Not by KeyboardInterrupt: at its end the process would wait for the thread that trains.
    script.stop_on_signals(Worker(label="driver"), lambda: "run it again to check the cluster", clean_up)
    out = sys.stdout
    # Ray's output goes to standard error; standard output has only the items.
    with contextlib.redirect_stdout(sys.stderr), scratch as folder:
        use_gpu = cluster.start(1)
        checklist = Checklist(None if args.json else out)
        os.chmod(folder, 0o777)
        if check_nodes(checklist, args, Path(folder).name):
            check_training(checklist, args, folder, use_gpu)
        else:
            checklist.add("training", training_not_tried)
    failed = sum(not item["ok"] for item in checklist.items)
    summary = json.dumps(checklist.items, indent=1) if args.json else f"{len(checklist.items)} items, {failed} failed"
    print(summary, flush=True)
    cluster.stop_at_once()  # even if training hangs
    os._exit(1 if failed else 0)


def training_not_tried() -> str:
    """Fail without training: if nodes or storage do not work, it would hang, or fail for a known reason."""
    raise Failed("not tried", "first fix what failed above")


def check_nodes(checklist: Checklist, args: argparse.Namespace, name: str) -> bool:
    """Check the items that need no training, and return whether all passed."""
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    inspect = ray.remote(num_cpus=0, max_retries=0)(inspect_node)
    pinned = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in alive}
    requests = {inspect.options(scheduling_strategy=pinned[node]).remote(args.storage, name): node for node in alive}
    answered, silent = ray.wait(list(requests), num_returns=len(requests), timeout=args.patience)
    reports = {}
    for request in answered:
        try:
            reports[requests[request]] = ray.get(request)
        except ray.exceptions.RayError:  # the node has frozen or left meanwhile
            silent.append(request)
    names = {node: f"{alive[node]['NodeManagerAddress']} ({node[:8]})" for node in alive}

    def nodes() -> str:
        if silent:
            silent_nodes = ", ".join(names[requests[request]] for request in silent)
            waited = f"no worker answered in {args.patience} s"
            raise Failed(f"{waited} on {silent_nodes}", "check its raylet's log; stop it")
        if args.nodes and len(alive) != args.nodes:
            raise Failed(f"{len(alive)} of {args.nodes}", "`ray status`; on the missing one: can it reach the head?")
        return f"{len(alive)}, a worker process on each"

    def clocks() -> str:
        read_clock, wrong, at_most = ray.remote(num_cpus=0)(lambda: time.time()), [], 0.0
        for node in reports:
            for _ in range(2):  # the first answer may wait for a process to start; the second takes milliseconds
                sent = time.time()
                request = read_clock.options(scheduling_strategy=pinned[node]).remote()
                remote_time = ray.get(request, timeout=args.patience)
                received = time.time()
            at_least = max(sent - remote_time, remote_time - received)
            at_most = max(at_most, received - remote_time, remote_time - sent)
            if at_least > CLOCKS_S:
                wrong.append(f"at least {at_least:.1f} s from this one on {names[node]}")
        if wrong:
            raise Failed(", ".join(wrong), "run an NTP client (chrony) on all nodes")
        return f"all within {at_most:.2f} s of this one"

    def packages() -> str:
        here = versions()
        different = [
            f"{name} {found} on {names[node]}, but {here[name]} here"
            for node, report in reports.items()
            for name, found in report["versions"].items()
            if found != here[name]
        ]
        if different:
            raise Failed("; ".join(different), "the same image, or the same requirements.txt, on all nodes")
        return ", ".join(f"{name} {found}" for name, found in here.items())

    def disks() -> str:
        least, node = min((report["free_gb"], node) for node, report in reports.items())
        if least < FREE_GB:
            seen = f"{least:.1f} GB free in the temporary folder of {names[node]}"
            raise Failed(seen, "Ray spills objects there: free some space")
        return f"at least {least:.0f} GB free"

    def storage() -> str:
        written = os.listdir(Path(args.storage) / name)
        bad = [
            f"{names[node]}: {report['storage'] or 'its file is somewhere else'}"
            for node, report in reports.items()
            if report["storage"] or node not in written
        ]
        if bad:
            raise Failed(f"{args.storage} is not one folder: {', '.join(bad)}", "mount it on all nodes at this path")
        return f"every node can write to {args.storage}"

    def gpus() -> str:
        wrong = [
            f"{names[node]}: {report['gpus']} instead of {alive[node]['Resources'].get('GPU', 0):.0f}"
            for node, report in reports.items()
            if report["gpus"] < alive[node]["Resources"].get("GPU", 0)
        ]
        if wrong:
            raise Failed(", ".join(wrong), "driver and CUDA version of torch: `nvidia-smi`, torch.cuda.is_available()")
        total = ray.cluster_resources().get("GPU", 0)
        return f"{total:.0f} in Ray's resource accounting, visible to torch" if total else "none here"

    nodes_ok = checklist.add("nodes", nodes)
    checks = {"clocks": clocks, "packages": packages, "disks": disks, "storage": storage, "GPUs": gpus}
    return all([checklist.add(name, check) for name, check in checks.items() if reports]) and nodes_ok and bool(reports)


def check_training(checklist: Checklist, args: argparse.Namespace, folder: str, use_gpu: bool) -> None:
    """Check the items that need a short training."""
    kind = "GPU" if use_gpu else "CPU"
    eligible = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(kind, 0) >= 1]
    total = int(ray.cluster_resources().get(kind, 0))
    num_workers = total if use_gpu else max(len(eligible), min(2, total))
    placement = "STRICT_SPREAD" if num_workers == len(eligible) else "SPREAD"
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"kill": args.all, "busy": args.all},
        torch_config=workers.NodeTorchConfig(timeout_s=args.patience),
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers, use_gpu=use_gpu, placement_strategy=placement),
        run_config=ray.train.RunConfig(
            name=f"verify-{uuid.uuid4().hex[:8]}",
            storage_path=folder,
            failure_config=ray.train.FailureConfig(max_failures=1 if args.all else 0),
        ),
    )
    started = time.monotonic()
    fit = ThreadPoolExecutor(1).submit(trainer.fit)
    limit = (5 if args.all else 2) * args.patience

    def training() -> str:
        try:
            result = fit.result(timeout=limit)
        except TimeoutError:
            fix = "`ray status`: are others using the cluster? Is a port closed between the nodes?"
            raise Failed(f"not finished after {limit} s", fix) from None
        except ray.train.TrainingFailedError as error:
            reason = str(error).strip().splitlines()[-1]
            raise Failed(reason, "nodes on several networks: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME") from None
        nodes = len({findings["node"] for findings in result.return_value})
        if nodes < len(eligible):
            raise Failed(f"workers on {nodes} of {len(eligible)} nodes", "`ray status`: what uses the others?")
        return f"{num_workers} workers on {nodes} nodes, {STEPS} steps, in {time.monotonic() - started:.0f} s"

    def metrics() -> str:
        step = fit.result().metrics["step"]
        if step != STEPS:
            raise Failed(f"the driver received step {step} of {STEPS}", "check the controller's log")
        return f"{STEPS} reports, the last of step {step}"

    def weights() -> str:
        if len({findings["weights"] for findings in fit.result().return_value}) > 1:
            raise Failed("the workers' weights differ after training", "is the model wrapped by prepare_model?")
        return "equal on all workers to the last bit, from different initial weights"

    def all_reduce() -> str:
        ranks, sums = range(num_workers), [findings["rank_sum"] for findings in fit.result().return_value]
        if set(sums) != {float(sum(ranks))}:
            raise Failed(f"sums {sums} instead of {sum(ranks)}", "check the nodes' drivers, NCCL and memory")
        slowest = min(findings["mb_per_s"] for findings in fit.result().return_value)
        return f"the correct sum; {MEGABYTES} MiB at {slowest:.0f} MiB/s"

    def checkpoints() -> str:
        steps = {findings["read_step"] for findings in fit.result().return_value}
        if steps != {STEPS}:
            raise Failed(f"read steps {steps} instead of {STEPS}", "is the storage one folder, without a cache?")
        return "written by one worker, read by all"

    def recovery() -> str:
        resumed_from = fit.result().return_value[0]["resumed_from"]
        if resumed_from == 0:
            raise Failed("the workers started from scratch", "check the controller's log")
        return f"a worker was killed, and the others continued with a new one after step {resumed_from}"

    def busy() -> str:
        utilizations = [findings["utilization"] for findings in fit.result().return_value]
        if None in utilizations:
            raise Failed("not measured: NVML does not answer", "`nvidia-smi`; pip install nvidia-ml-py")
        if min(utilizations) < 80:
            raise Failed(f"{min(utilizations)} % busy in a matrix product", "who else uses it? `nvidia-smi`")
        return f"at least {min(utilizations)} % in a matrix product"

    if checklist.add("training", training):
        checks = {"metrics": metrics, "weights": weights, "all-reduce": all_reduce, "checkpoints": checkpoints}
        checks |= {"recovery": recovery} if args.all else {}
        checks |= {"GPUs busy": busy} if args.all and use_gpu else {}
        for name, check in checks.items():
            checklist.add(name, check)


if __name__ == "__main__":
    script.run_main(main)
