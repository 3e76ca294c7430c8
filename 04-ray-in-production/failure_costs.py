"""How much longer a run takes with failures, and what it costs on spot machines: the formulas of lesson 4.1."""

import math

import numpy as np


def relative_time(
    interval: float | np.ndarray, save_s: float, restart_s: float, mtbf_s: float | np.ndarray
) -> float | np.ndarray:
    """Return how many times as long as its pure work a run takes, if failures come independently of each other.

    interval: seconds of work between two checkpoints. save_s: seconds that training stands still for one. restart_s:
    seconds of detection and restart. mtbf_s: the mean time between failures of the job. Daly 2006,
    doi:10.1016/j.future.2004.11.016.
    """
    return mtbf_s / interval * np.exp(restart_s / mtbf_s) * np.expm1((interval + save_s) / mtbf_s)


def young(save_s: float, mtbf_s: float) -> float:
    """Return the interval in seconds that is nearly the best if a save is short (Young 1974).

    doi:10.1145/361147.361115
    """
    return math.sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """Return an interval that is closer to the best, for saves shorter than 2 * mtbf_s (Daly 2006)."""
    part = save_s / (2 * mtbf_s)
    return young(save_s, mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - save_s


def simulated(
    interval: float, save_s: float, restart_s: float, mtbf_s: float, lives: int = 200_000, seed: int = 7
) -> float:
    """Return relative_time of a run with this number of random failures, without the formula.

    Each life of the run begins with a restart and ends with a failure. Only whole intervals, saved, count as work.
    """
    life = np.random.default_rng(seed).exponential(mtbf_s, lives)
    saved = np.floor(np.maximum(life - restart_s, 0) / (interval + save_s))
    return life.sum() / (saved * interval).sum()


def bill(price: float, save_s: float, restart_s: float, mtbf_h: float, notice: bool = False) -> float:
    """Return the cost of a run on machines of this price, if undisturbed work at full price costs 1.

    notice: each failure is announced in time, so nothing is saved on schedule and nothing is replayed.
    """
    mtbf_s = 3600 * mtbf_h
    if notice:
        return price * math.exp((restart_s + save_s) / mtbf_s)
    return price * relative_time(daly(save_s, mtbf_s), save_s, restart_s, mtbf_s)
