"""Check whether training has become slower between two checkouts of this repository. Raises an alarm above 10 %.

    python check_regression.py OLD NEW               two folders: about five minutes on two CPU cores
    python check_regression.py OLD.json NEW.json     two files of benchmarks/results: immediate, but weaker

A pair is one run of each checkout in a new process, in random order, so that other load on the machine affects both
alike. A run trains with its checkout's train_ddp.py on two ranks (on GPUs one rank per GPU, two at most). It counts
with the 25th percentile of the seconds per step, since disturbances only make steps longer. The verdict is the median
over the pairs. So neither slow steps nor a slow run or two change it.

The exit code is 1 for an alarm, and 2 if nothing can be compared.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import numpy as np

HERE = Path(__file__).resolve().parent
ALARM = 1.10  # new over old
SCRIPT = "01-ddp-pytorch-only/train_ddp.py"
BATCH_SIZE = 32  # over all ranks
LIMIT_S = 1800  # per run
# Fields of a result file that must be equal, and fields whose differences are printed.
MUST_AGREE = ("device", "cpus", "gpus", "threads_per_process", "python", "torch", "ray", "deepspeed")
MAY_DIFFER = ("date", "system", "calibration")


def run_seconds(step_seconds):
    """Return the seconds per step of a run, as little disturbed as possible."""
    return float(np.percentile(step_seconds, 25))


def slowdown(old, new):
    """Return the median of new over old, from the seconds per step of paired runs."""
    return math.exp(np.median(np.log(np.asarray(new) / np.asarray(old))))


class CannotCompare(Exception):
    """The inputs cannot be compared. The message says why and what to do."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        raise CannotCompare(f"{message} (see --help)")


def at_least_one(text: str) -> int:
    """Parse an option's value as a positive integer."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return int(text)


def main() -> bool:
    """Run the comparison that the command line selects, and return whether there is an alarm."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD", help="a checkout or a result file")
    parser.add_argument("new", type=Path, metavar="NEW", help="another one to compare with OLD")
    parser.add_argument("--pairs", type=at_least_one, default=8, help="runs of each checkout (default: %(default)s)")
    parser.add_argument("--steps", type=at_least_one, default=40, help="optimizer steps per run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order in each pair (default: %(default)s)")
    args = parser.parse_args()
    for path in (args.old, args.new):
        if not path.exists():
            raise CannotCompare(f"{path} does not exist")
        if path.is_dir() and not (path / SCRIPT).exists():
            raise CannotCompare(f"{path} is not a checkout of this repository: it has no {SCRIPT}")
    if args.old.is_dir() != args.new.is_dir():
        raise CannotCompare(f"{args.old} and {args.new}: give two checkouts or two files, not one of each")
    if args.steps < 4:
        raise CannotCompare(f"--steps {args.steps} is too few for a percentile: use 4 or more")
    return compare_checkouts(args) if args.old.is_dir() else compare_files(args.old, args.new)


# --- two checkouts ---------------------------------------------------------------------------------------------------


def compare_checkouts(args: argparse.Namespace) -> bool:
    """Run both checkouts in turn, print each pair and the verdict, and return whether there is an alarm."""
    checkouts = {"old": args.old.resolve(), "new": args.new.resolve()}
    pythons = {side: interpreter(list(checkouts.values()), folder) for side, folder in checkouts.items()}
    for side, folder in checkouts.items():
        print(f"{side}  {folder}, {commit(folder)}, run by {pythons[side]}")
    name, ranks = device()
    seconds, versions = {"old": [], "new": []}, {"old": [], "new": []}
    order = f"in an order drawn with seed {args.seed}"
    print(f"{args.pairs} pair{'s' * (args.pairs > 1)} of {args.steps} steps on {ranks} ranks, {order}", flush=True)
    for number, side in enumerate(first_of_each_pair(args.pairs, args.seed), start=1):
        for current in (side, "new" if side == "old" else "old"):
            result = run(checkouts[current], pythons[current], ranks, args.steps)
            versions[current].append(result["known"])
            seconds[current].append(run_seconds(result["step_seconds"]))
        old, new = seconds["old"][-1], seconds["new"][-1]
        numbers = f"old {old:.4f} s per step, new {new:.4f}, new/old {new / old:.3f}"
        print(f"pair {number}, {side} first: {numbers}", flush=True)
    print(f"device {name}; versions:", describe_versions(versions["old"][0], versions["new"][0]))
    return verdict(slowdown(seconds["old"], seconds["new"]), "a step of NEW takes")


