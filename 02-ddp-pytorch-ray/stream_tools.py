"""Deal, plot and time streams of Ray Data: the machinery behind the proofs of lesson 2.3."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import ray
import ray.data
import torch
from matplotlib.patches import Patch
from torch.utils.data import Dataset

from shared import plots

# --- Who gets which rows ---------------------------------------------------------------------------------------------


def deal(dataset: ray.data.Dataset, batch_size: int, equal: bool) -> list[list[int]]:
    """Split a stream between two consumers, and return the ids that each of them received.

    The consumers are two threads that read at the same time, as two ranks would.
    """
    received: list[list[int]] = [[], []]

    def consume(rank: int, part: ray.data.DataIterator) -> None:
        for batch in part.iter_torch_batches(batch_size=batch_size):
            received[rank] += batch["id"].tolist()
            time.sleep(0.01)  # some work

    parts = dataset.streaming_split(2, equal=equal)
    threads = [threading.Thread(target=consume, args=each) for each in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return received


def draw_owners(dealt: Mapping[str, Sequence[Sequence[int]]], num_samples: int, title: str) -> None:
    """Draw one bar of all samples per entry of `dealt`, colored by the rank that received the sample.

    dealt: for each entry the ids of both ranks. A sample that nobody received is red, and drawn wider than it is.
    """
    axes = plots.new_axes(title, "sample, in the order of the files", size=(6.5, 1.4 + 0.62 * len(dealt)))
    axes.grid(visible=False)
    for row, parts in enumerate(dealt.values()):
        owner = np.full(num_samples, -1)
        for rank, ids in enumerate(parts):
            owner[ids] = rank
        starts = [0, *(np.flatnonzero(np.diff(owner)) + 1), num_samples]
        for start, end in pairwise(starts):
            if owner[start] >= 0:
                color = plots.COLORS[owner[start]]
                axes.broken_barh([(start, end - start)], (row - 0.3, 0.6), color=color, edgecolor="white")
        for lost in np.flatnonzero(owner < 0):
            axes.broken_barh([(lost - 4, 9)], (row - 0.44, 0.88), color=plots.COLORS[4], zorder=3)
    counts = [f"{name}\n{len(first):,} + {len(second):,} rows" for name, (first, second) in dealt.items()]
    axes.set_yticks(range(len(dealt)), counts, fontsize=11)
    axes.set_xlim(-8, num_samples + 8)
    axes.invert_yaxis()
    names = {"rank 0": plots.COLORS[0], "rank 1": plots.COLORS[1], "nobody": plots.COLORS[4]}
    patches = [Patch(color=color, label=name) for name, color in names.items()]
    axes.figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=11)


def train_by_script(script: str, num_workers: int, seed: int, folder: Path) -> list[dict]:
    """Train the small MLP for eight epochs with one of the chapter's scripts; return its metrics, one dict per epoch.

    The script joins the Ray that is running. Its checkpoints and metrics go to `folder`.
    """
    metrics = folder / f"{script}.jsonl"
    command = [sys.executable, f"{script}.py", "--num-workers", str(num_workers), "--no-use-gpu"]
    command += ["--model", "mlp", "--epochs", "8", "--seed", str(seed)]
    command += ["--storage-path", str(folder), "--metrics-out", str(metrics)]
    joined = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(command, timeout=600, capture_output=True, text=True, env=joined)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in metrics.read_text().splitlines()]


# --- Shuffling -------------------------------------------------------------------------------------------------------


def files_per_batch(ids: Sequence[int], batch_size: int, num_files: int) -> float:
    """Return how many files a batch draws from, on average. Each file holds equally many consecutive ids."""
    files = np.array(ids) // -(-len(ids) // num_files)
    return float(np.mean([len(set(files[at : at + batch_size])) for at in range(0, len(ids), batch_size)]))


def draw_orders(orders: Mapping[str, Sequence[int]], mixed: Mapping[str, float]) -> None:
    """Plot, for each order, when each sample arrives. A dot is a sample, and `mixed` holds the files per batch."""
    _, grid = plt.subplots(2, 2, figsize=(6.5, 5.6), sharex=True, sharey=True, layout="constrained")
    for axes, (name, ids) in zip(grid.flat, orders.items(), strict=True):
        axes.scatter(range(len(ids)), ids, s=2, color=plots.COLORS[0])
        axes.set_title(f"{name}\n{mixed[name]:.1f} files per batch", fontsize=11, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[1]:
        axes.set_xlabel("position on arrival", fontsize=11)
    for axes in grid[:, 0]:
        axes.set_ylabel("position in the files", fontsize=11)


# --- How long the training waits for its input -----------------------------------------------------------------------


class PreparedRows(Dataset):
    """Rows in memory for a DataLoader. `prepare(pixels, number)` prepares each of them: 64 pixels from 0 to 1."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, prepare: Callable) -> None:
        self.pixels, self.labels, self.prepare = (images.numpy() + 1) / 2, labels, prepare

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> dict:
        return {"id": number, "image": self.prepare(self.pixels[number], number), "label": self.labels[number]}


