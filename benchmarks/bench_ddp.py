"""Measure how close data-parallel training on this machine comes to its upper limit. Measures two ratios of speeds:

1. train_ddp.py in one process over a hand-written loop: the cost of the script's machinery.
2. Two ranks under torchrun over two independent processes at the same time: the cost of communication, for several
   batch sizes and accumulation steps. Also the time of an all-reduce for several sizes.

Writes ddp-DATE-DEVICE.md, .json and .svg. Uses GPUs if there are any; the second part then needs two.
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

import torch
import torch.distributed as dist
from measuring import BATCH_SIZE, ENVIRONMENT, HERE, ROOT, calibration_line, compare, machine, reached

from shared import plots

GOAL_ONE, GOAL_TWO = 0.97, 0.90
ACCUMULATED = {(32, n) for n in (1, 2, 4, 8)}  # (local batch, accumulation)
LARGER = {(16 * 2**n, 1) for n in range(9 if torch.cuda.is_available() else 5)}
ALL_REDUCE_BYTES, ALL_REDUCE_TIMES = (4, 4_000, 400_000, 4_000_000, 45_000_000, 128_000_000), 15
# Samples per process in a turn, and the maximum number of optimizer steps: some three seconds.
TURN_SAMPLES, TURN_STEPS = (65536, 400) if torch.cuda.is_available() else (512, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4, help="alternating runs of each side (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="half a minute as a smoke test, with meaningless numbers")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results, with --quick runs/bench-quick")
    args = parser.parse_args()
    repeats = 1 if args.quick else max(1, args.repeats)
    started = time.perf_counter()
    result = {"date": time.strftime("%Y-%m-%d"), "quick": args.quick, "repeats": repeats, **machine(args.quick)}
    result["one_process"] = one_process(repeats, args.quick)
    if result["gpus"] == 1:
        result["two_processes"], result["all_reduce"] = [], []
    else:
        result["two_processes"], result["all_reduce"] = two_processes(repeats, args.quick)
    result["seconds"] = round(time.perf_counter() - started)

    out = args.out or (ROOT / "runs" / "bench-quick" if args.quick else HERE / "results")
    out.mkdir(parents=True, exist_ok=True)
    name = f"ddp-{result['date']}-{re.sub('[^a-z0-9]+', '-', result['device'].lower()).strip('-')}"
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / f"{name}.md").write_text(report(result, f"{name}.svg"))
    if result["two_processes"]:
        draw(result, out / f"{name}.svg")
    print(f"\n{report(result, f'{name}.svg')}\nwritten: {out / name}.md and more")


def one_process(repeats: int, quick: bool) -> dict:
    """Compare the samples per second of train_ddp.py and the bare loop in their last epoch, after one to warm up."""
    epochs, steps = (1, 3) if quick else (2, 20)
    bare, script = [], []
    for number in range(1, repeats + 1):
        command = [sys.executable, HERE / "bare_loop.py", str(epochs), str(steps), str(BATCH_SIZE)]
        printed = subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE).stdout
        bare.append(json.loads(printed)[-1])
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, ROOT / "01-ddp-pytorch-only" / "train_ddp.py", "--epochs", str(epochs),
                       "--max-steps", str(epochs * steps), "--batch-size", str(BATCH_SIZE),
                       "--storage-path", folder, "--metrics-out", f"{folder}/metrics.jsonl"]  # fmt: skip
            subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
            lines = Path(folder, "metrics.jsonl").read_text().splitlines()
        script.append(json.loads(lines[-1])["samples_per_second"])
        print(f"[{number}/{repeats}] bare {bare[-1]:.0f}, train_ddp.py {script[-1]:.0f} samples/s", flush=True)
    return compare(bare, script)


def two_processes(repeats: int, quick: bool) -> tuple[list[dict], list[list]]:
    """Compare two ranks with two independent processes for each (local batch, accumulation), and time all-reduces.

    Returns the comparisons, and a list of [bytes, seconds] per all-reduce. Both pairs of processes start once and take
    turns. A pair without an order sleeps. A pair's rate is the sum of the rates of its two processes.
    """
    points = [(32, 1), (32, 2)] if quick else sorted(LARGER | ACCUMULATED)
    rates = {point: {"independent": [], "ddp": []} for point in points}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(HERE / "ddp_step.py"), str(store.port)]
    commands = [[*torchrun, *program, "ddp"]] + [[sys.executable, *program, "independent", i] for i in "01"]
    processes = [subprocess.Popen(command, env=ENVIRONMENT) for command in commands]
    try:
        for turn in range(repeats * len(points)):
            point = batch, accumulation = points[turn % len(points)]
            steps = 1 if quick else max(2, min(TURN_STEPS, TURN_SAMPLES // (batch * accumulation)))
            for side, measured in rates[point].items():
                store.set(f"{side}-{turn}", json.dumps([batch, accumulation, steps]))
                measured.append(sum(wait_for(store, f"{side}-{turn}-rate-{i}", processes) for i in (0, 1)))
            last = ", ".join(f"{side} {measured[-1]:.0f}" for side, measured in rates[point].items())
            print(f"[{turn + 1}/{repeats * len(points)}] {batch} x {accumulation}: {last} samples/s", flush=True)
        turn = repeats * len(points)
        sizes, times = (ALL_REDUCE_BYTES[:3], 1) if quick else (ALL_REDUCE_BYTES, ALL_REDUCE_TIMES)
        store.set(f"ddp-{turn}", json.dumps({"all_reduce": sizes, "times": times}))
        all_reduce = [[size, wait_for(store, f"ddp-{turn}-{size}-0", processes)] for size in sizes]
        for side, last_turn in {"independent": turn, "ddp": turn + 1}.items():
            store.set(f"{side}-{last_turn}", "null")  # the order to exit
        for process in processes:
            process.wait(timeout=600)
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    return [
        {"local_batch": batch, "accumulation": accumulation, **compare(sides["independent"], sides["ddp"])}
        for (batch, accumulation), sides in rates.items()
    ], all_reduce


def wait_for(store: dist.TCPStore, key: str, processes: list[subprocess.Popen]) -> float:
    """Wait for the number that a process puts into the store. Raises RuntimeError if a process ends instead."""
    while not store.check([key]):
        if ended := [process for process in processes if process.poll() is not None]:
            raise RuntimeError(f"a process ended with exit code {ended[0].returncode}: {ended[0].args}")
        time.sleep(0.1)
    return float(store.get(key))


def report(result: dict, figure: str) -> str:
    """Render the result as a Markdown page."""

    def cells(row: dict) -> str:
        rates = f"{median(row['baseline']):.0f} | {median(row['measured']):.0f}"
        return f"{rates} | {row['ratio']:.3f} | {row['lowest']:.3f} to {row['highest']:.3f}"

    def verdict(ratio: float, goal: float) -> str:
        return f"**{ratio:.3f}**, goal {goal:.2f}: {reached(ratio >= goal)}"

    one, two = result["one_process"], {(r["local_batch"], r["accumulation"]): r for r in result["two_processes"]}
    warning = "\n**A smoke run: its numbers mean nothing.**\n" if result["quick"] else ""
    page = f"""# DDP on {result["device"]}, {result["date"]}
{warning}
ResNet-18 with GroupNorm on 8x8 digits, Adam, float32, one thread per process. CPU: {result["cpu"]}, {result["cpus"]}
of them; GPUs: {result["gpus"]}; {result["system"]}; Python {result["python"]}, torch {result["torch"]}. The two sides
ran in turn, {result["repeats"]} times each. A rate is the median of these runs. A ratio compares two medians, and its
range is that of single pairs.
{calibration_line(result)}
## One process: train_ddp.py over a bare loop

