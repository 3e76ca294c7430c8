"""Training scripts as a user starts them, or forked: real processes, their output, metrics; for several test files."""

import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import uuid
from multiprocessing.synchronize import Barrier
from pathlib import Path

import psutil
import pytest
import small_runs
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shared.running.script import run_main

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LIMIT = 900  # seconds; what hangs is ended and fails. A busy machine must not reach it


def below(process: psutil.Process, command: str) -> list[psutil.Process]:
    """The processes that descend from `process`, and whose command line begins with this pattern."""
    found = []
    for each in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # ended since
            if re.match(command, " ".join(each.cmdline())):
                found.append(each)
    return found


class Run:
    """One start of a script with its own session: `nproc` 0 is plain python, else torchrun."""

    script = ROOT / "01-ddp-pytorch-only/train_ddp.py"

    def __init__(
        self, nproc: int, folder: Path, *args: object, torchrun: tuple[str, ...] = (), script: Path | None = None
    ) -> None:
        self.metrics_file = folder / "metrics.jsonl"
        start = [sys.executable] if nproc == 0 else [*TORCHRUN, "--nproc-per-node", str(nproc), *torchrun]
        options = ["--storage-path", folder, "--metrics-out", self.metrics_file]
        command = [*start, script or self.script, *options, *args]
        self.output = folder / f"output-{time.monotonic_ns()}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                [str(word) for word in command], stdout=file, stderr=file, env=environment, cwd=folder,
                start_new_session=True,
            )  # fmt: skip

    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.killpg(self.process.pid, number)

    def ray_processes(self, actor: str) -> list[psutil.Process]:
        """The processes of this run's Ray actors of this class, in a Ray of its own or in that of the tests."""
        started = psutil.Process(self.process.pid).create_time()
        return [each for each in below(psutil.Process(), f"ray::{actor}") if each.create_time() > started]

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def finish(self) -> int:
        """Wait for the end; the exit code. A hang fails the test, with the output so far."""
        try:
            return self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            for child in self.descendants():
                child.kill()
            self.kill()
            raise AssertionError(f"no end after {LIMIT} s:\n{self.text}") from None

    def wait_for(self, folder: Path, pattern: str) -> Path:
        """Wait until something in `folder` matches `pattern`."""
        deadline = time.monotonic() + LIMIT
        while not (found := list(folder.glob(pattern))):
            assert self.is_running() and time.monotonic() < deadline, self.text
            time.sleep(0.02)
        return found[0]

    def wait_for_epoch(self, epoch: int) -> None:
        """Wait until this epoch is reported and its checkpoint stored, and then well into the next one."""
        self.wait_for(self.metrics_file.parent, "metrics.jsonl")  # empty at first
        deadline = time.monotonic() + LIMIT
        while len(self.metrics()) < epoch:
            assert self.is_running() and time.monotonic() < deadline, self.text
            time.sleep(0.05)
        time.sleep(0.1)

    @property
    def text(self) -> str:
        return self.output.read_text()

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in self.metrics_file.read_text().splitlines()]


# Processes that have imported already what a training script imports: for tests in which the start is not what is
# tested. They are real ones, forked from a server that has done nothing else; its agent and its group are torchrun's.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    "torch._dynamo", "torch.distributed.fsdp", "torchvision", "sklearn.datasets", "deepspeed", "ray.train.torch",
    "ray.data", "shared.running.options", "shared.running.script", "shared.on_ray.workers", "shared.on_ray.cluster",
    "shared.measure", "runs", "frozen",
])  # fmt: skip


def run_script(script: Path, *args: str) -> None:
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def run_rank(all_forked: Barrier, script: Path, *args: str) -> None:
    """One of the agent's ranks: it connects to the agent's store when all others have been forked.

    For a rank that comes, a thread of the store looks up the name of its host, under a lock of the C library. A rank
    forked at that moment would find the lock taken, and nobody left to give it back.

    After a fork torch makes a new thread pool when it is first asked for one. FSDP2's first backward pass starts eight
    threads that ask at once, and one of them may find none ("Invalid thread pool!", torch 2.15). So it is made here.
    """
    all_forked.wait()
    torch.set_num_threads(1)
    run_script(script, *args)


def start_script(
    nproc: int, script: Path, folder: Path, output: Path, environment: dict, torchrun: dict, *args: str
) -> None:  # fmt: skip
    """What Run starts, in this process: its session, output, environment, and `nproc` ranks (0: no group)."""
    os.setsid()
    os.chdir(folder)
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if nproc == 0:
        return run_script(script, *args)
    config = {
        "min_nodes": 1, "max_nodes": 1, "nproc_per_node": nproc, "run_id": uuid.uuid4().hex, "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0", "max_restarts": 0, "start_method": "fork", **torchrun,
    }  # fmt: skip
    all_forked = multiprocessing.get_context(config["start_method"]).Barrier(nproc)
    return elastic_launch(LaunchConfig(**config), run_rank)(all_forked, script, *args)