class PrepareBatch:
    """A function for `map_batches` that prepares a batch with the function that PreparedRows calls."""

    def __init__(self, prepare: Callable) -> None:
        self.prepare = prepare

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        prepared = [self.prepare(*row) for row in zip(batch["image"], batch["id"], strict=True)]
        return {**batch, "image": np.stack(prepared)}


def seconds_waited(batches: Iterable, step_s: float) -> float:
    """Return how many seconds per epoch a GPU would wait for `batches`, if its step took `step_s`.

    A step is a pause, so the CPUs are as free as a GPU would leave them. The better of two epochs counts, because the
    first one includes the start of processes.
    """
    best = float("inf")
    for _ in range(2):
        started, steps = time.perf_counter(), 0
        for _ in batches:
            time.sleep(step_s)
            steps += 1
        best = min(best, time.perf_counter() - started - steps * step_s)
    return best


def print_verdict(claim: str, holds: bool) -> None:
    """Print whether a claim about speeds holds in this run."""
    print(f"{claim}? Here: {'yes' if holds else 'no. Was the machine busy? Run this cell again'}.")


# --- How much memory a stream takes ----------------------------------------------------------------------------------


def make_rows(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Make a row of 128 KiB per id, with the time at which it was made."""
    rows = len(batch["id"])
    return {"made": np.full(rows, time.time()), "pixels": np.ones((rows, 128, 1024), np.uint8)}


def unused_mib(limit_mib: float | None) -> list[float]:
    """Stream 160 MiB to a slow consumer. Return, batch by batch, how many MiB were made but not yet used.

    limit_mib: the object store memory that the stream may use; None leaves it to Ray.
    """
    options = ray.data.DataContext.get_current().execution_options
    limit = None if limit_mib is None else limit_mib * 2**20
    options.resource_limits = ray.data.ExecutionResources(object_store_memory=limit)
    rows = ray.data.range(1280, override_num_blocks=40).map_batches(make_rows, batch_size=None)
    made, used = [], []
    for batch in rows.iter_torch_batches(batch_size=32):
        used.append(time.time())
        made += batch["made"].tolist()
        time.sleep(0.06)  # a slow consumer
    options.resource_limits = ray.data.ExecutionResources()
    # Each batch has 32 rows, and 8 rows of 128 KiB are one MiB.
    return [(sum(moment <= now for moment in made) - 32 * number) / 8 for number, now in enumerate(used)]


# --- Files of other formats ------------------------------------------------------------------------------------------


def write_examples(images: torch.Tensor, labels: torch.Tensor, folder: Path) -> list[dict[str, int]]:
    """Write labels.csv, labels.jsonl and pictures/NUMBER.png to `folder`. Return the rows of number and label."""
    rows = [{"number": number, "label": label} for number, label in enumerate(labels.tolist())]
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    csv_lines = ["number,label", *(f"{row['number']},{row['label']}" for row in rows)]
    (folder / "labels.csv").write_text("\n".join(csv_lines))
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for number, image in enumerate(images):
        plt.imsave(folder / f"pictures/{number}.png", image[0].numpy(), cmap="gray")
    return rows
