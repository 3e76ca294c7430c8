"""Count how often detectors of slower code are wrong, on made-up step times of which the truth is known.

    python alarm_on_noise.py              the tables of docs/regression-alarm.md, in a few seconds
    python alarm_on_noise.py --jobs 100   fewer comparisons for each number

A comparison has 16 runs of 60 steps: 8 of the old code and 8 of the new. The detector of check_regression.py is
compared with others that each lack one of its ideas.
"""

import argparse
import math
from collections.abc import Callable

import numpy as np
from check_regression import ALARM, run_seconds, slowdown

PAIRS, STEPS = 8, 60
KINDS = ("varying steps", "drift", "bursts", "heavy tails")


def noise(kind: str, rng: np.random.Generator, runs: int) -> np.ndarray:
    """Return the seconds of STEPS steps for `runs` runs in a row: (runs, STEPS). An undisturbed step takes 0.1 s."""
    factors = np.exp(rng.normal(0, 0.1, (runs, STEPS)))  # in each kind
    if kind == "drift":  # heat and neighbors: each run differs a little from the one before
        factors *= np.exp(np.cumsum(rng.normal(0, 0.06, (runs, 1)), axis=0))
    if kind == "bursts":  # now and then a whole run is disturbed
        factors *= np.where(rng.random((runs, 1)) < 0.1, 1.5, 1)
    if kind == "heavy tails":  # a few steps take very long
        factors += 0.1 * rng.pareto(1.2, (runs, STEPS))
    return 0.1 * factors


def one_run_each(old: np.ndarray, new: np.ndarray) -> float:
    """Compare the mean steps of the first two runs."""
    return new[0].mean() / old[0].mean()


def means(old: np.ndarray, new: np.ndarray) -> float:
    """Compare the mean steps of all runs."""
    return new.mean() / old.mean()


def means_of_runs(old: np.ndarray, new: np.ndarray) -> float:
    """Take the median over the pairs, but describe each run by its mean."""
    return slowdown(old.mean(axis=1), new.mean(axis=1))


def mean_over_pairs(old: np.ndarray, new: np.ndarray) -> float:
    """Describe each run by its 25th percentile, but take the mean over the pairs."""
    ratios = [run_seconds(b) / run_seconds(a) for a, b in zip(old, new, strict=True)]
    return math.exp(np.mean(np.log(ratios)))


def without_pairs(old: np.ndarray, new: np.ndarray) -> float:
    """Compare the medians of both sides in place of pairs."""
    return np.median(list(map(run_seconds, new))) / np.median(list(map(run_seconds, old)))


def of_check_regression(old: np.ndarray, new: np.ndarray) -> float:
    """Compare as check_regression.py does."""
    return slowdown(list(map(run_seconds, old)), list(map(run_seconds, new)))


DETECTORS: dict[str, tuple[Callable, bool]] = {  # name -> what it computes, and whether old and new runs alternate
    "one run each, means": (one_run_each, True),
    "8 runs each, means": (means, True),
    "8 pairs, but means of runs": (means_of_runs, True),
    "8 pairs, but a mean over pairs": (mean_over_pairs, True),
    "8 runs each, without pairs": (without_pairs, True),
    "8 pairs, but all old runs first": (of_check_regression, False),
    "check_regression.py": (of_check_regression, True),
}


def comparison(kind: str, seed: int, factor: float, alternate: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps of the old runs and of the new ones, which are `factor` times as slow: (PAIRS, STEPS) each."""
    rng = np.random.default_rng(seed)
    runs = noise(kind, rng, 2 * PAIRS)
    if not alternate:
        return runs[:PAIRS], factor * runs[PAIRS:]
    pairs, first = runs.reshape(PAIRS, 2, STEPS), rng.permutation(PAIRS) % 2  # each side is first in half of the pairs
    return pairs[range(PAIRS), first], factor * pairs[range(PAIRS), 1 - first]


def count_alarms(detector: str, kind: str, factor: float, jobs: int) -> int:
    """Return in how many of `jobs` comparisons a detector raises the alarm."""
    compute, alternate = DETECTORS[detector]
    return sum(bool(compute(*comparison(kind, seed, factor, alternate)) > ALARM) for seed in range(jobs))


def table(title: str, factor: float, jobs: int, detectors: list[str]) -> str:
    """Return the counts of each detector and kind of noise as a table in Markdown."""
    rows = [f"| {title} | {' | '.join(KINDS)} |", f"|---|{'---:|' * len(KINDS)}"]
    for name in detectors:
        counts = [str(count_alarms(name, kind, factor, jobs)) for kind in KINDS]
        rows.append(f"| {name} | {' | '.join(counts)} |")
    return "\n".join(rows)


def tables(jobs: int) -> str:
    """Return all tables."""
    ours, naive = "check_regression.py", "one run each, means"
    parts = [
        table(f"False alarms in {jobs:,}", 1.0, jobs, list(DETECTORS)),
        *(
            table(f"Slowdowns of {percent} % found in {jobs:,}", 1 + percent / 100, jobs, [naive, ours])
            for percent in (10, 12, 15, 20)
        ),
    ]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000, help="comparisons for each number (default: 1000)")
    print(tables(parser.parse_args().jobs))


if __name__ == "__main__":
    main()
