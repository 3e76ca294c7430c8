"""Compare DDP, FSDP2 and every ZeRO stage on two processes with the same model, seed and global batch. Measures:

1. Tokens per second of each over plain DDP, in alternating runs; state and peak bytes per rank; the last loss.
2. How long a sharded checkpoint stops training, saved synchronously and asynchronously.
3. Bytes sent and checkpoints, by running lesson 3.5 and taking its table.

Writes sharded-DATE-DEVICE.md and .json. Uses GPUs if there are two.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import nbformat
import torch
from measuring import ENVIRONMENT, HERE, ROOT, calibration_line, compare, machine, reached
from nbclient import NotebookClient

from shared import measure, models

PRESET, BATCH_SIZE, STEPS = ("124m", 32, 20) if torch.cuda.device_count() >= 2 else ("nano", 32, 20)
WINDOWS = 1280  # per epoch in the scripts
LESSON = ROOT / "03-fsdp-deepspeed/05_choosing.ipynb"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FSDP2, ZERO = "03-fsdp-deepspeed/train_ray_fsdp2.py", "03-fsdp-deepspeed/train_ray_deepspeed.py"
STRATEGIES = {
    "DDP": ("benchmarks/ddp_memory.py",),
    "FSDP2": (FSDP2,),
    "FSDP2, kept": (FSDP2, "--no-reshard-after-forward"),
    "FSDP2, bf16": (FSDP2, "--precision", "bf16"),
    "FSDP2, activation checkpointing": (FSDP2, "--activation-checkpointing"),
    "ZeRO-0": (ZERO, "--zero-stage", "0"),
    "ZeRO-1": (ZERO, "--zero-stage", "1"),
    "ZeRO-2": (ZERO, "--zero-stage", "2"),
    "ZeRO-3": (ZERO, "--zero-stage", "3"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each strategy, in turn (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="default: benchmarks/results")
    args = parser.parse_args()
    result = {"date": time.strftime("%Y-%m-%d"), "repeats": args.repeats, "preset": PRESET, "batch_size": BATCH_SIZE}
    result |= machine()
    result["strategies"] = strategies(args.repeats)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "save.json")
        subprocess.run([*TORCHRUN, HERE / "sharded_save.py", PRESET, "4", out], env=ENVIRONMENT, check=True)
        result["save"] = json.loads(out.read_text())
    result["lesson"] = lesson_table()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"sharded-{result['date']}-{re.sub('[^a-z0-9]+', '-', result['device'].lower()).strip('-')}"
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(report(result))
    print(f"\n{report(result)}\nwritten: {path}.md and .json")


def strategies(repeats: int) -> dict:
    """Measure each strategy in its second epoch, after a first one to warm up."""
    lines = {name: [] for name in STRATEGIES}
    for number in range(1, repeats + 1):
        for name, (script, *more) in STRATEGIES.items():
            with tempfile.TemporaryDirectory() as folder:
                metrics, sizes = Path(folder, "metrics.jsonl"), Path(folder, "sizes.json")
                command = [*TORCHRUN, ROOT / script]
                if name == "DDP":  # its script does not measure memory
                    command += [sizes, "--dataset", "text"]
                command += ["--num-workers", "0", "--preset", PRESET, "--batch-size", str(BATCH_SIZE)]
                command += ["--max-steps", str(WINDOWS // BATCH_SIZE + STEPS), "--metrics-out", metrics, *more]
                subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
                measured = json.loads(sizes.read_text()) if sizes.exists() else {}
                lines[name].append(json.loads(metrics.read_text().splitlines()[-1]) | measured)
            print(f"[{number}/{repeats}] {name}: {lines[name][-1]['samples_per_second']:.0f} windows/s", flush=True)
    context = models.GPT_PRESETS[PRESET].context
    rates = {name: [line["samples_per_second"] * context for line in lines[name]] for name in lines}
    return {
        name: {
            **compare(rates["DDP"], rates[name]),
            **{key: lines[name][-1][key] for key in ("state_bytes_per_rank", "peak_memory_bytes", "val_loss")},
            "last_loss": lines[name][-1]["step_losses"][-1],
        }
        for name in lines
    }


def lesson_table() -> str:
    """Run lesson 3.5 and return the table of its section 7 in Markdown."""
    lesson = nbformat.read(LESSON, as_version=4)
    NotebookClient(lesson, timeout=600, resources={"metadata": {"path": LESSON.parent}}).execute()
    outputs = [output.get("data", {}) for cell in lesson.cells for output in cell.get("outputs", [])]
    return next(data["text/markdown"] for data in outputs if "text/markdown" in data)


def predicted_state_bytes(name: str, preset: str) -> float:
    """Return the bytes of state per rank by the formula in `shared.measure`."""
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in models.GPT(models.GPT_PRESETS[preset]).parameters())
    precision = "bf16" if "bf16" in name else "fp32"
    return measure.predicted_state_bytes(name.lower().split(",")[0], precision, num_parameters, 2)


def report(result: dict) -> str:
    """Render the result as a Markdown page."""
    page = f"""# DDP, FSDP2 and ZeRO on {result["device"]}, {result["date"]}