def first_of_each_pair(pairs: int, seed: int) -> list[str]:
    """Return which side of each pair runs first: each side in half of the pairs, in an order drawn with `seed`."""
    first = ["old", "new"] * (pairs // 2) + ["old"] * (pairs % 2)
    random.Random(seed).shuffle(first)
    return first


def interpreter(checkouts: list[Path], folder: Path) -> str:
    """Return the path of a checkout's own Python if both checkouts have one, otherwise that of the running one."""
    own_python = Path(".venv/bin/python")
    both = all((checkout / own_python).exists() for checkout in checkouts)
    return str(folder / own_python) if both else sys.executable


def commit(folder: Path) -> str:
    """Describe the git commit of a checkout."""
    if shutil.which("git") is None:
        return "commit unknown"
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=8"]
    done = subprocess.run(git, capture_output=True, text=True)
    return f"commit {done.stdout.strip()}" if done.returncode == 0 else "no commit"


def device() -> tuple[str, int]:
    """Return the name of the GPU or CPU and the number of ranks: two, but at most one per GPU."""
    import torch  # takes two seconds, and comparing two files does not need it

    from shared.doctor import cpu_name

    gpus = torch.cuda.device_count()
    return (torch.cuda.get_device_name(), min(gpus, 2)) if gpus else (cpu_name(), 2)


def run(checkout: Path, python: str, ranks: int, steps: int) -> dict:
    """Train with a checkout's own code, and return the seconds of its steps and the versions."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file, output = Path(folder, "steps.json"), Path(folder, "output")
        launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        options = ["--batch-size", BATCH_SIZE, "--max-steps", steps, "--epochs", steps, "--storage-path", folder]
        command = [*launch, HERE / "step_times.py", checkout, file, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
        with open(output, "w") as out:
            process = subprocess.Popen(list(map(str, command)), env=environment, cwd=folder, stdout=out, stderr=out)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.terminate()  # torchrun then ends its ranks
            process.wait()
        if code != 0 or not file.exists():
            print(output.read_text(), file=sys.stderr)
            outcome = f"did not end within {LIMIT_S} s" if code is None else "failed"
            raise CannotCompare(f"a run of {checkout} {outcome}: see its output above")
        return json.loads(file.read_text())


def describe_versions(old: dict, new: dict) -> str:
    """Describe the versions that both sides share, and those that differ."""
    same = [f"{name} {value}" for name, value in old.items() if new.get(name) == value]
    differ = [f"{name} {old.get(name)} and {new.get(name)}" for name in old | new if old.get(name) != new.get(name)]
    return ", ".join(same) + (f"; DIFFERENT: {', '.join(differ)}" if differ else "; the same for both")


def verdict(factor: float, subject: str) -> bool:
    """Print the verdict, and return whether it is an alarm."""
    alarm = factor > ALARM
    print(f"{'ALARM' if alarm else 'fine'}: {subject} {factor:.3f} times as long (alarm above {ALARM:.2f})")
    return alarm


# --- two files -------------------------------------------------------------------------------------------------------


def compare_files(old_file: Path, new_file: Path) -> bool:
    """Compare the speed ratios in two result files, and return whether there is an alarm."""
    old, new = read_result(old_file), read_result(new_file)
    differ = [f"{name} {old.get(name)} and {new.get(name)}" for name in MUST_AGREE if old.get(name) != new.get(name)]
    if differ:
        raise CannotCompare(f"{old_file.name} and {new_file.name} are not comparable: {'; '.join(differ)}")
    pairs = {label: (value, ratios(new)[label]) for label, value in ratios(old).items() if label in ratios(new)}
    if not pairs:
        raise CannotCompare(f"{old_file.name} and {new_file.name} have no ratio in common")
    for name in MAY_DIFFER:
        if old.get(name) != new.get(name):
            print(f"{name}: {old.get(name)} and {new.get(name)}")
    for label, (before, after) in pairs.items():
        print(f"{label}: {before:.3f}, then {after:.3f}{'  <- slower' if before / after > ALARM else ''}")
    worst = max(pairs, key=lambda label: pairs[label][0] / pairs[label][1])
    print("The two files were not measured in turn, so this is weaker than a comparison of two checkouts.")
    return verdict(pairs[worst][0] / pairs[worst][1], f"at worst ({worst}), relative to its baseline, it takes")


def read_result(path: Path) -> dict:
    """Read a result file. Raises CannotCompare if it is not one, or comes from a smoke test."""
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise CannotCompare(f"{path} is not JSON: {error}") from None
    if not isinstance(result, dict) or not ratios(result):
        raise CannotCompare(f"{path} has no ratios: give a file of benchmarks/results")
    if result.get("quick"):
        raise CannotCompare(f"{path} is from a smoke run (--quick): its numbers mean nothing")
    return result


def ratios(result: object, label: str = "") -> dict[str, float]:
    """Collect all ratios in a result, labeled by the names on the path to them."""
    collected = {}
    if isinstance(result, dict):
        if isinstance(result.get("ratio"), int | float):
            collected[label or "ratio"] = result["ratio"]
        for name, value in result.items():
            collected |= ratios(value, f"{label}, {name}" if label else name)
    elif isinstance(result, list) and result and isinstance(result[0], dict):
        for index, value in enumerate(result):
            point = [value[name] for name in ("local_batch", "accumulation")] if "local_batch" in value else [index]
            collected |= ratios(value, f"{label} {' x '.join(map(str, point))}")
    return collected


if __name__ == "__main__":
    try:
        sys.exit(int(main()))
    except CannotCompare as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
