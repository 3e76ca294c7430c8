"""Run training commands, record what their processes do, and draw it: the helpers of lesson 2.2."""

import contextlib
import io
import linecache
import os
import pdb
import re
import shlex
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
import psutil
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from shared import plots

STAGES = {  # of a Ray Train job -> the moment at which each ends
    "driver's imports": "ray_created",
    "start Ray": "ray_started",
    "start the controller": "workers_created",
    "start the workers": "training",
    "steps, validation": "epoch_ended",
    "end": "ended",
}


@dataclass
class Launch:
    """What a command did. Moments are seconds since 1970, as `time.time` gives them."""

    started: float
    ended: float = 0.0
    ray_started: float = 0.0  # when the script said that Ray had started
    training: float = 0.0  # when the ranks were about to take their first step
    epoch_ended: float = 0.0
    processes: dict[int, tuple[float, str]] = field(default_factory=dict)  # pid -> created, command line
    dumps: dict[int, str] = field(default_factory=dict)  # pid of a Ray worker -> what py-spy printed

    @property
    def ray_created(self) -> float:
        """When the first process of Ray was created: the one that keeps the list of machines."""
        return self.created("gcs_server")

    @property
    def workers_created(self) -> float:
        """When the first of Ray Train's workers was created."""
        return self.created("RayTrainWorker")

    def created(self, word: str) -> float:
        """Return when the first process with this word in its command line was created."""
        return min(moment for moment, command in self.processes.values() if word in command)

    def names(self) -> list[str]:
        """Return the processes' names, oldest first. A process of Python is named after its script."""
        names = []
        for _, command in sorted(self.processes.values()):
            program, *words = command.split() or ["?"]
            if Path(program).name.startswith("python"):
                program = next((word for word in words if not word.startswith("-")), program)
            names.append(Path(program).name)
        return names

    def workers(self) -> list[int]:
        """Return the process ids of Ray Train's workers."""
        return sorted(pid for pid, (_, command) in self.processes.items() if "RayTrainWorker" in command)

    def moments(self) -> list[float]:
        """Return the start of a Ray Train job and the end of each of its stages."""
        return [self.started, *(getattr(self, moment) for moment in STAGES.values())]

    def logs(self) -> Path:
        """Return the folder in which Ray keeps the logs of this job."""
        commands = " ".join(command for _, command in self.processes.values())
        return Path(re.search(r"--session[-_]dir=(\S+)", commands)[1], "logs")

    def places(self, pid: int, script: str) -> list[str]:
        """Return a worker's calls in `script`, each with its line of source, or the whole dump if there are none.

        The innermost call comes first.
        """
        threads = self.dumps[pid].split("\nThread ")
        training = "".join(thread for thread in threads if "TrainingThread" in thread)
        calls = re.finditer(rf"^.*\b{re.escape(script)}:(\d+)\)", training, re.MULTILINE)
        lines = [(call[0], linecache.getline(script, int(call[1]))) for call in calls]
        places = [f"{call:42} {textwrap.shorten(line, 70, placeholder=' ...')}" for call, line in lines]
        return places or [self.dumps[pid].strip()]


def run(command: str, about_to_train: Callable[[], bool] | None = None, limit_s: float = 800) -> Launch:
    """Run a command, print its lines with the seconds since its start, and return what was recorded.

    about_to_train: once it returns true, a thread records the job's processes and dumps the stacks of Ray's workers.
    Raises RuntimeError if the command fails. A command that takes longer than `limit_s` is killed.
    """
    launch = Launch(started=time.time())
    job = subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    limit = threading.Timer(limit_s, job.kill)
    limit.start()
    observer = threading.Thread(target=observe, args=(launch, job, about_to_train or (lambda: True)))
    observer.start()
    for line in job.stdout:
        print(f"{time.time() - launch.started:5.1f} s  {line}", end="")
        if "started Ray" in line:
            launch.ray_started = time.time()
        if "val_loss" in line:  # rank 0 prints the epoch's metrics
            launch.epoch_ended = time.time()
    job.wait()
    launch.ended = time.time()
    launch.epoch_ended = launch.epoch_ended or launch.ended
    limit.cancel()
    observer.join()
    if job.returncode != 0:
        raise RuntimeError(f"this command failed: {command}")
    return launch