class Fork(Run):
    """The same from processes that have imported already, without torchrun's command line.

    torchrun: its options, as fields of LaunchConfig.
    """

    def __init__(
        self, nproc: int, folder: Path, *args: object, script: Path | None = None, trains: bool = True,
        **torchrun: object,
    ) -> None:  # fmt: skip
        self.metrics_file, self.output = folder / "metrics.jsonl", folder / f"output-{time.monotonic_ns()}"
        self.started = script or self.script
        options = [*(["--storage-path", folder, "--metrics-out", self.metrics_file] if trains else []), *args]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = FORKS.Process(
            target=start_script, args=(nproc, self.started, folder, self.output, environment, torchrun,
            *map(str, options)),
        )  # fmt: skip
        self.process.start()

    def is_running(self) -> bool:
        return self.process.is_alive()

    def finish(self) -> int:
        self.process.join(LIMIT)
        if self.process.is_alive():
            self.kill()
            raise AssertionError(f"no end after {LIMIT} s:\n{self.text}")
        return self.process.exitcode


def train(nproc: int, folder: Path, *args: object, script: Path | None = None) -> list[dict]:
    """Run to a good end; the metrics."""
    run = Fork(nproc, folder, *args, script=script)
    assert run.finish() == 0, run.text
    return run.metrics()


def assert_same_losses(one: list[dict], other: list[dict], tolerance: float = 1e-9) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert len(a["step_losses"]) == len(b["step_losses"])
        assert a["step_losses"] == pytest.approx(b["step_losses"], abs=tolerance)
        assert a["train_loss"] == pytest.approx(b["train_loss"], abs=tolerance)
        assert a["val_loss"] == pytest.approx(b["val_loss"], abs=tolerance)
        assert a["val_accuracy"] == b["val_accuracy"]
        assert a["samples_seen"] == b["samples_seen"]


def assert_bit_for_bit(metrics: list[dict], reference: list[dict]) -> None:
    """All metrics except the throughput."""
    one, other = ([{**line, "samples_per_second": None} for line in lines] for lines in (metrics, reference))
    assert one == other


def assert_on_record(name: str, metrics: list[dict]) -> None:
    """The losses of one of the small runs are those of small_runs.json within 1e-9.

    torch draws initial weights by vector instructions, and rounds them differently where a CPU has neither AVX2 nor
    AVX-512: there 1e-8 in the first loss becomes 4e-5 in the eighth.
    """
    vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    recorded = json.loads(small_runs.RECORD.read_text())["step_losses"][name]
    assert small_runs.step_losses(metrics) == pytest.approx(recorded, abs=1e-9 if vectors else 1e-3)


def assert_same_state(seen: Path, expected: Path) -> None:
    """The whole states in two files, bit for bit: weights, optimizer, generators."""
    seen, expected = (torch.load(path, weights_only=True) for path in (seen, expected))
    assert all(torch.equal(seen["model"][key], expected["model"][key]) for key in expected["model"])
    for number, moments in expected["optimizer"]["state"].items():
        assert all(torch.equal(seen["optimizer"]["state"][number][key], value) for key, value in moments.items())
    assert all(torch.equal(a["torch"], b["torch"]) for a, b in zip(seen["random"], expected["random"], strict=True))


def has_traceback(text: str) -> bool:
    """Whether a traceback goes through code of the project. (Of its own delays Ray warns with tracebacks too.)"""
    return re.search(r'File "[^"]*/(shared|training|0\d-[^"/]*)/\w+\.py"', text) is not None


def refused(nproc: int, folder: Path, *args: object, script: Path | None = None) -> str:
    """The one error line of a start that must be refused."""
    run = Fork(nproc, folder, *args, script=script)
    code = run.finish()
    # torchrun ends with 1 whatever its script's exit code was, and reports that code.
    assert code == (2 if nproc == 0 else 1), run.text
    if nproc:
        assert "exitcode  : 2" in run.text
    lines = [line for line in run.text.splitlines() if line.startswith(f"{(script or run.script).name}: error:")]
    assert len(lines) == 1, run.text
    if nproc == 0:
        assert "Traceback" not in run.text
    return lines[0]


def refused_here(script: Path, *args: object) -> str:
    """The one error line of a start that must be refused, in this process: it spares the seconds of its imports."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as errors:
        patch.setattr(sys, "argv", [str(script), *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            run_main(module.main)
    assert caught.value.code == 2
    (line,) = errors.getvalue().splitlines()
    assert line.startswith(f"{script.name}: error: ")
    return line


def assert_resumes_on_one_worker(
    run: Fork, folder: Path, options: tuple, after: int, tolerance: float, undisturbed: list[dict] | None = None
) -> None:  # fmt: skip
    """One Ray worker skips the newest sharded checkpoint of two, which is damaged here, and continues `after` a step.

    run: of two workers, in `folder`/run, damaged in its second epoch. undisturbed: the metrics of a run with these
    options; by default those of `run`. Its schedule shows only if it halves the learning rate after that step.
    """
    before = undisturbed or run.metrics()
    damaged = sorted((folder / "run").glob("checkpoint-*"))[-1]
    shard = max(damaged.rglob("*"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-1])
    again = Fork(0, folder, *options, "--num-workers", 1, "--resume", "--lr-step-size", 3, script=run.started)
    assert again.finish() == 0, again.text
    note = "note: lr_step_size 3 is ignored: optimizer and schedule are restored; the run was started with 2"
    assert note in again.text
    assert f"skipped {damaged.name} (truncated" in again.text
    assert f"continuing after step {after}" in again.text
    assert again.metrics()[0]["step_losses"] == run.metrics()[0]["step_losses"]  # as the checkpoint has it
    assert len(again.metrics()) == len(before)
    for line, expected in zip(again.metrics(), before, strict=True):
        assert line["step_losses"] == pytest.approx(expected["step_losses"], rel=tolerance)
