"""Watch DistributedDataParallel during backward(): when each gradient is ready, and when each bucket is averaged.

Lesson 1.3 starts it with torchrun. It runs ResNet-18 forward and backward three times with each of four settings of
DDP. Rank 0 writes its times and sizes to the JSON file named on the command line. `draw` makes the lesson's picture of
them.
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from shared import datasets, distributed, models, plots

SETTINGS = {
    "default": {},
    "bucket_cap_mb=5": {"bucket_cap_mb": 5},
    "bucket_cap_mb=100": {"bucket_cap_mb": 100},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
}


def average(log, bucket):
    """Average a full bucket over all ranks in the background, as DDP does, and note the times in `log`."""
    entry = {"megabytes": bucket.buffer().nbytes / 1e6, "start": time.perf_counter()}
    log.append((entry, bucket.buffer()))

    def finish(future):  # its value is a list with one tensor, the sum over all ranks
        entry["end"] = time.perf_counter()
        return future.value()[0] / dist.get_world_size()

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(finish)


def distinct_bytes(tensors):
    """Count the bytes behind `tensors`. Memory that several of them share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def watch(images, labels, **options):
    """Run three steps, forward and backward. For each, return when backward began, when each gradient was ready, and
    the buckets and bytes.
    """
    model = models.resnet18()
    ddp_model = DistributedDataParallel(model, **options)
    log, ready, steps = [], [], []
    ddp_model.register_comm_hook(log, average)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append((name, time.perf_counter())))
    for _ in range(3):
        log.clear()
        ready.clear()
        model.zero_grad()
        loss = F.cross_entropy(ddp_model(images), labels)
        began = time.perf_counter()
        loss.backward()
        entries, buffers = zip(*log, strict=True)
        memory = distinct_bytes([parameter.grad for parameter in model.parameters()] + list(buffers))
        steps.append({"began": began, "ready": list(ready), "buckets": entries, "bytes": memory})
    return steps


def draw(steps: dict[str, dict]) -> None:
    """Draw one panel per step: the backward pass and each bucket's all-reduce, on one time axis."""
    end = max(bucket["end"] - step["began"] for step in steps.values() for bucket in step["buckets"])
    heights = [1 + len(step["buckets"]) for step in steps.values()]
    _, panels = plt.subplots(
        len(steps), figsize=(7.5, 0.9 * len(steps) + 0.42 * sum(heights)), sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": heights}, layout="constrained",
    )  # fmt: skip
    for axes, (title, step) in zip(panels[:, 0], steps.items(), strict=True):
        moments = [1e3 * (moment - step["began"]) for moment in (step["began"], *(when for _, when in step["ready"]))]
        pieces = [(start, stop - start) for start, stop in pairwise(moments)]
        axes.broken_barh(pieces, (-0.3, 0.6), color=plots.COLORS[0], edgecolor="white", linewidth=0.6)
        axes.axvline(moments[-1], color=plots.COLORS[5], linestyle=":", linewidth=1)
        rows = ["backward pass"]
        for row, bucket in enumerate(step["buckets"], start=1):
            start, stop = (1e3 * (bucket[key] - step["began"]) for key in ("start", "end"))
            axes.broken_barh([(start, stop - start)], (row - 0.3, 0.6), color=plots.COLORS[1])
            rows.append(f"all-reduce {row}: {bucket['megabytes']:.1f} MB")
        axes.text(moments[-1], -0.45, "last gradient ready", ha="right", fontsize=8, color=plots.COLORS[5])
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.5, -1)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set(xlabel="milliseconds after backward() began", xlim=(0, 1050 * end))


def main(path: Path) -> None:
    worker = distributed.join()
    images, labels = (tensor[worker.rank : 64 : 2] for tensor in datasets.load("digits").train.tensors)
    results = {name: watch(images, labels, **options) for name, options in SETTINGS.items()}
    if worker.rank == 0:
        path.write_text(json.dumps(results))
    distributed.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