def observe(launch: Launch, job: subprocess.Popen, about_to_train: Callable[[], bool]) -> None:
    """Wait until the job is about to train, then record its processes, and the stacks of Ray's workers."""
    while not about_to_train() and job.poll() is None:
        time.sleep(0.05)
    launch.training = time.time()
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        # Linux gives the boot time in whole seconds, so psutil's times are off by up to a second.
        # We know when the job itself started, and shift them by as much.
        correction = launch.started - processes[0].create_time()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                created = process.create_time() + correction
                launch.processes[process.pid] = (created, " ".join(process.cmdline()))
    plain = {**os.environ, "CLICOLOR_FORCE": "0"}  # Jupyter sets it to 1, and we want no colors
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": plain}
    dumps = {pid: subprocess.Popen(["py-spy", "dump", "--pid", str(pid)], **options) for pid in launch.workers()}
    launch.dumps = {pid: dump.communicate()[0] for pid, dump in dumps.items()}


@contextlib.contextmanager
def typing_into_debugger(*commands: str) -> Iterator[None]:
    """Make `breakpoint()` open Python's debugger with these commands typed into it, and print them as they are read."""

    class Keyboard(io.StringIO):
        def readline(self, *size: int) -> str:
            line = super().readline(*size)
            print(line, end="")
            return line

    usual = sys.breakpointhook
    keyboard = Keyboard("".join(f"{command}\n" for command in commands))
    sys.breakpointhook = pdb.Pdb(stdin=keyboard, stdout=sys.stdout).set_trace
    try:
        yield
    finally:
        sys.breakpointhook = usual


def draw_losses(losses: Mapping[str, Sequence[float]], reference: str, tolerance: float) -> None:
    """Draw every run's losses, and below them how far each run is from the reference at each step.

    The last run is drawn in red. A difference of exactly 0 is drawn at 1e-17.
    """
    _, (above, below) = plt.subplots(2, 1, figsize=(7, 5.4), sharex=True, layout="constrained")
    *usual, red = (*plots.COLORS[:4], plots.COLORS[5], plots.COLORS[4])
    for number, (name, values) in enumerate(losses.items()):
        steps, is_last = range(1, len(values) + 1), number == len(losses) - 1
        style = {"color": red if is_last else usual[number % len(usual)], "label": name}
        dashes = "-" if number == 0 or is_last else (0, (2 + 2 * number, 2))
        above.plot(steps, values, linestyle=dashes, linewidth=2 if is_last else 3 - 0.4 * number, **style)
        if name != reference:
            distances = [max(abs(a - b), 1e-17) for a, b in zip(values, losses[reference], strict=False)]
            # Larger hollow markers for earlier runs keep equal lines visible.
            size, face = (5, red) if is_last else (13 - 2.5 * number, "none")
            below.plot(steps[: len(distances)], distances, linewidth=2 if is_last else 1.2, marker="osD^v"[number % 5],
                       markersize=size, markerfacecolor=face, **style)  # fmt: skip
    below.axhline(tolerance, color="black", linestyle="--", linewidth=1)
    below.text(1, 2 * tolerance, f"tolerance: {tolerance:.0e}".replace("e-0", "e-"), va="bottom", fontsize=11)
    below.set(yscale="log", ylim=(1e-18, 30))
    below.set_yticks([1e-17, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 1], ["equal", *(f"1e{n}" for n in range(-15, 0, 3)), "1"])
    below.set_xlabel("step", fontsize=11)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    above.set_title("The loss of every step", loc="left", fontsize=12)
    below.set_title(f'How far each run is from "{reference}"', loc="left", fontsize=12)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.tick_params(labelsize=11)
    above.legend(frameon=False, fontsize=11, ncols=2)


def draw_stages(ray: Launch, torchrun: Launch) -> Axes:
    """Draw the stages of a Ray Train job under those of a torchrun job, each with its seconds."""
    start = torchrun.started
    rows = [
        ("torchrun: start", 0.0, torchrun.training - start, plots.COLORS[0]),
        ("steps, validation", torchrun.training - start, torchrun.epoch_ended - start, plots.COLORS[5]),
        ("end", torchrun.epoch_ended - start, torchrun.ended - start, plots.COLORS[0]),
    ]
    moments = [moment - ray.started for moment in ray.moments()]
    for stage, begin, end in zip(STAGES, moments, moments[1:], strict=False):
        color = plots.COLORS[5] if "steps" in stage else plots.COLORS[1]
        rows.append((("Ray Train: " if begin == 0 else "") + stage, begin, end, color))
    axes = plots.new_axes("From the command to the prompt", "seconds since the command", size=(7, 4.2))
    for row, (_, begin, end, color) in enumerate(rows):
        axes.barh(row, end - begin, left=begin, color=color, height=0.66)
        axes.text(end + 0.01 * moments[-1], row, f"{end - begin:.1f} s", va="center", fontsize=11)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.tick_params(labelsize=11)
    axes.xaxis.label.set_fontsize(11)
    axes.set_xlim(0, 1.15 * max(moments[-1], torchrun.ended - start))
    axes.axhline(2.5, color="black", linewidth=0.6)
    axes.grid(visible=False)
    axes.invert_yaxis()
    return axes
