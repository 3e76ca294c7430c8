"""Monitor a cluster and a run of the program on it, every 30 seconds or --once.

    python scripts/monitor_training.py /mnt/shared                      the newest run under /mnt/shared/logs
    python scripts/monitor_training.py /mnt/shared --run-name RUN --once

Prints the nodes and jobs of the cluster at RAY_API_SERVER_ADDRESS=http://HEAD:8265, if that is set. Prints the newest
log line of each rank and the run's checkpoints, and draws its curves with --curves FILE. It only reads the run's files,
so you can start it, stop it with Ctrl-C and start it again at any time, on any machine that sees them.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import matplotlib
from ray.job_submission import JobSubmissionClient
from ray.util.state import list_nodes

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from shared.paths import local_path

FIELDS = {"time", "node", "world_size", "step", "message"}  # of each line of a log
QUIET_S = 60  # a rank that has logged nothing for this long gets a warning


def main() -> None:
    """Read the options, then print the state at each interval."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "storage", type=local_path, help="the folder with the program's runs/ and logs/ (STORAGE of the job)"
    )
    parser.add_argument("--run-name", help="default: the run with the newest log line")
    parser.add_argument("--every", type=float, default=30, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--curves", type=local_path, metavar="FILE", help="draw loss and accuracy to FILE, as a PNG")
    parser.add_argument("--once", action="store_true", help="print once and exit, with code 1 if there is no run")
    options = parser.parse_args()
    storage = Path(options.storage)
    if not storage.is_dir():
        parser.error(f"{storage} is not a folder")
    if options.every <= 0:
        parser.error(f"--every {options.every:g}: must be above 0")
    while True:
        run = newest_run(storage / "logs") if options.run_name is None else options.run_name
        print(time.strftime("%Y-%m-%d %H:%M:%S"))
        print(*cluster_lines(), *run_lines(storage, run, options.curves), sep="\n", flush=True)
        if options.once:
            sys.exit(0 if run and (storage / "logs" / run).is_dir() else 1)
        print(flush=True)
        time.sleep(options.every)


def cluster_lines() -> list[str]:
    """Describe the cluster's nodes and its last five jobs, or why it cannot be queried."""
    address = os.environ.get("RAY_API_SERVER_ADDRESS")
    if not address:
        return ["cluster  not queried: RAY_API_SERVER_ADDRESS is not set"]
    try:
        nodes = list_nodes(address=address, timeout=60)
        jobs = JobSubmissionClient(address).list_jobs()
    except Exception as error:  # in any case the run's files can be read, and the cluster may answer next time
        return [f"cluster  {address} does not answer: {str(error).strip().splitlines()[0]}"]
    alive = [node for node in nodes if node.state == "ALIVE"]
    cpus, gpus = (sum(node.resources_total.get(name, 0) for node in alive) for name in ("CPU", "GPU"))
    lines = [f"nodes    {len(alive)} alive, {len(nodes) - len(alive)} lost: {cpus:.0f} CPUs, {gpus:.0f} GPUs"]
    for job in sorted((job for job in jobs if job.submission_id), key=lambda job: job.start_time or 0)[-5:]:
        seconds = ((job.end_time or 1000 * time.time()) - (job.start_time or 1000 * time.time())) / 1000
        lines.append(f"job      {job.submission_id}: {job.status.lower()}, {seconds:.0f} s")
    return lines


def by_time(paths: Iterable[Path]) -> list[tuple[float, Path]]:
    """Sort files by the time of their last change. A file that has been deleted since it was listed is left out."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return sorted(found)


def newest_run(logs: Path) -> str | None:
    """Return the name of the run with the newest log file."""
    found = by_time(logs.glob("*/*-rank-*.jsonl"))
    return found[-1][1].parent.name if found else None


def run_lines(storage: Path, run: str | None, curves: str | None) -> list[str]:
    """Describe a run by its files, and draw its curves to the file `curves`."""
    if run is None or not (storage / "logs" / run).is_dir():
        return [f"run      none in {storage / 'logs'}" + (f" is called {run}" if run else "")]
    folder, lines = storage / "logs" / run, [f"run      {run}"]
    rows_by_rank = read_ranks(folder)
    for rank, rows in sorted(rows_by_rank.items()):
        newest = rows[-1]
        age = time.time() - datetime.fromisoformat(newest["time"]).timestamp()
        ended = (folder / "metrics.json").exists()
        warning = f"   <-- nothing for {age:.0f} s" if age > QUIET_S and not ended else ""
        lines.append(f"rank {rank:<3} {newest['node']}: step {newest['step']}: {newest['message']}{warning}")
    if curves and 0 in rows_by_rank:
        try:
            draw(Path(curves), run, rows_by_rank[0])
            lines.append(f"curves   {curves}")
        except OSError as error:
            lines.append(f"curves   not written: {error.strerror}: {curves}")
    if checkpoints := by_time((storage / "runs" / run).glob("checkpoint-[0-9]*")):  # not a copy such as checkpoint-best
        changed, newest = checkpoints[-1]
        age = time.time() - changed
        lines.append(f"stored   {len(checkpoints)} checkpoints, the newest {newest.name}, {age:.0f} s ago")
    return lines


def read_ranks(folder: Path) -> dict[int, list[dict]]:
    """Read the logs of a run's present ranks."""
    rows_by_rank = {}
    for path in folder.glob("*-rank-*.jsonl"):
        rows, rank = read_log(path), path.stem.rpartition("-")[2]
        if not rows or not rank.isdigit():
            continue
        if int(rank) not in rows_by_rank or rows[-1]["time"] > rows_by_rank[int(rank)][-1]["time"]:
            rows_by_rank[int(rank)] = rows  # a restarted rank may have moved to a different node
    # A run that continues with fewer workers leaves the logs of the others.
    newest = max((rows[-1] for rows in rows_by_rank.values()), key=lambda row: row["time"], default={"world_size": 0})
    return {rank: rows for rank, rows in rows_by_rank.items() if rank < newest["world_size"]}


def read_log(path: Path) -> list[dict]:
    """Read the complete lines of a log. A rank that writes or was killed may leave half a line, before others too."""
    rows = []
    with contextlib.suppress(OSError):  # deleted since it was listed, or of a different user
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and row.keys() >= FIELDS:
                    rows.append(row)
    return rows


def draw(path: Path, run: str, rows: list[dict]) -> None:
    """Draw loss and accuracy over the steps. If a step was logged twice, because of a resume, the later line counts."""
    steps = {row["step"]: row for row in rows if "loss" in row}
    epochs = {row["step"]: row for row in rows if "val_loss" in row}
    figure, (losses, accuracies) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axes, name in ((losses, "loss"), (accuracies, "accuracy")):
        axes.plot(sorted(steps), [steps[step][name] for step in sorted(steps)], label="training", linewidth=1)
        axes.plot(sorted(epochs), [epochs[step][f"val_{name}"] for step in sorted(epochs)], "o-", label="validation")
        axes.set(title=f"{run}: {name}", xlabel="step")
        axes.legend(frameon=False)
    partial = path.with_name(f".{path.name}")
    figure.savefig(partial, format="png", dpi=100)
    plt.close(figure)
    partial.replace(path)  # atomic, so that a viewer never sees half a picture


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped monitoring; the run continues")
        sys.exit(130)