| global batch | bare, samples/s | train_ddp.py, samples/s | ratio | range |
|---:|---:|---:|---:|---:|
| {BATCH_SIZE} | {cells(one)} |

Ratio {verdict(one["ratio"], GOAL_ONE)}.

## Two processes: DDP over two independent ones

"""
    if not two:
        return page + "Not measured: it needs two GPUs, and there is one (with CUDA_VISIBLE_DEVICES= it uses CPUs).\n"
    page += (
        "| local batch | accumulation | independent, samples/s | DDP, samples/s | ratio | range | added per step |\n"
    )
    page += "|---:|---:|---:|---:|---:|---:|---:|\n"
    for (batch, accumulation), row in two.items():
        added = 2 * batch * accumulation * (1 / median(row["measured"]) - 1 / median(row["baseline"]))
        page += f"| {batch} | {accumulation} | {cells(row)} | {1e3 * added:.0f} ms |\n"
    reaching = [f"{batch} x {n}" for (batch, n), row in two.items() if row["ratio"] >= GOAL_TWO]
    best, row = max(two.items(), key=lambda item: item[1]["ratio"])
    page += f"""
At the default, {BATCH_SIZE // 2} x 1 per rank: {verdict(two[BATCH_SIZE // 2, 1]["ratio"], GOAL_TWO)}.
Best, at {best[0]} x {best[1]}: {verdict(row["ratio"], GOAL_TWO)}.
Goal reached at (local batch x accumulation): {", ".join(reaching) or "none of those measured"}.

![The ratio over the samples per rank and step]({figure})
"""
    if "all_reduce" not in result:  # a result from before this part existed
        return page
    seconds = dict(result["all_reduce"])
    page += "\n## An all-reduce on two ranks\n\n| bytes | milliseconds |\n|---:|---:|\n"
    page += "".join(f"| {size:,} | {1e3 * value:.3f} |\n" for size, value in seconds.items())
    least, few, *_, most = seconds
    latency, bandwidth = seconds[few] / seconds[least], seconds[most] / seconds[few]
    return (
        page
        + f"""
Latency: {few:,} bytes take **{latency:.1f}** times as long as {least}, goal below 3: {reached(latency < 3)}.
Bandwidth: {most:,} bytes take **{bandwidth:.0f}** times as long as {few:,}, goal above 100: {reached(bandwidth > 100)}.
"""
    )


def draw(result: dict, path: Path) -> None:
    """Plot the ratio against the samples per rank and optimizer step, for larger batches and for accumulation."""
    title = f"Two ranks over two independent processes, {result['device']}"
    axes = plots.new_axes(title, "samples per rank in one optimizer step", "ratio of samples per second")
    for label, points in (("larger local batch", LARGER), ("accumulated batches of 32", ACCUMULATED)):
        rows = [row for row in result["two_processes"] if (row["local_batch"], row["accumulation"]) in points]
        samples = [row["local_batch"] * row["accumulation"] for row in rows]
        axes.plot(samples, [row["ratio"] for row in rows], marker="o", label=label)
        axes.fill_between(samples, [row["lowest"] for row in rows], [row["highest"] for row in rows], alpha=0.15)
    axes.axhline(GOAL_TWO, color=plots.COLORS[-1], linestyle=":", label=f"goal {GOAL_TWO:.2f}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right")
    axes.figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