GPT `{result["preset"]}`, two processes, global batch {result["batch_size"]}. CPU: {result["cpu"]}, {result["cpus"]} of
them; GPUs: {result["gpus"]}; {result["system"]}; Python {result["python"]}, torch {result["torch"]}. One thread per
process. The strategies ran in turn, {result["repeats"]} times each. A rate is the median of these runs. A ratio
compares two medians, and its range is that of single rounds. A tracker of memory slows down each epoch's last step.
{calibration_line(result)}
| | state per rank, MB | by formula | peak, MB | tokens/s | over DDP | range | last loss |
|---|---:|---:|---:|---:|---:|---:|---:|
"""
    for name, line in result["strategies"].items():
        expected = predicted_state_bytes(name, result["preset"])
        sizes = (line["state_bytes_per_rank"], expected, line["peak_memory_bytes"])
        cells = [f"{size / 1e6:.1f}" for size in sizes]
        cells += [f"{median(line['measured']):.0f}", f"{line['ratio']:.2f}"]
        cells += [f"{line['lowest']:.2f} to {line['highest']:.2f}", f"{line['last_loss']:.6f}"]
        page += f"| {name} | {' | '.join(cells)} |\n"
    tokens = WINDOWS * models.GPT_PRESETS[result["preset"]].context
    rates = {name: median(line["measured"]) for name, line in result["strategies"].items()}
    slowest = tokens / min(rates.values())
    recomputing = rates["FSDP2"] / rates["FSDP2, activation checkpointing"]
    save = {name: median(seconds) for name, seconds in result["save"].items()}
    stall_ratio = save["async_still"] / save["sync_still"]
    return (
        page
        + f"""
The slowest strategy takes **{slowest:.1f} s** for an epoch of {WINDOWS} windows; goal for `nano`, below 30 s: \
{reached(slowest < 30)}.
A step with activation checkpointing takes **{recomputing:.2f}** times as long as FSDP2 alone, goal 1.05 to 1.80: \
{reached(1.05 < recomputing < 1.8)}.

## Saving a sharded checkpoint

FSDP2, two ranks, median of five. A synchronous save stops training for **{save["sync_still"]:.3f} s**, and an
asynchronous one for **{save["async_still"]:.3f} s**. That is **{stall_ratio:.2f}** of it, goal below 0.50: \
{reached(stall_ratio < 0.5)}.
During the asynchronous save the next steps take {save["steps_meanwhile"]:.2f} s instead of {save["steps_alone"]:.2f} s,
because the files are written at the same time.

## The table of lesson 3.5

Two Ray workers, global batch 16, eight steps of each strategy in one worker group. For speeds use the first table,
which comes from longer runs with a larger batch.

{result["lesson"]}
"""
    )


if __name__ == "__main__":
    main()
