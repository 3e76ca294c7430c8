"""Measure what sending less gains in a fast network and in slow ones. Measures, between two nodes on this machine:

1. Eight ways of sending gradients, at 10 Gbit/s, 1 Gbit/s and 100 Mbit/s: milliseconds and bytes per batch.
2. All-reduces in two levels over flat ones, on two nodes with two ranks each, at 200 Mbit/s.
3. DDP's bucket size, at 100 Mbit/s.

Each node has its own network (a Linux network namespace), and one virtual wire joins them. Bytes are the kernel's count
of what a node sends over the wire. Needs Linux with `ip`, `tc` and `unshare`, but no root. If the system does not allow
this, it prints the reason and writes nothing. Writes network-DATE-DEVICE.md, .json and .svg.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from measuring import ENVIRONMENT, calibration_line, machine, reached

from shared import models, plots

HERE = Path(__file__).resolve().parent
OWN_NETWORK = ["unshare", "--user", "--map-root-user", "--net", "bash", str(HERE / "two_nodes.sh")]
SHAPES = [tuple(parameter.shape) for parameter in models.MLP(64, 768).parameters()]
GRADIENT_BYTES = 4 * sum(parameter.numel() for parameter in models.MLP(64, 768).parameters())  # bytes of all gradients
FACTOR_BYTES, VECTOR_BYTES = (4 * sum(sum(shape) for shape in SHAPES if len(shape) == n) for n in (2, 1))
BASELINE = "baseline"  # DDP without a hook
EXPECTED = {  # bytes per batch that each of two nodes sends, without headers
    BASELINE: GRADIENT_BYTES,
    "fp16": GRADIENT_BYTES / 2,
    "bf16": GRADIENT_BYTES / 2,
    "PowerSGD 1": FACTOR_BYTES + VECTOR_BYTES,
    "PowerSGD 4": 4 * FACTOR_BYTES + VECTOR_BYTES,
    "fp16 PowerSGD 4": (4 * FACTOR_BYTES + VECTOR_BYTES) / 2,
    "accumulate 4": GRADIENT_BYTES / 4,
    "local SGD 4": GRADIENT_BYTES / 4,
}
NETWORKS, SLOW, LINK = (10_000, 1000, 100), 100, 200  # Mbit/s
# How many times as fast as the baseline a batch should be at 100 Mbit/s.
GOALS = {"fp16": 1.7, "bf16": 1.7, "PowerSGD 1": 5, "PowerSGD 4": 3.5, "accumulate 4": 3, "local SGD 4": 3}
GOAL_LEVELS, GOAL_BYTES, GOAL_BUCKETS = 1.2, 0.02, 0.10
BUCKETS = {0.001: 5, 1: 2, 25: 1}  # MB at which DDP closes a bucket, and how many buckets that makes of this model
NUMBERS = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, in turn (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="half a minute as a smoke test, with meaningless numbers")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results, with --quick runs/bench-quick")
    args = parser.parse_args()
    if problem := unavailable_reason():
        print(f"not measured: this machine does not allow private network namespaces ({problem})")
        return
    repeats = 1 if args.quick else max(1, args.repeats)
    started = time.perf_counter()
    result = {"date": time.strftime("%Y-%m-%d"), "quick": args.quick, "repeats": repeats, **machine(args.quick)}
    result |= measure(repeats, args.quick)
    result["seconds"] = round(time.perf_counter() - started)

    out = args.out or (HERE.parent / "runs" / "bench-quick" if args.quick else HERE / "results")
    out.mkdir(parents=True, exist_ok=True)
    name = f"network-{result['date']}-{re.sub('[^a-z0-9]+', '-', result['device'].lower()).strip('-')}"
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / f"{name}.md").write_text(report(result, f"{name}.svg"))
    draw(result, out / f"{name}.svg")
    print(f"\n{report(result, f'{name}.svg')}\nwritten: {out / name}.md and more")


def unavailable_reason() -> str:
    """Return why two nodes are not available on this machine, or "" if they are."""
    try:
        attempt = subprocess.run(OWN_NETWORK, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return (attempt.stderr.strip() or f"exit code {attempt.returncode}") if attempt.returncode else ""


def measure(repeats: int, quick: bool) -> dict:
    """Measure all three parts, each configuration in turn, and group the results."""
    steps = 4 if quick else 16
    ways = [(mbit, way) for mbit in (NETWORKS[-1:] if quick else NETWORKS) for way in EXPECTED]
    sizes = [25] if quick else list(BUCKETS)
    training = {"do": "train", "steps": steps}
    orders = [{**training, "mbit": mbit, "way": way, "bucket_mb": 100} for mbit, way in ways]
    orders += [{**training, "mbit": SLOW, "way": BASELINE, "bucket_mb": size} for size in sizes]
    sum_orders = [{"do": "sum", "mbit": LINK, "numbers": NUMBERS, "times": 2 if quick else 10, "way": way}
                  for way in ("flat", "hierarchical")]  # fmt: skip
    train_runs, sum_runs = run_orders(1, repeats * orders), run_orders(2, repeats * sum_orders)
    result = {"ways": [], "buckets": {"mbit": SLOW, "ms": {}, "all_ms": {}}}
    for index, (mbit, way) in enumerate(ways):
        runs = train_runs[index :: len(orders)]
        all_ms = [run["ms"] for run in runs]
        wire = median(run["wire"] for run in runs)
        result["ways"].append({"mbit": mbit, "way": way, "ms": median(all_ms), "all_ms": all_ms, "wire": wire})
    for index, size in enumerate(sizes, start=len(ways)):
        all_ms = [run["ms"] for run in train_runs[index :: len(orders)]]
        result["buckets"]["ms"][str(size)], result["buckets"]["all_ms"][str(size)] = median(all_ms), all_ms
    levels = result["levels"] = {"mbit": LINK, "bytes": 4 * NUMBERS, "ms": {}, "all_ms": {}, "wire": {}}
    for index, order in enumerate(sum_orders):
        runs = sum_runs[index :: len(sum_orders)]
        levels["all_ms"][order["way"]] = [run["ms"] for run in runs]
        levels["ms"][order["way"]] = median(run["ms"] for run in runs)
        levels["wire"][order["way"]] = median(run["wire"] for run in runs)
    return result


def run_orders(ranks_per_node: int, orders: list[dict]) -> list[dict]:
    """Run `orders` on the ranks of two nodes, and return the measurements of rank 0."""
    # The socket library would warn that addresses in a private network have no names.
    environment = {**ENVIRONMENT, "TORCH_CPP_LOG_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"  # for torchrun
    with tempfile.TemporaryDirectory() as folder:
        orders_path, results_path = Path(folder, "orders.json"), Path(folder, "results.json")
        orders_path.write_text(json.dumps(orders))
        command = [*OWN_NETWORK, ranks_per_node, HERE / "network_ranks.py", orders_path, results_path]
        subprocess.run(list(map(str, command)), env=environment, check=True)
        return json.loads(results_path.read_text())


def format_range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def report(result: dict, figure: str) -> str:
    """Render the result as a Markdown page."""
    ways = {(row["mbit"], row["way"]): row for row in result["ways"]}
    num_parameters = GRADIENT_BYTES // 4
    networks = sorted({mbit for mbit, _ in ways}, reverse=True)
    warning = "\n**A smoke run: its numbers mean nothing.**\n" if result["quick"] else ""
    page = f"""# A slow network on {result["device"]}, {result["date"]}
{warning}
Two nodes of one machine, each in a network namespace, joined by one wire of limited rate; gloo, one thread per rank. A
network of three linear layers with {num_parameters:,} parameters on 8x8 digits, SGD, 32 samples per rank and batch;
hooks start after 8 batches without them, which are not measured. CPU: {result["cpu"]}, {result["cpus"]} of them;
{result["system"]}; Python {result["python"]}, torch {result["torch"]}. Milliseconds are medians of runs in turn,
{result["repeats"]} of each; a ratio is that of the medians, its range that of single pairs.
{calibration_line(result)}
## Eight ways to send gradients

