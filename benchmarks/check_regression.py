"""Has training become slower? Runs two checkouts of this repository in turn, and raises an alarm above 10 %.

    python check_regression.py OLD NEW               two folders: about five minutes on two CPU cores
    python check_regression.py OLD.json NEW.json     two files of benchmarks/results: at once, and weaker

A pair is one run of each checkout, a new process each time, which one first drawn at random: what else the machine does
meets both alike. A run trains by its checkout's train_ddp.py, on two ranks (on GPUs one a GPU, two at most). Its number
is the 25th percentile of its steps' seconds, since what disturbs a step makes it longer; the verdict is the median over
the pairs. So neither slow steps nor a slow run or two move it.

Exit code 1 with an alarm, 2 where nothing can be compared.
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
LIMIT_S = 1800  # for a run
# Of a file of results: what has to be the same, and what a reader should know of.
MUST_AGREE = ("device", "cpus", "gpus", "threads_per_process", "python", "torch", "ray", "deepspeed")
MAY_DIFFER = ("date", "system", "calibration")


def run_seconds(step_seconds):
    """One number for a run: what a step takes where little disturbs it."""
    return float(np.percentile(step_seconds, 25))


def slowdown(old, new):
    """New over old, from the numbers of runs in pairs."""
    return math.exp(np.median(np.log(np.asarray(new) / np.asarray(old))))


class CannotCompare(Exception):
    """Why, and what to do."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise CannotCompare(f"{message} (--help says more)")


def at_least_one(text: str) -> int:
    """An option's value as an integer above 0."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return int(text)


def main() -> bool:
    """Whether there is an alarm."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD", help="a checkout, or a file of results")
    parser.add_argument("new", type=Path, metavar="NEW", help="the same")
    parser.add_argument("--pairs", type=at_least_one, default=8, help="runs of each checkout (default: %(default)s)")
    parser.add_argument("--steps", type=at_least_one, default=40, help="optimizer steps a run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order in each pair (default: %(default)s)")
    args = parser.parse_args()
    for path in (args.old, args.new):
        if not path.exists():
            raise CannotCompare(f"{path} does not exist")
        if path.is_dir() and not (path / SCRIPT).exists():
            raise CannotCompare(f"{path} is no checkout of this repository: it has no {SCRIPT}")
    if args.old.is_dir() != args.new.is_dir():
        raise CannotCompare(f"{args.old} and {args.new}: give two checkouts or two files, not one of each")
    if args.steps < 4:
        raise CannotCompare(f"--steps {args.steps} are too few for a percentile: 4 or more")
    return compare_checkouts(args) if args.old.is_dir() else compare_files(args.old, args.new)


# --- two checkouts ---------------------------------------------------------------------------------------------------


def compare_checkouts(args: argparse.Namespace) -> bool:
    """Run both in turn, and print each pair and the verdict."""
    checkouts = {"old": args.old.resolve(), "new": args.new.resolve()}
    pythons = {side: interpreter(list(checkouts.values()), folder) for side, folder in checkouts.items()}
    for side, folder in checkouts.items():
        print(f"{side}  {folder}, {commit(folder)}, by {pythons[side]}")
    name, ranks = device()
    seconds, known = {"old": [], "new": []}, {"old": [], "new": []}
    order = f"in an order drawn by seed {args.seed}"
    print(f"{args.pairs} pair{'s' * (args.pairs > 1)} of {args.steps} steps on {ranks} ranks, {order}", flush=True)
    for number, side in enumerate(first_of_each_pair(args.pairs, args.seed), start=1):
        for each in (side, "new" if side == "old" else "old"):
            result = run(checkouts[each], pythons[each], ranks, args.steps)
            known[each].append(result["known"])
            seconds[each].append(run_seconds(result["step_seconds"]))
        old, new = seconds["old"][-1], seconds["new"][-1]
        print(
            f"pair {number}, {side} first: old {old:.4f} s a step, new {new:.4f}, new/old {new / old:.3f}", flush=True
        )
    print(f"device {name}; versions:", describe(known["old"][0], known["new"][0]))
    return verdict(slowdown(seconds["old"], seconds["new"]), "a step of NEW takes")


