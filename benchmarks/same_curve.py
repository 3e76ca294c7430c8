"""Start the same training run in five ways and plot the losses over each other. Makes the figure in README.md.

    python benchmarks/same_curve.py [--out FOLDER]

The runs: one process, two processes, four processes, two Ray workers, and two processes of which one is killed midway.
All use float64, with train_ddp.py and train_ray_ddp.py as they are. Writes same-curve.svg and same-curve.json, and
fails if a loss differs by more than 1e-9 from that of one process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import matplotlib.pyplot as plt
import psutil
from matplotlib.ticker import MaxNLocator
from measuring import machine

from shared import plots

ROOT = Path(__file__).parents[1]
DDP, RAY = ROOT / "01-ddp-pytorch-only/train_ddp.py", ROOT / "02-ddp-pytorch-ray/train_ray_ddp.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", "--nproc-per-node"]
RUNS = {
    "one process": [sys.executable, DDP],
    "torchrun, 2 processes": [*TORCHRUN, "2", DDP],
    "torchrun, 4 processes": [*TORCHRUN, "4", DDP],
    "Ray Train, 2 processes": [sys.executable, RAY, "--num-workers", "2"],
    "torchrun, 2 processes, one is killed": [*TORCHRUN, "2", DDP, "--save-every-steps", "5"],
}
OPTIONS = ["--epochs", "1", "--precision", "fp64", "--seed", "7", "--run-name", "run"]
KILLED_AFTER = 10  # steps; the last run loses a process as soon as the checkpoint of this step exists
TOLERANCE = 1e-9


def losses(command: list, folder: Path, kill: bool) -> list[float]:
    """Train, and return the loss of each step. Raises CalledProcessError if the run fails."""
    metrics = folder / "metrics.jsonl"
    command = [*map(str, command), *OPTIONS, "--storage-path", str(folder), "--metrics-out", str(metrics)]
    with open(folder / "output", "w") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    if kill:
        while process.poll() is None and not (folder / f"run/checkpoint-{KILLED_AFTER:08d}.pt").exists():
            time.sleep(0.02)
        psutil.Process(process.pid).children()[-1].kill()
    if code := process.wait():
        print((folder / "output").read_text(), file=sys.stderr)
        raise subprocess.CalledProcessError(code, command)
    assert not kill or "resuming from" in (folder / "output").read_text(), "the run did not resume"
    return [loss for line in metrics.read_text().splitlines() for loss in json.loads(line)["step_losses"]]


def draw(series: dict[str, list[float]], path: Path) -> None:
    """Plot the curves over each other; the legend gives each run's largest difference from the first one."""
    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    first = next(iter(series.values()))
    for number, (label, values) in enumerate(series.items()):
        furthest = max(abs(a - b) for a, b in zip(values, first, strict=True))
        label += f": differs by at most {furthest:.0e}" if number else ""
        style = "-" if number == 0 else (2 * number, (2, 2 * len(series) - 4))  # each has its own dashes
        width = 7 if number == 0 else 3
        steps = range(1, len(values) + 1)
        axes.plot(steps, values, color=plots.COLORS[number], linestyle=style, linewidth=width, label=label)
    axes.annotate(
        "one process is killed here,\nand the run resumes", (KILLED_AFTER, first[KILLED_AFTER - 1]), (2, 1.35),
        arrowprops={"arrowstyle": "->", "color": plots.COLORS[4]}, color=plots.COLORS[4], fontsize=12,
    )  # fmt: skip
    axes.set_title("One training run, started in five ways: one curve", loc="left", fontsize=14)
    axes.set_xlabel("step", fontsize=12)
    axes.set_ylabel("training loss", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.legend(frameon=False, fontsize=11, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plt.rcParams["svg.hashsalt"] = "same-curve"  # otherwise each drawing of the same data would differ
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="default: %(default)s")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    series = {}
    for label, command in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            series[label] = losses(command, Path(folder), kill="killed" in label)
        gap = max(abs(a - b) for a, b in zip(series[label], series["one process"], strict=True))
        print(f"{label:40} {len(series[label])} steps, at most {gap:.1e} from one process", flush=True)
        assert gap < TOLERANCE
    record = {"date": f"{date.today()}", **machine(quick=True), "ray": version("ray"), "step_losses": series}
    (out / "same-curve.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(series, out / "same-curve.svg")


if __name__ == "__main__":
    main()
