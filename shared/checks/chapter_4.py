"""The exercise checks of chapter 4: Ray in production."""

import math
from collections.abc import Callable

from shared.checks.machinery import Wrong, exercise

# --- Lesson 4.1: failures --------------------------------------------------------------------------------------------


@exercise("4.1a", "what counts is what has arrived, not what was reported.")
def exercise_4_1a(goes_on_after: Callable[[list[tuple[int, float, float]], float], int]) -> None:
    """goes_on_after([(step, reported at, seconds to upload), ...], crash) -> the newest step that has arrived."""
    queue = [(10, 1.0, 2.0), (20, 1.5, 2.0), (30, 2.0, 2.0), (40, 9.0, 0.5)]  # arrive at 3, 5, 7 and 9.5
    for saves, crash, expected, why in (
        ([(10, 3.0, 0.5), (20, 6.0, 0.5)], 6.25, 10, "the upload of 20 is done at 6.5, after the crash"),
        ([(10, 3.0, 0.5), (20, 6.0, 0.5)], 8.0, 20, "both have arrived by then"),
        ([(10, 3.0, 0.5), (20, 6.0, 0.5)], 6.5, 20, "what arrives in the moment of the crash has arrived"),
        ([(10, 3.0, 0.5), (20, 6.0, 0.5)], 3.25, 0, "nothing has arrived yet"),
        (queue, 4.5, 10, "the upload of 20 waits for that of 10, begins at 3 and is done at 5"),
        (queue, 6.5, 20, "one thread uploads: 10 is done at 3, 20 at 5, 30 at 7"),
        (queue, 9.75, 40, "the thread was free at 7, and 40 was reported at 9: done at 9.5"),
        ([], 5.0, 0, "nothing was ever saved"),
    ):
        seen = goes_on_after(list(saves), crash)
        if seen is None:
            raise Wrong(f"return a step, and 0 where nothing has arrived; yours returns None for a crash at {crash}")
        if seen != expected:
            raise Wrong(
                f"with the saves {saves} and a crash at {crash} it is {expected}; you say {seen!r}. See: {why}."
            )


@exercise("4.1b", "even at the worst moment the checkpoint is done in time.")
def exercise_4_1b(ask_every: Callable[[float, float, float, float], int]) -> None:
    """ask_every(notice_s, poll_s, step_s, save_s) -> the most steps between two questions, 0 where none is safe."""
    for given in (
        (120, 5, 1, 15),
        (30, 5, 0.5, 8),
        (30, 5, 2, 8.5),
        (120, 0.5, 0.25, 60),
        (30, 5, 30, 8),
        (30, 5, 1, 40),
    ):
        notice_s, poll_s, step_s, save_s = given
        left = notice_s - poll_s - save_s
        expected = max(0, math.floor(left / step_s))
        call = f"ask_every(notice_s={notice_s}, poll_s={poll_s}, step_s={step_s}, save_s={save_s})"
        seen = ask_every(*given)
        try:
            whole = seen == int(seen)
        except (TypeError, ValueError):
            raise Wrong(f"{call} should return a number of steps; yours is {seen!r}") from None
        if seen == expected:
            continue
        hint = f"{notice_s} s, less {poll_s} s until the watcher looks and {save_s} s for saving, leave {left} s."
        if not whole:
            hint = f"A number of whole steps is asked for: {left} s are left, and a step takes {step_s}."
        elif expected == 0:
            hint += " That is not even one step: 0."
        elif seen == math.floor((notice_s - save_s) / step_s):
            hint = f"The watcher may see the notice {poll_s} s late: it looks only that often."
        elif seen == math.floor((notice_s - poll_s) / step_s):
            hint = f"Saving takes {save_s} s, and has to be done when the machine goes."
        elif seen == math.ceil(left / step_s):
            hint += f" {seen} steps take {seen * step_s} s: round down."
        raise Wrong(f"{call} is {expected}; you say {seen}. {hint}")


@exercise("4.1c", "cheap is what is done in time for the least money, not what costs least an hour.")
def exercise_4_1c(cheapest: Callable[[dict[str, tuple], float, float], str | None]) -> None:
    """cheapest({name: (price an hour, hours between failures, save_s, restart_s)}, work_h, deadline_h) -> a name."""
    offers = {
        "full price": (30.0, 200.0, 30, 300),  # takes 1.01 times as long
        "spot": (10.0, 2.0, 30, 300),  # 1.14
        "spot, crowded": (9.0, 0.5, 30, 1200),  # 2.35
    }
    no_trap = {"slow restarts": (10.0, 1.0, 30, 3600), "quick restarts": (14.0, 1.0, 30, 60)}  # 3.10, 1.16
    for given, work_h, deadline_h, expected in (
        (offers, 10, 100, "spot"),
        (offers, 10, 11, "full price"),
        (offers, 10, 10, None),
        (no_trap, 5, 40, "quick restarts"),
    ):
        times = {name: relative_time(*offer[1:]) for name, offer in given.items()}
        seen = cheapest({name: tuple(offer) for name, offer in given.items()}, work_h, deadline_h)
        if seen is not None and seen not in given:
            raise Wrong(f"return the name of an offer, or None; yours is {seen!r}")
        if seen != expected:
            table = "; ".join(
                f"{name}: {work_h * times[name]:.1f} h, bill {offer[0] * work_h * times[name]:.0f}"
                for name, offer in given.items()
            )
            hint = ""
            if seen is not None and work_h * times[seen] > deadline_h:
                hint = f" {seen!r} is done after {work_h * times[seen]:.1f} h: failures, restarts and saving count."
            elif seen is not None and expected is not None and given[seen][0] < given[expected][0]:
                hint = f" {seen!r} costs less an hour, and takes more hours."
            raise Wrong(
                f"{work_h} hours of work within {deadline_h} hours: expected {expected!r}, you say {seen!r}. "
                f"By the formula: {table}.{hint}"
            )


def relative_time(mtbf_h: float, save_s: float, restart_s: float) -> float:
    """How many times as long as undisturbed work it takes, saved by Young's interval (Daly 2006)."""
    mtbf_s = 3600 * mtbf_h
    interval = math.sqrt(2 * save_s * mtbf_s)
    return mtbf_s / interval * math.exp(restart_s / mtbf_s) * math.expm1((interval + save_s) / mtbf_s)