| way | {" | ".join(f"ms per batch at {mbit:,} Mbit/s" for mbit in networks)} | kB sent | expected |
|---|{"---:|" * len(networks)}---:|---:|
"""
    for way, size in EXPECTED.items():
        cells = " | ".join(f"{ways[mbit, way]['ms']:.1f}" for mbit in networks)
        page += f"| {way} | {cells} | {ways[SLOW, way]['wire'] / 1e3:,.1f} | {size / 1e3:,.1f} |\n"
    deviations = [abs(row["wire"] / EXPECTED[row["way"]] - 1) for row in result["ways"] if EXPECTED[row["way"]] > 1e6]
    page += f"""
Bytes sent are those of one node over the wire, headers and acknowledgements included, at {SLOW} Mbit/s. Where more than
a megabyte is expected, over all networks the kernel's count is at most **{max(deviations):.2%}** away from it, goal
{GOAL_BYTES:.0%}: {reached(max(deviations) <= GOAL_BYTES)}.

How many times as fast as the baseline:

| way | {" | ".join(f"at {mbit:,} Mbit/s (range)" for mbit in networks)} | goal at {SLOW} Mbit/s |
|---|{"---:|" * len(networks)}---|
"""
    for way in list(EXPECTED)[1:]:
        cells = []
        for mbit in networks:
            before, after = ways[mbit, BASELINE], ways[mbit, way]
            pairs = [a / b for a, b in zip(before["all_ms"], after["all_ms"], strict=True)]
            ratio = before["ms"] / after["ms"]
            cells.append(f"{ratio:.2f} ({format_range(pairs)})")
        goal = f"{GOALS[way]:g}: {reached(ratio >= GOALS[way])}" if way in GOALS else ""  # in the last, slowest network
        page += f"| {way} | {' | '.join(cells)} | {goal} |\n"
    levels, buckets = result["levels"], result["buckets"]
    flat_ms, hierarchical_ms = (levels["ms"][way] for way in ("flat", "hierarchical"))
    speedups = format_range([a / b for a, b in zip(*levels["all_ms"].values(), strict=True)])
    formula = {"flat": 2 * 3 / 4 * levels["bytes"], "hierarchical": 2 * 1 / 2 * levels["bytes"]}
    page += f"""
