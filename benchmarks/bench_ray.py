"""What does Ray cost, and what does it give, on this machine? Measures:

1. train_ray_ddp.py over train_ddp.py under torchrun, the same loop on two processes: samples per second in the steps,
   and the seconds that a run takes beside them (start-up, validation, checkpoints, shutdown).
2. Ray Data over a PyTorch DataLoader, no training: samples per second and peak memory, with a CPU-heavy transform of
   each sample and with a light one, two processes for each.

Writes ray-DATE-DEVICE.md and .json. Starts a Ray of its own.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import ray
import ray.data
import torch
from bench_ddp import BATCH_SIZE, ENVIRONMENT, HERE, ROOT, calibrated, compare, machine, reached
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import v2

from shared import cluster, data

GOAL_TRAIN, GOAL_DATA = 0.97, 1.0
BATCH = 64
AUGMENT = v2.Compose([v2.Resize((160, 160)), v2.RandomAffine(15, scale=(0.8, 1.2)), v2.GaussianBlur(9)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4, help="runs of each side, in turn (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="default: benchmarks/results")
    args = parser.parse_args()
    result = {"date": time.strftime("%Y-%m-%d"), "repeats": args.repeats, "ray": ray.__version__, **machine()}
    result["train"] = train(args.repeats)
    result["data"] = {"heavy": feed(args.repeats, heavy, 2048), "light": feed(args.repeats, light, 65536)}
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


def feed(repeats: int, transform, num_samples: int) -> dict:
    """Passes over `num_samples` digits by each, after one that warms up; two processes transform."""
    images, labels = data.digits().train.tensors
    times = -(-num_samples // len(labels))
    images, labels = images.repeat(times, 1, 1, 1)[:num_samples] * 0.5 + 0.5, labels.repeat(times)[:num_samples]
    loader = DataLoader(Transformed(transform, images, labels), BATCH, num_workers=2, shuffle=True)

    def transform_batch(batch: dict[str, np.ndarray]) -> dict:
        pixels = torch.from_numpy(np.stack(batch["image"])).view(-1, 1, 8, 8)
        return {"image": torch.stack([transform(each) for each in pixels]).numpy(), "label": batch["label"]}

    alone = DataLoader(Transformed(transform, images, labels), BATCH, shuffle=True)
    rates, memory = {"alone": [], "loader": [], "ray": []}, {}
    with tempfile.TemporaryDirectory() as folder:
        files = data.write_parquet(TensorDataset(images * 2 - 1, labels), folder, num_files=16)
        for side in rates:
            if side == "ray":
                cluster.start(argparse.Namespace(num_workers=0, use_gpu=False), spare_cpus=2)
                context = ray.data.DataContext.get_current()
                context.enable_progress_bars, context.use_datasource_v2 = False, False  # as in the script
                stream = ray.data.read_parquet(files, shuffle="files").map_batches(transform_batch, batch_size=BATCH)
            with Peak() as peak:
                for turn in range(repeats + 1):
                    if side == "ray":
                        batches = (batch["label"] for batch in stream.iter_torch_batches(batch_size=BATCH))
                    else:
                        batches = (labels for _, labels in (loader if side == "loader" else alone))
                    began, count = time.perf_counter(), 0
                    for batch in batches:
                        count += len(batch)
                    rate = count / (time.perf_counter() - began)
                    assert count == num_samples
                    if turn:
                        rates[side].append(rate)
                    print(f"{transform.__name__}, {side}: {rate:.0f} samples/s", flush=True)
            memory[side] = peak.bytes
        cluster.stop()
    compared = compare(rates["loader"], rates["ray"])
    return {**compared, "samples": num_samples, "peak_bytes": memory, "alone": rates["alone"]}


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
Heavy transform: {verdict(heavy_ratio, GOAL_DATA)}. The light one is reported as it is. Both sides have the same cores
of one machine, and Ray's own processes take their part of them: what Ray Data adds, the CPUs of other machines, does
not show here.
"""
        + without_workers(parts)
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


if __name__ == "__main__":
    main()
