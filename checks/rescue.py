"""Exercise 4.5a on real machines: a cluster with a sick machine, and what becomes of an answer there."""

import contextlib
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ray
import torch

from checks.machinery import Wrong
from checks.machines import Machines
from shared import checkpoint, datasets
from shared.on_ray import cluster

ROOT = Path(__file__).parents[1]
VERIFY = ROOT / "04-ray-in-production/program/scripts/verify_cluster.py"
JOB = ROOT / "04-ray-in-production/job"
NAMES, LAST_STEP = ("head", "a", "b"), 20


@dataclass(frozen=True)
class SickCluster:
    """Three machines, one of them sick, what verify_cluster.py says of them, and a laptop that sends jobs."""

    machines: Machines
    sick: str
    items: list[dict]
    laptop: Path


@dataclass(frozen=True)
class Rescued:
    """An answer, its job's command, and what became of the job: lines printed, losses in the run's folder."""

    sick: str
    named: str
    lines: list[str]
    losses: dict[int, float]
    expected: dict[int, float]
    saved_step: int
    command: str
    last_step: int = LAST_STEP


def draw_illness() -> tuple[str, dict]:
    """Draw which machine is sick, and from what."""
    draw = random.SystemRandom()
    minutes = draw.choice((-1, 1)) * draw.randint(2, 50)
    name, major = draw.choice((("torch", 2), ("numpy", 2), ("pyarrow", 19)))
    package = name, f"{major}.{draw.randint(0, 3)}.{draw.randint(0, 9)}"  # older than this environment's
    return draw.choice(NAMES[1:]), draw.choice(({"clock_wrong_by_s": 60 * minutes}, {"package": package}))


@contextlib.contextmanager
def sick_cluster(illness: tuple[str, dict] | None = None) -> Iterator[SickCluster]:
    """Start three machines, one of them sick, and check them."""
    sick, how = illness or draw_illness()
    token = os.environ.get("RAY_AUTH_TOKEN_PATH") if os.environ.get("RAY_AUTH_MODE") == "token" else None
    with Machines(token and Path(token)) as machines, tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            machines.start(name, **(how if name == sick else {}))
        laptop = Path(folder, "laptop")
        shutil.copytree(JOB, laptop / "job")
        (laptop / "shared").symlink_to(ROOT / "shared")
        (images, labels) = datasets.digits().train.tensors
        torch.save((images.flatten(1).double(), labels), laptop / "job/digits.pt")
        command = [sys.executable, VERIFY, folder, "--json", "--patience", "300"]
        variables = {**os.environ, "RAY_ADDRESS": machines.address}
        said = subprocess.run(command, env=variables, capture_output=True, text=True)
        if said.returncode == 2:
            raise RuntimeError(f"verify_cluster.py could not check: {said.stderr}")
        yield SickCluster(machines, sick, json.loads(said.stdout), laptop)


def one_process(laptop: Path, folder: Path, saved_step: int) -> dict[int, float]:
    """Take the job's steps in one process, save a checkpoint after `saved_step`, and return the losses of all steps."""
    images, labels = torch.load(laptop / "job/digits.pt")
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = {}
    for step in range(1, LAST_STEP + 1):
        batch = torch.arange(64 * step, 64 * (step + 1)) % len(images)
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
        if step == saved_step:
            checkpoint.save_atomically({"model": model.state_dict(), "step": step}, folder / "newest.pt")
    return losses


def try_rescue(rescue: Callable, sick: SickCluster) -> Rescued:
    """Ask for an answer on the sick cluster, and submit its job."""
    with tempfile.TemporaryDirectory() as storage:
        run = Path(storage, f"run-{secrets.token_hex(3)}")
        run.mkdir()
        saved_step = random.SystemRandom().randint(6, 14)
        expected = one_process(sick.laptop, run, saved_step)
        cluster.quiet_settings(own=False)
        ray.init(sick.machines.address, logging_config=ray.LoggingConfig(log_level="ERROR"), log_to_driver=False)
        try:
            answer = rescue([dict(item) for item in sick.items], sick.laptop, Path(storage))
        finally:
            ray.shutdown()
        try:
            named, job = answer["sick"], dict(answer["job"])
            command = job.pop("command")
        except (KeyError, TypeError, ValueError):
            raise Wrong(f"return {{'sick': ..., 'job': {{'command': ..., ...}}}}; yours is {answer!r}") from None
        if unknown := sorted(set(job) - {"working_dir", "py_modules"}):
            raise Wrong(f"a job has a command, a working_dir and py_modules; yours has {unknown[0]!r} too")
        lines = []
        if named == sick.sick:
            lines = sick.machines.submit(command, **job).lines
        losses = json.loads((run / "losses.json").read_text()) if (run / "losses.json").exists() else {}
        losses = {int(step): loss for step, loss in losses.items()}
        return Rescued(sick.sick, named, lines, losses, expected, saved_step, command)