![Milliseconds per batch, by way and network]({figure})

## An all-reduce in two levels

{levels["bytes"]:,} bytes, two nodes with two ranks each, {levels["mbit"]} Mbit/s between them.

| sum | ms | MB sent per node | expected |
|---|---:|---:|---:|
"""
    for way, size in formula.items():
        page += f"| {way} | {levels['ms'][way]:.0f} | {levels['wire'][way] / 1e6:.2f} | {size / 1e6:.2f} |\n"
    deviation = max(abs(levels["wire"][way] / size - 1) for way, size in formula.items())
    speedup = flat_ms / hierarchical_ms
    spread = max(buckets["ms"].values()) / min(buckets["ms"].values()) - 1
    return (
        page
        + f"""
Expected: 2(W-1)/W of the bytes for W ranks in a flat ring, 2(N-1)/N for N nodes. At most **{deviation:.2%}** away, goal
{GOAL_BYTES:.0%}: {reached(deviation <= GOAL_BYTES)}. Hierarchical is **{speedup:.2f}** times as fast ({speedups}),
goal {GOAL_LEVELS:g}: {reached(speedup >= GOAL_LEVELS)}.

## Bucket size

The baseline, at {buckets["mbit"]} Mbit/s.

| `bucket_cap_mb` | buckets | ms per batch |
|---:|---:|---:|
{"".join(f"| {size} | {BUCKETS[float(size)]} | {ms:.1f} |{chr(10)}" for size, ms in buckets["ms"].items())}
From the best to the worst: **{spread:.1%}**. Expected to matter little, less than {GOAL_BUCKETS:.0%}:
{reached(spread < GOAL_BUCKETS)}.
"""
    )


def draw(result: dict, path: Path) -> None:
    """Plot the milliseconds per batch: a row for each way, a color for each network."""
    axes = plots.new_axes("Eight ways to send gradients between two nodes", "milliseconds per batch", size=(7, 3.6))
    names = list(dict.fromkeys(row["way"] for row in result["ways"]))
    for color, mbit in zip(plots.COLORS, sorted({row["mbit"] for row in result["ways"]}, reverse=True), strict=False):
        for label, row in enumerate(row for row in result["ways"] if row["mbit"] == mbit):
            height = [names.index(row["way"])] * len(row["all_ms"])
            axes.plot(row["all_ms"], height, "o", color=color, alpha=0.7, label=None if label else f"{mbit:,} Mbit/s")
    axes.set_yticks(range(len(names)), names)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.grid(axis="both", alpha=0.25)
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    axes.figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
