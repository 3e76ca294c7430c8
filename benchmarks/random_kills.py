"""Check that runs that are killed at random moments end with the losses of undisturbed runs. Covers all chapters.

    python benchmarks/random_kills.py --torchrun 30 --ray 10

Each trial draws a script, a victim and a moment from its number, so a trial can be repeated. Under torchrun it kills a
rank, which torchrun replaces, or the whole job. On Ray, on two nodes on this machine, it kills a worker or a node,
which Ray Train replaces, or the driver. It restarts a job or a driver with --resume. After each trial it appends a line
to results/random-kills-DEVICE.jsonl and rewrites the page next to it. When started again, it continues with the missing
trials.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch
from measuring import machine
from ray.cluster_utils import Cluster

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LOG_STEPS = ROOT / "04-ray-in-production/log_steps.py"
PROGRAM = ROOT / "04-ray-in-production/program"
DEVICE = machine(quick=True)["device"]
LIMIT_S = 900  # the longest wait
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
IMAGES = ("--model", "mlp", "--epochs", "8", "--save-every-steps", "7")
TEXT = ("--epochs", "2", "--max-steps", "40", "--save-every-steps", "7")
SMALL = (
    "dataset.vocab_size=200", "dataset.max_length=12", "model.embedding_dim=8", "model.hidden_dim=8",
    "training.epochs=3", "checkpoint.every_steps=7",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A script with its options, its launcher, and the allowed difference from the losses of an undisturbed run."""

    kind: str  # torchrun or ray
    script: str
    options: tuple[str, ...]
    steps: int
    tolerance: float = 0.0

    def command(self, folder: Path, resume: bool = False) -> list[str]:
        """Return the command that starts the script in `folder`, or resumes it."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
        launch = [sys.executable, *(torchrun if self.kind == "torchrun" else []), LOG_STEPS, ROOT / self.script]
        paths = ["--storage-path", folder, "--metrics-out", folder / "metrics.jsonl", "--run-name", "run"]
        if "program" in self.script:
            paths = ["--run-name", "run", "--config-dir", PROGRAM / "config"]
        return [str(word) for word in (*launch, *self.options, *paths, *["--resume"] * resume)]

    def losses(self, folder: Path) -> list[float]:
        """Read the losses of all steps of a finished run."""
        if "program" in self.script:
            lines = json.loads((folder / "logs/run/metrics.json").read_text())["epochs"]
        else:
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [loss for line in lines for loss in line["step_losses"]]


SUBJECTS = [
    Subject("torchrun", "01-ddp-pytorch-only/train_ddp.py", IMAGES, 160),
    Subject("torchrun", "01-ddp-pytorch-only/train_ddp.py", (*TEXT[:2], "--save-every-steps", "7"), 40),
    Subject("ray", "02-ddp-pytorch-ray/train_ray_ddp.py", IMAGES, 160),
    Subject("ray", "03-fsdp-deepspeed/train_ray_fsdp2.py", TEXT, 40),
    Subject("ray", "03-fsdp-deepspeed/train_ray_deepspeed.py", TEXT, 40),
    Subject("ray", "04-ray-in-production/program/src/training/distributed_training.py",
            tuple(word for change in SMALL for word in ("--set", change)), 120),
]  # fmt: skip
VICTIMS = {"torchrun": ("rank", "job"), "ray": ("worker", "node", "driver")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchrun", type=int, default=30, help="trials under torchrun (default: %(default)s)")
    parser.add_argument("--ray", type=int, default=10, help="trials on Ray (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="default: benchmarks/results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"random-kills-{re.sub('[^a-z0-9]+', '-', DEVICE.lower()).strip('-')}.jsonl"
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    undisturbed: dict[Subject, list[float]] = {}
    for kind, number in (("torchrun", args.torchrun), ("ray", args.ray)):
        missing = sorted({*range(number)} - {trial["number"] for trial in done if trial["kind"] == kind})
        with ray_nodes() if kind == "ray" and missing else contextlib.nullcontext() as nodes:
            for trial_number in missing:
                subjects = [subject for subject in SUBJECTS if subject.kind == kind]
                subject = subjects[trial_number % len(subjects)]
                done.append(run_trial(subject, trial_number, nodes, undisturbed))
                with open(path, "a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
                path.with_suffix(".md").write_text(report(done))
                print(describe(done[-1]), flush=True)
    print(f"\n{report(done)}\nwritten: {path} and .md")
    sys.exit(any(trial["losses_of_data"] for trial in done))


@contextlib.contextmanager
def ray_nodes() -> Iterator[Cluster]:
    """Run a Ray cluster on this machine: a head without CPUs and two nodes with one CPU each."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder  # otherwise this cluster would replace a running one in Ray's address file
        os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
        nodes = Cluster(
            initialize_head=True,
            head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False, "dashboard_port": None},
        )
        try:
            nodes.add_node(**NODE), nodes.add_node(**NODE)
            yield nodes
        finally:
            nodes.shutdown()


