"""Measure what Ray costs and what it gains on this machine. Measures:

1. train_ray_ddp.py over train_ddp.py under torchrun, the same loop on two processes: samples per second in the steps,
   and the seconds that a run takes outside the steps (start-up, validation, checkpoints, shutdown).
2. Ray Data over a PyTorch DataLoader without training: samples per second and peak memory, with a CPU-heavy transform
   of each sample and with a light one, two processes for each.
3. The same on two nodes with one core each: the DataLoader uses the trainer's core, Ray Data both (Linux, two cores).

Writes ray-DATE-DEVICE.md and .json. Starts its own Ray.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import ray
import ray.data
import torch
from measuring import BATCH_SIZE, ENVIRONMENT, HERE, ROOT, calibration_line, compare, machine, reached
from ray.cluster_utils import Cluster
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import v2

from shared import datasets
from shared.on_ray import cluster

sys.path.append(str(ROOT / "02-ddp-pytorch-ray"))
import ray_images

GOAL_TRAIN, GOAL_DATA, GOAL_NODES = 0.97, 1.0, 1.3
BATCH = 64
AUGMENT = v2.Compose([v2.Resize((160, 160)), v2.RandomAffine(15, scale=(0.8, 1.2)), v2.GaussianBlur(9)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4, help="runs of each side, in turn (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="default: benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in Ray's processes
    result = {"date": time.strftime("%Y-%m-%d"), "repeats": args.repeats, "ray": ray.__version__, **machine()}
    result["train"] = train(args.repeats)
    result["data"] = {
        "heavy": feed(args.repeats, heavy, 8192),
        "heavy, short": feed(args.repeats, heavy, 2048),
        "light": feed(args.repeats, light, 65536),
    }
    result["nodes"] = two_nodes(args.repeats)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"ray-{result['date']}-{re.sub('[^a-z0-9]+', '-', result['device'].lower()).strip('-')}"
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(report(result))
    print(f"\n{report(result)}\nwritten: {path}.md and .json")


def train(repeats: int) -> dict:
    """Compare both launchers in turn: samples per second of the last epoch, and seconds outside the steps."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    commands = {
        "torchrun": [*torchrun, ROOT / "01-ddp-pytorch-only/train_ddp.py"],
        "ray": [sys.executable, ROOT / "02-ddp-pytorch-ray/train_ray_ddp.py", "--num-workers", "2"],
    }
    rates, overhead_s = {name: [] for name in commands}, {name: [] for name in commands}
    for number in range(1, repeats + 1):
        for name, command in commands.items():
            with tempfile.TemporaryDirectory() as folder:
                options = ["--epochs", "3", "--storage-path", folder, "--metrics-out", f"{folder}/metrics.jsonl"]
                started = time.perf_counter()
                subprocess.run([*command, *options], env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
                seconds = time.perf_counter() - started
                lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
            rates[name].append(lines[-1]["samples_per_second"])
            step_s = sum(line["samples_seen"] / line["samples_per_second"] for line in lines)
            overhead_s[name].append(seconds - step_s)
            speeds = f"{rates[name][-1]:.0f} samples/s, {overhead_s[name][-1]:.0f} s"
            print(f"[{number}/{repeats}] {name}: {speeds}", flush=True)
    return {**compare(rates["torchrun"], rates["ray"]), "seconds_beside": overhead_s}


def heavy(image: torch.Tensor) -> torch.Tensor:
    """Enlarge, rotate and blur an image (1, 8, 8), which takes some milliseconds of one core."""
    return AUGMENT(image)


def light(image: torch.Tensor) -> torch.Tensor:
    """Rescale pixels from 0..1 to -1..1."""
    return (image - 0.5) / 0.5


class Transformed(TensorDataset):
    """A TensorDataset that applies `transform` to each image."""

    def __init__(self, transform, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = super().__getitem__(index)
        return self.transform(image), label


class PeakMemory:
    """Measure peak memory in bytes: the highest sum of proportional set sizes of this process and its descendants."""

    def __enter__(self) -> "PeakMemory":
        self.bytes, self.running = 0, True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while self.running:
            total = 0
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            self.bytes = max(self.bytes, total)
            time.sleep(0.5)

    def __exit__(self, *error) -> None:
        self.running = False
        self.thread.join()


def make_input(transform, num_samples: int, num_workers: int) -> tuple[DataLoader, TensorDataset, Callable]:
    """Make the same input for both sides: a DataLoader, and for Ray Data the samples and a transform of batches."""
    images, labels = datasets.digits().train.tensors
    copies = -(-num_samples // len(labels))
    images, labels = images.repeat(copies, 1, 1, 1)[:num_samples] * 0.5 + 0.5, labels.repeat(copies)[:num_samples]
    loader = DataLoader(Transformed(transform, images, labels), BATCH, num_workers=num_workers, shuffle=True)

    def transform_batch(batch: dict[str, np.ndarray]) -> dict:
        pixels = torch.from_numpy(np.stack(batch["image"])).view(-1, 1, 8, 8)
        return {"image": torch.stack([transform(image) for image in pixels]).numpy(), "label": batch["label"]}

    return loader, TensorDataset(images * 2 - 1, labels), transform_batch


def stream_of(
    files: str, transform_batch: Callable, rows: int | None = BATCH, num_blocks: int | None = None
) -> Iterator[np.ndarray]:
    """Yield the labels of one pass of Ray Data over `files`, batch by batch. Ray must be running.

    rows: the batch size of the transform. With None it gets whole blocks, and Ray Data reads and transforms a block in
    one task.
    """
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars, context.use_datasource_v2 = False, False  # as in the script
    stream = ray.data.read_parquet(files, shuffle="files", override_num_blocks=num_blocks)
    stream = stream.map_batches(transform_batch, batch_size=rows)
    return (batch["label"] for batch in stream.iter_torch_batches(batch_size=BATCH))


def feed(repeats: int, transform, num_samples: int) -> dict:
    """Compare passes over `num_samples` digits, after one to warm up. Two processes transform on each side."""
    loader, samples, transform_batch = make_input(transform, num_samples, num_workers=2)
    alone = DataLoader(loader.dataset, BATCH, shuffle=True)
    rates, memory = {"alone": [], "loader": [], "ray": []}, {}
    with tempfile.TemporaryDirectory() as folder:
        files = ray_images.write_parquet(samples, folder, num_files=16)
        for side in rates:
            if side == "ray":
                cluster.start(0, use_gpu=False, spare_cpus=2)
            for turn in range(repeats + 1):
                if side == "ray":
                    batches = stream_of(files, transform_batch)
                else:
                    batches = (labels for _, labels in (loader if side == "loader" else alone))
                # Measure memory only during the warm-up: with all of Ray's processes it takes a good part of a core.
                with contextlib.nullcontext() if turn else PeakMemory() as peak:
                    rate = rate_of(batches, num_samples)
                if turn:
                    rates[side].append(rate)
                else:
                    memory[side] = peak.bytes
                print(f"{transform.__name__}, {side}: {rate:.0f} samples/s", flush=True)
        cluster.stop()
    compared = compare(rates["loader"], rates["ray"])
    return {**compared, "samples": num_samples, "peak_bytes": memory, "alone": rates["alone"]}


def two_nodes(repeats: int, num_samples: int = 8192) -> dict | None:
    """Compare the heavy transform on the trainer's node with the same on two nodes, with one core each.

    The sides take turns. Each turn of Ray starts Ray again and warms it up with an eighth of the samples, which is
    timed separately. Returns None if the process cannot be pinned to two cores.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if len(cores) < 2:
        return None
    rates, start_s = {"alone": [], "loader": [], "ray": []}, []
    try:
        os.sched_setaffinity(0, cores[:1])  # for this thread and everything it starts
        loader, samples, transform_batch = make_input(heavy, num_samples, num_workers=1)
        alone = DataLoader(loader.dataset, BATCH, shuffle=True)
        with tempfile.TemporaryDirectory() as folder:
            files = ray_images.write_parquet(samples, folder, num_files=16)
            warm_up_files = ray_images.write_parquet(TensorDataset(*samples[: num_samples // 8]), folder, num_files=16)
            for number in range(1, repeats + 1):
                for side, batches in (("alone", alone), ("loader", loader)):
                    rates[side].append(rate_of((labels for _, labels in batches), num_samples))
                started = time.perf_counter()
                with nodes_on(cores[:2]):
                    rate_of(stream_of(warm_up_files, transform_batch, None, 16), num_samples // 8)
                    start_s.append(time.perf_counter() - started)
                    rates["ray"].append(rate_of(stream_of(files, transform_batch, None, 16), num_samples))
                numbers = ", ".join(f"{side} {rates[side][-1]:.0f}" for side in rates)
                print(f"[{number}/{repeats}] two nodes: {numbers} samples/s", flush=True)
    finally:
        os.sched_setaffinity(0, cores)
    no_workers, one_worker = rates["alone"], rates["loader"]
    best = no_workers if median(no_workers) > median(one_worker) else one_worker
    return {**compare(best, rates["ray"]), "samples": num_samples, "start_s": start_s, **rates}


@contextlib.contextmanager
def nodes_on(cores: list[int]) -> Iterator[None]:
    """Run a Ray cluster with a node on each of two cores. This process joins it on the first one."""
    first, second = cores
    node = {"num_cpus": 1, "object_store_memory": 2**30}  # Cluster's default has room for 1,500 samples, then spills
    nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False, "dashboard_port": None})
    try:
        os.sched_setaffinity(0, [second])
        nodes.add_node(**node)
        os.sched_setaffinity(0, [first])
        nodes.wait_for_nodes()
        cluster.quiet_settings(own=True)
        ray.init(nodes.address, logging_config=ray.LoggingConfig(log_level="ERROR"))
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()
        os.sched_setaffinity(0, [first])


def rate_of(batches: Iterable, num_samples: int) -> float:
    """Return the samples per second of one pass."""
    started, count = time.perf_counter(), sum(len(batch) for batch in batches)
    seconds = time.perf_counter() - started
    assert count == num_samples
    return num_samples / seconds


def report(result: dict) -> str:
    """Render the result as a Markdown page."""

    def row(name: str, part: dict, *more: str) -> str:
        numbers = f"{median(part['baseline']):.0f} | {median(part['measured']):.0f} | {part['ratio']:.3f}"
        return " | ".join([f"| {name}", numbers, f"{part['lowest']:.2f} to {part['highest']:.2f}", *more]) + " |\n"

    def verdict(ratio: float, goal: float) -> str:
        return f"**{ratio:.3f}**, goal {goal:.2f}: {reached(ratio >= goal)}"

    train, parts = result["train"], result["data"]
    overhead_s = {name: median(seconds) for name, seconds in train["seconds_beside"].items()}
    extra_s = overhead_s["ray"] - overhead_s["torchrun"]
    hour_share = extra_s / (3600 + extra_s)
    page = f"""# Ray on {result["device"]}, {result["date"]}

CPU: {result["cpu"]}, {result["cpus"]} of them; GPUs: {result["gpus"]}; {result["system"]}; Python {result["python"]},
torch {result["torch"]}, Ray {result["ray"]}. One thread per process. A rate is the median of {result["repeats"]} runs.
A ratio compares two medians, and its range is that of single pairs.
{calibration_line(result)}
## Ray Train over torchrun

ResNet-18 with GroupNorm on 8x8 digits, Adam, float32, two processes, global batch {BATCH_SIZE}, third epoch. The two
launchers run in turn.

| | torchrun, samples/s | Ray Train, samples/s | ratio | range | outside the steps, torchrun | Ray Train |
|---|---:|---:|---:|---:|---:|---:|
"""
    page += row("two workers", train, *(f"{overhead_s[name]:.0f} s" for name in ("torchrun", "ray")))
    page += f"""
In the steps: {verdict(train["ratio"], GOAL_TRAIN)}. Outside them are start-up, validation, checkpoints and shutdown.
The additional time that Ray Train takes for these is **{hour_share:.1%}** of a run of an hour, goal below 5 %:
{reached(hour_share < 0.05)}.

## Ray Data over a DataLoader

Only the input is measured, without training. Each side has two processes for the transform. Ray Data streams Parquet
files, and the DataLoader holds the data set in memory. All runs of one side come before those of the other, because
Ray's processes would slow the DataLoader down. The range pairs the first runs, the second runs and so on. Memory is the
highest sum of proportional set sizes of all processes, including Ray's own.

| transform | DataLoader, samples/s | Ray Data, samples/s | ratio | range | peak memory, DataLoader | Ray Data |
|---|---:|---:|---:|---:|---:|---:|
"""
    for name, part in parts.items():
        memory = [f"{part['peak_bytes'][side] / 2**20:.0f} MiB" for side in ("loader", "ray")]
        page += row(f"{name}, {part['samples']} samples", part, *memory)
    heavy_ratio = parts["heavy"]["ratio"]
    return (
        page
        + f"""
Heavy transform: {verdict(heavy_ratio, GOAL_DATA)}. The light one has no goal. A pass of Ray Data begins with some two
seconds of planning and waiting for a first block, whatever its length, so they weigh most in a short pass. Both sides
use the same cores of one machine. Ray Data's advantage, the CPUs of other machines, does not show here.
"""
        + report_without_workers(parts)
        + report_two_nodes(result.get("nodes"))
    )


def report_without_workers(parts: dict) -> str:
    """Report the gain of two processes over none, or "" for a result from before this side existed."""
    if "alone" not in parts["heavy"]:
        return ""
    rates = {
        name: {side: median(part[side]) for side in ("alone", "baseline", "measured")} for name, part in parts.items()
    }
    gain = max(rates["heavy"]["baseline"], rates["heavy"]["measured"]) / rates["heavy"]["alone"]
    light_gain = rates["light"]["alone"] / rates["light"]["measured"]
    return f"""
A DataLoader without workers makes {rates["heavy"]["alone"]:.0f} samples/s with the heavy transform. The faster of the
two sides makes **{gain:.2f}** times as many, goal above 1: {reached(gain > 1)}. With the light one it makes
{rates["light"]["alone"]:.0f}, **{light_gain:.2f}** times as many as Ray Data, goal above 1: {reached(light_gain > 1)}.
"""


def report_two_nodes(part: dict | None) -> str:
    """Report the table of `two_nodes`, or "" for a result from before it existed or from a machine with one core."""
    if part is None:
        return ""
    no_workers, one_worker, ray_data = (median(part[side]) for side in ("alone", "loader", "ray"))
    verdict = f"goal {GOAL_NODES}: {reached(part['ratio'] >= GOAL_NODES)}"
    span = f"{part['lowest']:.2f} to {part['highest']:.2f} in single pairs"
    return f"""
## Ray Data with another node's core

The heavy transform again, with {part["samples"]:,} samples. The trainer's node and a second Ray node have one core
each, and their processes are pinned to it. A DataLoader, with a worker or without, uses the trainer's core. Ray Data
uses both. They run in turn. Each turn of Ray starts Ray and warms it up by a pass over an eighth of the samples. This
takes {median(part["start_s"]):.0f} s, which are not part of the rate.

| | samples/s |
|---|---:|
| DataLoader, no workers, the trainer's node | {no_workers:.0f} |
| DataLoader, one worker, the trainer's node | {one_worker:.0f} |
| Ray Data, both nodes | {ray_data:.0f} |

Over the faster DataLoader: **{part["ratio"]:.2f}** ({span}), {verdict}.
"""


if __name__ == "__main__":
    main()
