"""What does Ray cost, and what does it give, on this machine? Measures:

1. train_ray_ddp.py over train_ddp.py under torchrun, the same loop on two processes: samples per second in the steps,
   and the seconds that a run takes beside them (start-up, validation, checkpoints, shutdown).
2. Ray Data over a PyTorch DataLoader, no training: samples per second and peak memory, with a CPU-heavy transform of
   each sample and with a light one, two processes for each.
3. The same with two nodes, each with one core: the DataLoader has the trainer's, Ray Data both (Linux, two cores).

Writes ray-DATE-DEVICE.md and .json. Starts a Ray of its own.
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
from measuring import BATCH_SIZE, ENVIRONMENT, HERE, ROOT, calibrated, compare, machine, reached
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
    torch.set_num_threads(1)  # as in the processes of the other side
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
    """Both launchers in turn: samples per second of the last epoch, and seconds beside the steps."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    commands = {
        "torchrun": [*torchrun, ROOT / "01-ddp-pytorch-only/train_ddp.py"],
        "ray": [sys.executable, ROOT / "02-ddp-pytorch-ray/train_ray_ddp.py", "--num-workers", "2"],
    }
    rates, beside = {name: [] for name in commands}, {name: [] for name in commands}
    for number in range(1, repeats + 1):
        for name, command in commands.items():
            with tempfile.TemporaryDirectory() as folder:
                options = ["--epochs", "3", "--storage-path", folder, "--metrics-out", f"{folder}/metrics.jsonl"]
                began = time.perf_counter()
                subprocess.run([*command, *options], env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
                seconds = time.perf_counter() - began
                lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
            rates[name].append(lines[-1]["samples_per_second"])
            beside[name].append(seconds - sum(line["samples_seen"] / line["samples_per_second"] for line in lines))
            print(f"[{number}/{repeats}] {name}: {rates[name][-1]:.0f} samples/s, {beside[name][-1]:.0f} s", flush=True)
    return {**compare(rates["torchrun"], rates["ray"]), "seconds_beside": beside}


def heavy(image: torch.Tensor) -> torch.Tensor:
    """A picture (1, 8, 8) enlarged, turned and blurred: some milliseconds of one core."""
    return AUGMENT(image)


def light(image: torch.Tensor) -> torch.Tensor:
    """[0, 1] to [-1, 1]."""
    return (image - 0.5) / 0.5


class Transformed(TensorDataset):
    """Samples of a TensorDataset, each image through `transform`."""

    def __init__(self, transform, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = super().__getitem__(index)
        return self.transform(image), label


class Peak:
    """The highest sum of the proportional set sizes of this process and all it started, in bytes, while it runs."""

    def __enter__(self) -> "Peak":
        self.bytes, self.going = 0, True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while self.going:
            total = 0
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            self.bytes = max(self.bytes, total)
            time.sleep(0.5)

    def __exit__(self, *error) -> None:
        self.going = False
        self.thread.join()


def make_input(transform, num_samples: int, num_workers: int) -> tuple[DataLoader, TensorDataset, Callable]:
    """The same samples and transform for both: a DataLoader, what to write as Parquet, and a function on its blocks."""
    images, labels = datasets.digits().train.tensors
    times = -(-num_samples // len(labels))
    images, labels = images.repeat(times, 1, 1, 1)[:num_samples] * 0.5 + 0.5, labels.repeat(times)[:num_samples]
    loader = DataLoader(Transformed(transform, images, labels), BATCH, num_workers=num_workers, shuffle=True)

    def transform_batch(batch: dict[str, np.ndarray]) -> dict:
        pixels = torch.from_numpy(np.stack(batch["image"])).view(-1, 1, 8, 8)
        return {"image": torch.stack([transform(each) for each in pixels]).numpy(), "label": batch["label"]}

    return loader, TensorDataset(images * 2 - 1, labels), transform_batch


def stream_of(
    files: str, transform_batch: Callable, rows: int | None = BATCH, num_blocks: int | None = None
) -> Iterator[np.ndarray]:
    """The labels of one pass of Ray Data over these files, batch by batch. Ray is up.

    Without `rows` a function gets whole blocks, and Ray Data reads and transforms a block in one task.
    """
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars, context.use_datasource_v2 = False, False  # as in the script
    stream = ray.data.read_parquet(files, shuffle="files", override_num_blocks=num_blocks)
    stream = stream.map_batches(transform_batch, batch_size=rows)
    return (batch["label"] for batch in stream.iter_torch_batches(batch_size=BATCH))


def feed(repeats: int, transform, num_samples: int) -> dict:
    """Passes over `num_samples` digits by each, after one that warms up; two processes transform."""
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
                # Looking at the memory of all of Ray's processes takes a good part of a core: while warming up.
                with contextlib.nullcontext() if turn else Peak() as peak:
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
    """The heavy transform with a core for the trainer's node and one for another; None where there are none to pin to.

    Both sides in turn, Ray started anew for each of its turns, and warmed up by a pass over an eighth of the samples,
    whose seconds are apart.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if len(cores) < 2:
        return None
    rates, start_s = {"alone": [], "loader": [], "ray": []}, []
    try:
        os.sched_setaffinity(0, cores[:1])  # of this thread, and of all that it starts
        loader, samples, transform_batch = make_input(heavy, num_samples, num_workers=1)
        alone = DataLoader(loader.dataset, BATCH, shuffle=True)
        with tempfile.TemporaryDirectory() as folder:
            files = ray_images.write_parquet(samples, folder, num_files=16)
            few = ray_images.write_parquet(TensorDataset(*samples[: num_samples // 8]), folder, num_files=16)
            for number in range(1, repeats + 1):
                for side, batches in (("alone", alone), ("loader", loader)):
                    rates[side].append(rate_of((labels for _, labels in batches), num_samples))
                began = time.perf_counter()
                with nodes_on(cores[:2]):
                    rate_of(stream_of(few, transform_batch, None, 16), num_samples // 8)
                    start_s.append(time.perf_counter() - began)
                    rates["ray"].append(rate_of(stream_of(files, transform_batch, None, 16), num_samples))
                numbers = ", ".join(f"{side} {rates[side][-1]:.0f}" for side in rates)
                print(f"[{number}/{repeats}] two nodes: {numbers} samples/s", flush=True)
    finally:
        os.sched_setaffinity(0, cores)
    without, with_one = rates["alone"], rates["loader"]
    best = without if median(without) > median(with_one) else with_one
    return {**compare(best, rates["ray"]), "samples": num_samples, "start_s": start_s, **rates}


@contextlib.contextmanager
def nodes_on(cores: list[int]) -> Iterator[None]:
    """A Ray with a node on each core, joined by this process, which belongs to the first."""
    first, second = cores
    each = {"num_cpus": 1, "object_store_memory": 2**30}  # this class's own default holds 1,500 samples, and spills
    nodes = Cluster(initialize_head=True, head_node_args={**each, "include_dashboard": False, "dashboard_port": None})
    try:
        os.sched_setaffinity(0, [second])
        nodes.add_node(**each)
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
    """Samples per second of one pass."""
    began, count = time.perf_counter(), sum(len(batch) for batch in batches)
    seconds = time.perf_counter() - began
    assert count == num_samples
    return num_samples / seconds


def report(result: dict) -> str:
    """The result as a Markdown page."""

    def row(name: str, part: dict, *more: str) -> str:
        numbers = f"{median(part['baseline']):.0f} | {median(part['measured']):.0f} | {part['ratio']:.3f}"
        return " | ".join([f"| {name}", numbers, f"{part['lowest']:.2f} to {part['highest']:.2f}", *more]) + " |\n"

    def verdict(ratio: float, goal: float) -> str:
        return f"**{ratio:.3f}**, goal {goal:.2f}: {reached(ratio >= goal)}"

    train, parts = result["train"], result["data"]
    beside = {name: median(seconds) for name, seconds in train["seconds_beside"].items()}
    extra = beside["ray"] - beside["torchrun"]
    of_an_hour = extra / (3600 + extra)
    page = f"""# Ray on {result["device"]}, {result["date"]}

CPU: {result["cpu"]}, {result["cpus"]} of them; GPUs: {result["gpus"]}; {result["system"]}; Python {result["python"]},
torch {result["torch"]}, Ray {result["ray"]}. One thread a process. Medians of {result["repeats"]} runs of each side; a
ratio is that of the medians, its range that of single pairs.
{calibrated(result)}
## Ray Train over torchrun

ResNet-18 with GroupNorm on 8x8 digits, Adam, float32, two processes, global batch {BATCH_SIZE}, third epoch. The two
launchers run in turn.

| | torchrun, samples/s | Ray Train, samples/s | ratio | range | beside the steps, torchrun | Ray Train |
|---|---:|---:|---:|---:|---:|---:|
"""
    page += row("two workers", train, *(f"{beside[name]:.0f} s" for name in ("torchrun", "ray")))
    page += f"""
In the steps: {verdict(train["ratio"], GOAL_TRAIN)}. Beside them: start-up, validation, checkpoints and shutdown. What
Ray Train takes more of these is **{of_an_hour:.1%}** of a run of an hour, goal below 5 %: {reached(of_an_hour < 0.05)}.

## Ray Data over a DataLoader

Only the input, no training; each side has two processes for the transform. Ray Data streams Parquet files, the
DataLoader holds the data set in memory. One side runs after the other, since Ray's processes would stand in the
DataLoader's way; the range pairs first runs, second runs and so on. Memory is the highest sum of proportional set sizes
of all processes, Ray's own included.

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
Heavy transform: {verdict(heavy_ratio, GOAL_DATA)}. The light one is reported as it is. A pass of Ray Data begins with
some two seconds of planning and waiting for a first block, whatever its length, so a short pass shows them most. Both
sides have the same cores of one machine: what Ray Data adds, the CPUs of other machines, does not show here.
"""
        + without_workers(parts)
        + with_another_node(result.get("nodes"))
    )


def without_workers(parts: dict) -> str:
    """What two processes give over none; "" for a result that was measured before this side was there."""
    if "alone" not in parts["heavy"]:
        return ""
    rates = {
        name: {side: median(part[side]) for side in ("alone", "baseline", "measured")} for name, part in parts.items()
    }
    gain = max(rates["heavy"]["baseline"], rates["heavy"]["measured"]) / rates["heavy"]["alone"]
    simplest = rates["light"]["alone"] / rates["light"]["measured"]
    return f"""
A DataLoader without workers makes {rates["heavy"]["alone"]:.0f} samples/s with the heavy transform: the faster of the
two makes **{gain:.2f}** times as many, goal above 1: {reached(gain > 1)}. With the light one it makes
{rates["light"]["alone"]:.0f}, **{simplest:.2f}** times as many as Ray Data, goal above 1: {reached(simplest > 1)}.
"""


def with_another_node(part: dict | None) -> str:
    """The table of `two_nodes`; "" for a result that was measured before it was there, or on one core."""
    if part is None:
        return ""
    without, with_one, by_ray = (median(part[side]) for side in ("alone", "loader", "ray"))
    verdict = f"goal {GOAL_NODES}: {reached(part['ratio'] >= GOAL_NODES)}"
    span = f"{part['lowest']:.2f} to {part['highest']:.2f} in single pairs"
    return f"""
## Ray Data with another node's core

The heavy transform once more, {part["samples"]:,} samples. The trainer's node has one core and a second Ray node
another one, and their processes are pinned to them: a DataLoader has the trainer's core, with a worker or without, Ray
Data has both. They run in turn. Ray is started for each of its turns, and warmed up by a pass over an eighth of the
samples: both together take {median(part["start_s"]):.0f} s, which are not part of the rate.

| | samples/s |
|---|---:|
| DataLoader, no workers, the trainer's node | {without:.0f} |
| DataLoader, one worker, the trainer's node | {with_one:.0f} |
| Ray Data, both nodes | {by_ray:.0f} |

Over the faster DataLoader: **{part["ratio"]:.2f}** ({span}), {verdict}.
"""


if __name__ == "__main__":
    main()