def run_trial(subject: Subject, number: int, nodes: Cluster | None, undisturbed: dict) -> dict:
    """Run a script, kill something once, and return a line of the result."""
    rng = random.Random(f"{subject.kind} {number}")
    victim = rng.choice(VICTIMS[subject.kind])
    kill_step, delay = rng.randrange(1, subject.steps), rng.random() / 5
    if subject not in undisturbed:
        with running(subject, nodes) as (folder, run):
            assert run.wait(LIMIT_S) == 0, (folder / "output").read_text()
            undisturbed[subject] = subject.losses(folder)
    expected = undisturbed[subject]
    with running(subject, nodes) as (folder, run):
        wait_until(lambda: len(read_steps(folder)) >= kill_step, run, folder)
        time.sleep(delay)
        before, kill_time = read_steps(folder), time.time()
        if ended := run.poll() is not None:
            victim = "none: it had ended"
        elif victim in ("job", "driver"):
            children = psutil.Process(run.pid).children(recursive=True)
            run.kill()
            for process in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            run.wait()
            psutil.wait_procs(find_processes("ray::RayTrainWorker"), timeout=LIMIT_S)
            run = start(subject, folder, nodes, resume=True)
        elif victim == "node":
            nodes.remove_node(rng.choice(sorted(nodes.worker_nodes, key=str)), allow_graceful=False)
            nodes.add_node(**NODE)
        else:
            name = "ray::RayTrainWorker" if victim == "worker" else str(ROOT / subject.script)
            rng.choice(find_processes(name, ancestor=run.pid if victim == "rank" else None)).kill()
        assert run.wait(LIMIT_S) == 0, (folder / "output").read_text()
        losses, after = subject.losses(folder), read_steps(folder)[len(before) :]
    # The surviving processes may take another step or two, so the kill caused the longest pause after it.
    moments = [(kill_time, before[-1][1]), *after]
    pauses = [(b[0] - a[0], a[1] - b[1] + 1) for a, b in itertools.pairwise(moments)]
    seconds, replayed = (0.0, 0) if ended or not pauses else max(pauses)
    difference = max((abs(a - b) for a, b in zip(losses, expected, strict=False)), default=0.0)
    return {
        "kind": subject.kind,
        "number": number,
        "date": time.strftime("%Y-%m-%d"),
        "script": Path(subject.script).name,
        "model": "ResNet-18" if subject is SUBJECTS[1] else "",
        "victim": victim,
        "killed_after_step": before[-1][1],
        "replayed_steps": replayed,
        "seconds_to_next_step": seconds,
        "largest_difference": difference,
        "losses_of_data": int(len(losses) != len(expected) or difference > subject.tolerance),
    }


@contextlib.contextmanager
def running(subject: Subject, nodes: Cluster | None) -> Iterator[tuple[Path, subprocess.Popen]]:
    """Start a run in a new folder, and yield both. At the end, remove the folder and kill the run's processes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        run = start(subject, folder, nodes)
        try:
            yield folder, run
        finally:
            for process in [child for child in psutil.Process().children() if child.is_running()]:
                if folder.as_posix() in " ".join(process.cmdline()):
                    process.kill()


def start(subject: Subject, folder: Path, nodes: Cluster | None, resume: bool = False) -> subprocess.Popen:
    """Start the script, with its output in the file `output`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STEPS_LOG": str(folder / "steps"), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"RAY_ADDRESS": nodes.address} if nodes else {}
    with open(folder / "output", "a") as output:
        return subprocess.Popen(
            subject.command(folder, resume), cwd=folder, env=environment, stdout=output, stderr=output
        )


def read_steps(folder: Path) -> list[tuple[float, int]]:
    """Return (time, step) of each step so far."""
    log = folder / "steps"
    lines = log.read_text().splitlines() if log.exists() else []
    return [(float(line.split()[0]), int(line.split()[1])) for line in lines]


def wait_until(reached: Callable[[], bool], run: subprocess.Popen, folder: Path) -> None:
    """Wait until `reached` returns true or the run has ended."""
    deadline = time.monotonic() + LIMIT_S
    while not reached() and run.poll() is None:
        assert time.monotonic() < deadline, (folder / "output").read_text()
        time.sleep(0.02)


def find_processes(name: str, ancestor: int | None = None) -> list[psutil.Process]:
    """Return the childless descendants of a process whose command line contains `name`. ancestor: default this one."""
    matches = []
    for process in psutil.Process(ancestor).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if name in " ".join(process.cmdline()) and not process.children():
                matches.append(process)
    return matches


def describe(trial: dict) -> str:
    """Describe a trial in one line."""
    return (
        f"{trial['kind']} {trial['number']}: {trial['script']}, {trial['victim']} killed after step "
        f"{trial['killed_after_step']}, {trial['replayed_steps']} replayed, next step after "
        f"{trial['seconds_to_next_step']:.1f} s, {'LOST' if trial['losses_of_data'] else 'nothing lost'}"
    )


def report(trials: list[dict]) -> str:
    """Render all trials as a Markdown page."""
    lost, dates = sum(trial["losses_of_data"] for trial in trials), sorted({trial["date"] for trial in trials})
    page = f"""# Runs killed at random on {DEVICE}, {" to ".join(dict.fromkeys([dates[0], dates[-1]]))}

torch {torch.__version__}. {len(trials)} runs of two processes, each killed once, at a step drawn at random; each saves
every seven steps. **{lost} of {len(trials)} ended with other losses than the undisturbed run**, compared bit for bit.
(`train_ray_ddp_with_ray_data.py`, which saves at the ends of epochs alone, is killed in `tests/test_train_ray.py`.)

| script | victim | runs | steps computed again, most and median | seconds to the next step, most and median | lost |
|---|---|---:|---:|---:|---:|
"""
    groups: dict[tuple, list[dict]] = {}
    for trial in trials:
        groups.setdefault((f"{trial['script']} {trial['model']}".strip(), trial["victim"]), []).append(trial)
    for (script, victim), group in sorted(groups.items()):
        replayed = [trial["replayed_steps"] for trial in group]
        seconds = [trial["seconds_to_next_step"] for trial in group]
        page += f"| {script} | {victim} | {len(group)} | {max(replayed)}, {median(replayed):.0f} "
        page += f"| {max(seconds):.0f}, {median(seconds):.0f} | {sum(trial['losses_of_data'] for trial in group)} |\n"
    return page


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
