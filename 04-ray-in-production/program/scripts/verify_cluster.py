"""Is this Ray cluster fit for training? A checklist that runs: each item [OK], or [FAIL] with what to do.

    python scripts/verify_cluster.py /mnt/shared             within a minute
    python scripts/verify_cluster.py /mnt/shared --all       also: a killed worker is replaced, GPUs are kept busy
    python scripts/verify_cluster.py /mnt/shared --json      the same for machines

The folder is the storage that training is to use. Start it on a node of the cluster with RAY_ADDRESS=HEAD:6379, or
without RAY_ADDRESS on a Ray of its own on this machine. Exit code 1 where an item fails, 2 where nothing can be
checked.
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

os.environ.setdefault("RAY_LOG_TO_DRIVER", "0")  # what workers say when one is killed; read when ray is imported
import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shared import checkpoint, script
from shared.distributed import gather_objects
from shared.errors import UsageError
from shared.on_ray import cluster, workers
from shared.on_ray.storage import STATE_FILE, report
from shared.options import positive_int

PACKAGES = ("ray", "torch", "numpy", "pyarrow")
CLOCKS_S = 1.0  # two clocks may differ by so much: checkpoints are told apart by name, logs by time
FREE_GB = 5
MEGABYTES = 16  # of an all-reduce
STEPS, KILLED_AFTER = 6, 4


class Failed(Exception):
    """An item that is not as it has to be: what was seen, and what to do."""

    def __init__(self, seen: str, fix: str) -> None:
        super().__init__(seen)
        self.fix = fix


def look_around(storage: str, name: str) -> dict:
    """Runs on each node: what is it, and does it see the storage? Leaves a file there."""
    try:
        (Path(storage) / name / ray.get_runtime_context().get_node_id()).write_text(socket.gethostname())
        problem = None
    except OSError as error:
        problem = f"{error.strerror}: {error.filename}"
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "gpus": torch.cuda.device_count(),
        "free_gb": shutil.disk_usage(tempfile.gettempdir()).free / 1e9,
        "storage": problem,
    }


def train_worker(config: dict) -> list[dict]:
    """Runs on each worker: some steps of DDP, an all-reduce that is timed, a checkpoint; on a second try it goes on."""
    worker, first = workers.current_worker(), 0
    rank, device = worker.rank, worker.device
    torch.manual_seed(rank)  # DDP has to make them equal
    model = ray.train.torch.prepare_model(torch.nn.Linear(256, 256))
    if newest := ray.train.get_checkpoint():
        first = step_in(newest)
    for step in range(first + 1, STEPS + 1):
        loss = model(torch.randn(32, 256, device=device)).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        report({"progress": {"step": step}}, {"step": step}, worker)
        if config["kill"] and step == KILLED_AFTER and first == 0 and rank == worker.world_size - 1:
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

    step = step_in(ray.train.get_all_reported_checkpoints()[-1].checkpoint)  # written by rank 0, read by all
    busy = keep_busy(device, 5) if config["busy"] and device.type == "cuda" else None
    mine = {
        "node": ray.get_runtime_context().get_node_id(), "read_step": step, "first": first, "busy": busy,
        "weights": hashlib.sha256(weights.tobytes()).hexdigest(), "rank_sum": rank_sum, "mb_per_s": MEGABYTES / seconds,
    }  # fmt: skip
    return gather_objects(mine)


def step_in(stored: ray.train.Checkpoint) -> int:
    """The step in a checkpoint."""
    with stored.as_directory() as folder:
        return checkpoint.load(Path(folder) / STATE_FILE)["progress"]["step"]


def keep_busy(device: torch.device, seconds: float) -> int | None:
    """Multiply matrices; the GPU's use in percent after that time, None where NVML cannot be asked."""
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
    """The items, in their order, each printed as soon as it is known."""

    def __init__(self, out: TextIO | None) -> None:
        self.out, self.items = out, []

    def note(self, name: str, check: Callable[[], str]) -> bool:
        """Run a check, which returns what it has seen or raises Failed."""
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
    """Ask every node, then train on all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("storage", type=os.path.abspath, help="the folder that training is to use, on all nodes")
    parser.add_argument("--all", action="store_true", help="kill a worker too, and keep GPUs busy: a minute more")
    parser.add_argument("--json", action="store_true", help="print the items as JSON, and nothing else")
    parser.add_argument("--nodes", type=positive_int, help="how many nodes there should be (default: any number)")
    parser.add_argument("--patience", type=positive_int, default=60, metavar="SECONDS",
        help="how long a node's first worker process, or a rank, may let us wait (default: %(default)s)")  # fmt: skip
    args = parser.parse_args()
    if not os.path.isdir(args.storage):
        raise UsageError(f"{args.storage} is no folder on this machine")
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what Ray says; standard output holds the items alone
        use_gpu = cluster.start(1)
        checklist = Checklist(None if args.json else out)
        with tempfile.TemporaryDirectory(prefix=".verify-", dir=args.storage, ignore_cleanup_errors=True) as folder:
            os.chmod(folder, 0o777)
            if ask_nodes(checklist, args, Path(folder).name):
                train(checklist, args, folder, use_gpu)
            else:
                checklist.note("training", not_tried)
    failed = sum(not item["ok"] for item in checklist.items)
    words = json.dumps(checklist.items, indent=1) if args.json else f"{len(checklist.items)} items, {failed} failed"
    print(words, flush=True)
    cluster.stop_at_once()  # also where a training hangs
    os._exit(1 if failed else 0)


def not_tried() -> str:
    """Without sound nodes and a storage it would only hang, or fail for a reason that is known."""
    raise Failed("not tried", "mend what failed above first")


def ask_nodes(checklist: Checklist, args: argparse.Namespace, name: str) -> bool:
    """The items that need no training. Whether it makes sense to go on."""
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    look = ray.remote(num_cpus=0, max_retries=0)(look_around)
    on = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in alive}
    asked = {look.options(scheduling_strategy=on[node]).remote(args.storage, name): node for node in alive}
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=args.patience)
    seen = {}
    for each in answered:
        try:
            seen[asked[each]] = ray.get(each)
        except ray.exceptions.RayError:  # the node has frozen or gone since
            silent.append(each)
    names = {node: f"{alive[node]['NodeManagerAddress']} ({node[:8]})" for node in alive}

    def nodes() -> str:
        if silent:
            silence = ", ".join(names[asked[each]] for each in silent)
            waited = f"no worker answered in {args.patience} s"
            raise Failed(f"{waited} on {silence}", "look into its raylet's log; stop it")
        if args.nodes and len(alive) != args.nodes:
            raise Failed(f"{len(alive)} of {args.nodes}", "`ray status`; on the missing one: can it reach the head?")
        return f"{len(alive)}, a worker process on each"

    def clocks() -> str:
        read, surely, at_most = ray.remote(num_cpus=0)(lambda: time.time()), 0.0, 0.0
        for node in seen:  # one after the other, by processes that have started: the answers take milliseconds
            sent = time.time()
            there = ray.get(read.options(scheduling_strategy=on[node]).remote(), timeout=args.patience)
            got = time.time()
            surely = max(surely, sent - there, there - got)
            at_most = max(at_most, got - there, there - sent)
        if surely > CLOCKS_S:
            raise Failed(f"a clock is wrong by {surely:.1f} s or more", "run an NTP client (chrony) on all nodes")
        return f"none is farther than {at_most:.2f} s from this one"

    def packages() -> str:
        kinds = {json.dumps([each["python"], each["packages"]]) for each in seen.values()}
        if len(kinds) > 1:
            raise Failed(" / ".join(sorted(kinds)), "the same image, or the same requirements.txt, on all nodes")
        here = next(iter(seen.values()))
        return f"Python {here['python']}, " + ", ".join(f"{name} {number}" for name, number in here["packages"].items())

    def disks() -> str:
        least = min(each["free_gb"] for each in seen.values())
        if least < FREE_GB:
            raise Failed(f"{least:.1f} GB free in a temporary folder", "Ray spills objects there: make room")
        return f"at least {least:.0f} GB free"

    def storage() -> str:
        bad = [f"{names[node]} ({each['storage']})" for node, each in seen.items() if each["storage"]]
        found = len(os.listdir(Path(args.storage) / name))
        if bad or found != len(seen):
            missing = ", ".join(bad) or f"{len(seen) - found} nodes wrote somewhere else"
            raise Failed(f"{args.storage} is not one folder: {missing}", "mount it on all nodes at this path")
        return f"{args.storage} is written by every node"

    def gpus() -> str:
        wrong = [
            f"{names[node]}: {each['gpus']} instead of {alive[node]['Resources'].get('GPU', 0):.0f}"
            for node, each in seen.items()
            if each["gpus"] < alive[node]["Resources"].get("GPU", 0)
        ]
        if wrong:
            raise Failed(", ".join(wrong), "driver and CUDA version of torch: `nvidia-smi`, torch.cuda.is_available()")
        total = ray.cluster_resources().get("GPU", 0)
        return f"{total:.0f} in Ray's books, seen by torch" if total else "none here"

    fine = checklist.note("nodes", nodes)
    checks = {"clocks": clocks, "packages": packages, "disks": disks, "storage": storage, "GPUs": gpus}
    return all([checklist.note(name, check) for name, check in checks.items() if seen]) and fine and bool(seen)


def train(checklist: Checklist, args: argparse.Namespace, folder: str, use_gpu: bool) -> None:
    """The items that a short training shows."""
    kind = "GPU" if use_gpu else "CPU"
    able = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(kind, 0) >= 1]
    total = int(ray.cluster_resources().get(kind, 0))
    num_workers = total if use_gpu else max(len(able), min(2, total))
    spread = "STRICT_SPREAD" if num_workers == len(able) else "SPREAD"
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"kill": args.all, "busy": args.all},
        torch_config=TorchConfig(timeout_s=args.patience),
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers, use_gpu=use_gpu, placement_strategy=spread),
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
            raise Failed(f"no end after {limit} s", fix) from None
        except ray.train.TrainingFailedError as error:
            reason = str(error).strip().splitlines()[-1]
            raise Failed(reason, "nodes on several networks: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME") from None
        nodes = len({each["node"] for each in result.return_value})
        if nodes < len(able):
            raise Failed(f"workers on {nodes} of {len(able)} nodes", "`ray status`: what uses the others?")
        return f"{num_workers} workers on {nodes} nodes, {STEPS} steps, in {time.monotonic() - started:.0f} s"

    def metrics() -> str:
        step = fit.result().metrics["step"]
        if step != STEPS:
            raise Failed(f"the driver was told of step {step} of {STEPS}", "look into the controller's log")
        return f"{STEPS} reports, the last of step {step}"

    def weights() -> str:
        if len({each["weights"] for each in fit.result().return_value}) > 1:
            raise Failed("the workers' weights differ after training", "is the model wrapped by prepare_model?")
        return "equal on all workers to the last bit, though they began with different ones"

    def all_reduce() -> str:
        ranks, sums = range(num_workers), [each["rank_sum"] for each in fit.result().return_value]
        if set(sums) != {float(sum(ranks))}:
            raise Failed(f"sums {sums} instead of {sum(ranks)}", "drivers, NCCL, and memory of the nodes")
        slowest = min(each["mb_per_s"] for each in fit.result().return_value)
        return f"the right sum; {MEGABYTES} MiB at {slowest:.0f} MiB/s"

    def checkpoints() -> str:
        steps = {each["read_step"] for each in fit.result().return_value}
        if steps != {STEPS}:
            raise Failed(f"read steps {steps} instead of {STEPS}", "is the storage one folder, without a cache?")
        return "written by one worker, read by all"

    def recovery() -> str:
        first = fit.result().return_value[0]["first"]
        if first == 0:
            raise Failed("the workers began anew", "look into the controller's log")
        return f"a worker was killed, and the others went on with a new one after step {first}"

    def busy() -> str:
        used = [each["busy"] for each in fit.result().return_value]
        if None in used:
            raise Failed("not measured: NVML does not answer", "`nvidia-smi`; pip install nvidia-ml-py")
        if min(used) < 80:
            raise Failed(f"{min(used)} % busy in a matrix product", "who else uses it? `nvidia-smi`")
        return f"at least {min(used)} % in a matrix product"

    if checklist.note("training", training):
        checks = {"metrics": metrics, "weights": weights, "all-reduce": all_reduce, "checkpoints": checkpoints}
        checks |= {"recovery": recovery} if args.all else {}
        checks |= {"GPUs busy": busy} if args.all and use_gpu else {}
        for name, check in checks.items():
            checklist.note(name, check)


if __name__ == "__main__":
    script.run_main(main)
