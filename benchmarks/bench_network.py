"""What does it bring to send less, in a fast network and in slow ones? Measures, between two nodes of this machine:

1. Eight ways of sending gradients, at 10 Gbit/s, 1 Gbit/s and 100 Mbit/s: milliseconds a batch, and bytes.
2. All-reduces in two levels over flat ones, two nodes with two ranks each, at 200 Mbit/s.
3. DDP's bucket size, at 100 Mbit/s.

Each node has a network of its own (a Linux network namespace), and one wire joins them. Bytes are the kernel's count of
what a node sends over it. Needs Linux with `ip`, `tc` and `unshare`, and no root; where that is refused it says so, and
writes nothing. Writes network-DATE-DEVICE.md, .json and .svg.
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

from measuring import ENVIRONMENT, calibrated, machine, reached

from shared import models, plots

HERE = Path(__file__).resolve().parent
OWN_NETWORK = ["unshare", "--user", "--map-root-user", "--net", "bash", str(HERE / "two_nodes.sh")]
SHAPES = [tuple(parameter.shape) for parameter in models.MLP(64, 768).parameters()]
WHOLE = 4 * sum(parameter.numel() for parameter in models.MLP(64, 768).parameters())  # bytes of all gradients
SIDES, VECTORS = (4 * sum(sum(shape) for shape in SHAPES if len(shape) == n) for n in (2, 1))
EXPECTED = {  # bytes a batch that each of two nodes sends, headers apart
    "as ever": WHOLE,
    "fp16": WHOLE / 2,
    "bf16": WHOLE / 2,
    "PowerSGD 1": SIDES + VECTORS,
    "PowerSGD 4": 4 * SIDES + VECTORS,
    "fp16 PowerSGD 4": (4 * SIDES + VECTORS) / 2,
    "accumulate 4": WHOLE / 4,
    "local SGD 4": WHOLE / 4,
}
NETWORKS, SLOW, LINK = (10_000, 1000, 100), 100, 200  # Mbit/s
# How many times as fast as ever a batch should be at 100 Mbit/s.
GOALS = {"fp16": 1.7, "bf16": 1.7, "PowerSGD 1": 5, "PowerSGD 4": 3.5, "accumulate 4": 3, "local SGD 4": 3}
GOAL_LEVELS, GOAL_BYTES, GOAL_BUCKETS = 1.2, 0.02, 0.10
BUCKETS = {0.001: 5, 1: 2, 25: 1}  # MB at which DDP closes a bucket, and how many buckets that makes of this model
NUMBERS = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, in turn (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke run: half a minute, and its numbers mean nothing")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results, with --quick runs/bench-quick")
    args = parser.parse_args()
    if problem := refused():
        print(f"not measured: this machine allows no networks of one's own ({problem})")
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


def refused() -> str:
    """Why two nodes cannot be had on this machine, or nothing where they can."""
    try:
        tried = subprocess.run(OWN_NETWORK, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return (tried.stderr.strip() or f"exit code {tried.returncode}") if tried.returncode else ""


def measure(repeats: int, quick: bool) -> dict:
    """All three parts: what was asked for in turn, grouped by what it belongs to."""
    steps = 4 if quick else 16
    ways = [(mbit, way) for mbit in (NETWORKS[-1:] if quick else NETWORKS) for way in EXPECTED]
    sizes = [25] if quick else list(BUCKETS)
    order = {"do": "train", "steps": steps}
    orders = [{**order, "mbit": mbit, "way": way, "bucket_mb": 100} for mbit, way in ways]
    orders += [{**order, "mbit": SLOW, "way": "as ever", "bucket_mb": size} for size in sizes]
    sums = [{"do": "sum", "mbit": LINK, "numbers": NUMBERS, "times": 2 if quick else 10, "way": way}
            for way in ("flat", "hierarchical")]  # fmt: skip
    trained, added = ordered(1, repeats * orders), ordered(2, repeats * sums)

    def turns(done: list[dict], number: int, among: list) -> list[dict]:
        return done[number :: len(among)]

    found = {"ways": [], "buckets": {"mbit": SLOW, "ms": {}, "all_ms": {}}}
    for number, (mbit, way) in enumerate(ways):
        runs = turns(trained, number, orders)
        all_ms = [run["ms"] for run in runs]
        wire = median(run["wire"] for run in runs)
        found["ways"].append({"mbit": mbit, "way": way, "ms": median(all_ms), "all_ms": all_ms, "wire": wire})
    for number, size in enumerate(sizes, start=len(ways)):
        all_ms = [run["ms"] for run in turns(trained, number, orders)]
        found["buckets"]["ms"][str(size)], found["buckets"]["all_ms"][str(size)] = median(all_ms), all_ms
    levels = found["levels"] = {"mbit": LINK, "bytes": 4 * NUMBERS, "ms": {}, "all_ms": {}, "wire": {}}
    for number, one in enumerate(sums):
        runs = turns(added, number, sums)
        levels["all_ms"][one["way"]] = [run["ms"] for run in runs]
        levels["ms"][one["way"]] = median(run["ms"] for run in runs)
        levels["wire"][one["way"]] = median(run["wire"] for run in runs)
    return found


def ordered(ranks_a_node: int, orders: list[dict]) -> list[dict]:
    """Let the ranks of two nodes work through `orders`; what the first of them measured."""
    # The socket library would warn that addresses in a network of one's own have no names.
    environment = {**ENVIRONMENT, "TORCH_CPP_LOG_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"  # for torchrun
    with tempfile.TemporaryDirectory() as folder:
        asked, got = Path(folder, "orders.json"), Path(folder, "results.json")
        asked.write_text(json.dumps(orders))
        command = [*OWN_NETWORK, str(ranks_a_node), str(HERE / "network_ranks.py"), str(asked), str(got)]
        subprocess.run(command, env=environment, check=True)
        return json.loads(got.read_text())


def between(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def report(result: dict, figure: str) -> str:
    """The result as a Markdown page."""
    ways = {(row["mbit"], row["way"]): row for row in result["ways"]}
    networks = sorted({mbit for mbit, _ in ways}, reverse=True)
    warning = "\n**A smoke run: its numbers mean nothing.**\n" if result["quick"] else ""
    page = f"""# A slow network on {result["device"]}, {result["date"]}
{warning}
Two nodes of one machine, each in a network namespace, joined by one wire of limited rate; gloo, one thread a rank. A
network of three linear layers with {WHOLE // 4:,} parameters on 8x8 digits, SGD, 32 samples a rank and batch; hooks
start after 8 batches as ever, which are not measured. CPU: {result["cpu"]}, {result["cpus"]} of them;
{result["system"]}; Python {result["python"]}, torch {result["torch"]}. Milliseconds are medians of runs in turn,
{result["repeats"]} of each; a ratio is that of the medians, its range that of single pairs.
{calibrated(result)}
## Eight ways to send gradients

| way | {" | ".join(f"ms a batch at {mbit:,} Mbit/s" for mbit in networks)} | kB sent | expected |
|---|{"---:|" * len(networks)}---:|---:|
"""
    for way, size in EXPECTED.items():
        cells = " | ".join(f"{ways[mbit, way]['ms']:.1f}" for mbit in networks)
        page += f"| {way} | {cells} | {ways[SLOW, way]['wire'] / 1e3:,.1f} | {size / 1e3:,.1f} |\n"
    large = [abs(row["wire"] / EXPECTED[row["way"]] - 1) for row in result["ways"] if EXPECTED[row["way"]] > 1e6]
    page += f"""
Bytes sent are those of one node over the wire, headers and acknowledgements included, at {SLOW} Mbit/s. Where more than
a megabyte is expected, over all networks the kernel's count is at most **{max(large):.2%}** away from it, goal
{GOAL_BYTES:.0%}: {reached(max(large) <= GOAL_BYTES)}.

How many times as fast as ever:

| way | {" | ".join(f"at {mbit:,} Mbit/s (range)" for mbit in networks)} | goal at {SLOW} Mbit/s |
|---|{"---:|" * len(networks)}---|
"""
    for way in list(EXPECTED)[1:]:
        cells = []
        for mbit in networks:
            ever, ours = ways[mbit, "as ever"], ways[mbit, way]
            pairs = [a / b for a, b in zip(ever["all_ms"], ours["all_ms"], strict=True)]
            ratio = ever["ms"] / ours["ms"]
            cells.append(f"{ratio:.2f} ({between(pairs)})")
        goal = f"{GOALS[way]:g}: {reached(ratio >= GOALS[way])}" if way in GOALS else ""  # the last one is the slowest
        page += f"| {way} | {' | '.join(cells)} | {goal} |\n"
    levels, buckets = result["levels"], result["buckets"]
    flat, ours = (levels["ms"][way] for way in ("flat", "hierarchical"))
    pairs = [a / b for a, b in zip(*levels["all_ms"].values(), strict=True)]
    formula = {"flat": 2 * 3 / 4 * levels["bytes"], "hierarchical": 2 * 1 / 2 * levels["bytes"]}
    page += f"""
![Milliseconds a batch, by way and network]({figure})

## An all-reduce in two levels

{levels["bytes"]:,} bytes, two nodes with two ranks each, {levels["mbit"]} Mbit/s between them.

| sum | ms | MB a node sent | expected |
|---|---:|---:|---:|
"""
    for way, size in formula.items():
        page += f"| {way} | {levels['ms'][way]:.0f} | {levels['wire'][way] / 1e6:.2f} | {size / 1e6:.2f} |\n"
    away = max(abs(levels["wire"][way] / size - 1) for way, size in formula.items())
    spread = max(buckets["ms"].values()) / min(buckets["ms"].values()) - 1
    return (
        page
        + f"""
Expected: 2(W-1)/W of the bytes for W ranks in a flat ring, 2(N-1)/N for N nodes. At most **{away:.2%}** away, goal
{GOAL_BYTES:.0%}: {reached(away <= GOAL_BYTES)}. Hierarchical is **{flat / ours:.2f}** times as fast ({between(pairs)}),
goal {GOAL_LEVELS:g}: {reached(flat / ours >= GOAL_LEVELS)}.

## Bucket size

As ever, at {buckets["mbit"]} Mbit/s.

| `bucket_cap_mb` | buckets | ms a batch |
|---:|---:|---:|
{"".join(f"| {size} | {BUCKETS[float(size)]} | {ms:.1f} |{chr(10)}" for size, ms in buckets["ms"].items())}
From the best to the worst: **{spread:.1%}**. Expected to matter little, less than {GOAL_BUCKETS:.0%}:
{reached(spread < GOAL_BUCKETS)}.
"""
    )


def draw(result: dict, path: Path) -> None:
    """Milliseconds a batch: a row for each way, a dot for each network."""
    axes = plots.new_axes("Eight ways to send gradients between two nodes", "milliseconds a batch", size=(7, 3.6))
    names = list(EXPECTED)
    for color, mbit in zip(plots.COLORS, sorted({row["mbit"] for row in result["ways"]}, reverse=True), strict=False):
        for label, row in enumerate(row for row in result["ways"] if row["mbit"] == mbit):
            place = [names.index(row["way"])] * len(row["all_ms"])
            axes.plot(row["all_ms"], place, "o", color=color, alpha=0.7, label=None if label else f"{mbit:,} Mbit/s")
    axes.set_yticks(range(len(names)), names)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.grid(axis="both", alpha=0.25)
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    axes.figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