def first_of_each_pair(pairs: int, seed: int) -> list[str]:
    """Which side of each pair runs first: each side in half of them, in an order drawn by `seed`."""
    first = ["old", "new"] * (pairs // 2) + ["old"] * (pairs % 2)
    random.Random(seed).shuffle(first)
    return first


def interpreter(checkouts: list[Path], folder: Path) -> str:
    """A checkout's own, where both have one; else the one that runs this."""
    own = Path(".venv/bin/python")
    return str(folder / own) if all((each / own).exists() for each in checkouts) else sys.executable


def commit(folder: Path) -> str:
    """What git calls a checkout, in words."""
    if shutil.which("git") is None:
        return "commit unknown"
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=8"]
    done = subprocess.run(git, capture_output=True, text=True)
    return f"commit {done.stdout.strip()}" if done.returncode == 0 else "no commit"


def device() -> tuple[str, int]:
    """The GPU's name or the CPU's, and the ranks to run on it: two, and on GPUs one per GPU."""
    import torch  # takes two seconds, and two files are compared without it

    from shared.doctor import cpu_name

    gpus = torch.cuda.device_count()
    return (torch.cuda.get_device_name(), min(gpus, 2)) if gpus else (cpu_name(), 2)


def run(checkout: Path, python: str, ranks: int, steps: int) -> dict:
    """One run of a checkout, by its own code: the seconds of its steps, and the versions."""
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
            process.terminate()  # torchrun ends its ranks then
            process.wait()
        if code != 0 or not file.exists():
            print(output.read_text(), file=sys.stderr)
            what = f"did not end within {LIMIT_S} s" if code is None else "failed"
            raise CannotCompare(f"a run of {checkout} {what}: what it said stands above")
        return json.loads(file.read_text())


def describe(old: dict, new: dict) -> str:
    """What both have, and what differs between them."""
    same = [f"{name} {value}" for name, value in old.items() if new.get(name) == value]
    other = [f"{name} {old.get(name)} and {new.get(name)}" for name in old | new if old.get(name) != new.get(name)]
    return ", ".join(same) + (f"; DIFFERENT: {', '.join(other)}" if other else "; the same for both")


def verdict(factor: float, what: str) -> bool:
    """Print it; whether it is an alarm."""
    alarm = factor > ALARM
    print(f"{'ALARM' if alarm else 'fine'}: {what} {factor:.3f} times as long (alarm above {ALARM:.2f})")
    return alarm


# --- two files -------------------------------------------------------------------------------------------------------


def compare_files(old_file: Path, new_file: Path) -> bool:
    """Compare the ratios in two files of results, each the speed of one side over that of another."""
    old, new = read(old_file), read(new_file)
    differ = [f"{name} {old.get(name)} and {new.get(name)}" for name in MUST_AGREE if old.get(name) != new.get(name)]
    if differ:
        raise CannotCompare(f"{old_file.name} and {new_file.name} are of two kinds: {'; '.join(differ)}")
    pairs = {place: (value, ratios(new)[place]) for place, value in ratios(old).items() if place in ratios(new)}
    if not pairs:
        raise CannotCompare(f"{old_file.name} and {new_file.name} have no ratio in common")
    for name in MAY_DIFFER:
        if old.get(name) != new.get(name):
            print(f"{name}: {old.get(name)} and {new.get(name)}")
    for place, (before, after) in pairs.items():
        print(f"{place}: {before:.3f}, then {after:.3f}{'  <- slower' if before / after > ALARM else ''}")
    worst = max(pairs, key=lambda place: pairs[place][0] / pairs[place][1])
    print("Two files were not measured in turn: this is weaker than a run on two checkouts.")
    return verdict(pairs[worst][0] / pairs[worst][1], f"at worst ({worst}), beside its baseline, it takes")


def read(path: Path) -> dict:
    """A file of results. Raises CannotCompare where it is none, or one that means nothing."""
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise CannotCompare(f"{path} is no JSON: {error}") from None
    if not isinstance(result, dict) or not ratios(result):
        raise CannotCompare(f"{path} has no ratios: give a file of benchmarks/results")
    if result.get("quick"):
        raise CannotCompare(f"{path} is of a smoke run (--quick): its numbers mean nothing")
    return result


def ratios(result: object, place: str = "") -> dict[str, float]:
    """All ratios in a result, by their places."""
    found = {}
    if isinstance(result, dict):
        if isinstance(result.get("ratio"), int | float):
            found[place or "ratio"] = result["ratio"]
        for name, value in result.items():
            found |= ratios(value, f"{place}, {name}" if place else name)
    elif isinstance(result, list) and result and isinstance(result[0], dict):
        for number, value in enumerate(result):
            point = [value[name] for name in ("local_batch", "accumulation")] if "local_batch" in value else [number]
            found |= ratios(value, f"{place} {' x '.join(map(str, point))}")
    return found


if __name__ == "__main__":
    try:
        sys.exit(int(main()))
    except CannotCompare as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
