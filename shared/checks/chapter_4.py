"""The exercise checks of chapter 4: Ray in production."""

import math
import random
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
        else:
            hint += f" In {left} s there is room for {expected} steps of {step_s} s; exactly in time counts."
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
        try:
            seen = cheapest({name: tuple(offer) for name, offer in given.items()}, work_h, deadline_h)
        except OverflowError as error:
            raise Wrong(f"{error}: did you put hours and seconds together? The formula wants one unit") from None
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
                hint = f" {seen!r} costs less an hour, and takes more hours, its restarts among them."
            raise Wrong(
                f"{work_h} hours of work within {deadline_h} hours: expected {expected!r}, you say {seen!r}. "
                f"By the formula: {table}.{hint}"
            )


def relative_time(mtbf_h: float, save_s: float, restart_s: float) -> float:
    """How many times as long as undisturbed work it takes, saved by Young's interval (Daly 2006)."""
    mtbf_s = 3600 * mtbf_h
    interval = math.sqrt(2 * save_s * mtbf_s)
    return mtbf_s / interval * math.exp(restart_s / mtbf_s) * math.expm1((interval + save_s) / mtbf_s)


# --- Lesson 4.2: tuning ----------------------------------------------------------------------------------------------


@exercise("4.2a", "room for the workers of one: the others wait, but not for ever.")
def exercise_4_2a(most_trials: Callable[[float, float, int], int]) -> None:
    """most_trials(cpus, per_trial, workers) -> the largest max_concurrent_trials that cannot end in a deadlock."""
    for cpus, per_trial, workers, expected in (
        (8, 1, 4, 4),
        (8, 1, 2, 6),
        (16, 2, 3, 6),
        (16, 0.5, 4, 24),
        (8, 1, 7, 1),
        (2, 0.25, 1, 4),
        (9, 2, 4, 2),
    ):
        call = f"most_trials({cpus}, {per_trial}, {workers})"
        seen = most_trials(cpus, per_trial, workers)
        if not isinstance(seen, int | float) or isinstance(seen, bool):
            raise Wrong(f"{call} should be a number of trials, and is {seen!r}")
        if seen != int(seen):
            raise Wrong(f"{call} is {seen}: there are only whole trials; round down")
        if seen == expected:
            continue
        hint = f"With {seen:g} trials, {seen * per_trial:g} CPUs are held, and {workers} more must be free."
        if seen * per_trial + workers > cpus:
            hint += f" There are only {cpus}: a deadlock."
        elif seen == cpus // (per_trial + workers):
            hint += " That lets all of them train at once. It is enough if one can: it ends, and then the next one can."
        else:
            hint += f" With {expected} trials {expected * per_trial + workers:g} of {cpus} CPUs are needed."
        raise Wrong(f"{call} is {seen:g}, expected {expected}. {hint}")
    for cpus, per_trial, workers in ((4, 1, 4), (2, 0.5, 2)):
        call = f"most_trials({cpus}, {per_trial}, {workers})"
        try:
            seen = most_trials(cpus, per_trial, workers)
        except ValueError:
            continue
        raise Wrong(
            f"{call} is {seen!r}, but one trial and its workers need {per_trial + workers:g} of {cpus} CPUs: "
            "raise a ValueError"
        )


def schedule_of(rates: list[list[float]], exploits: list[tuple[int, int, int]], trial: int) -> list[float]:
    """What exercise 4.2b asks for."""
    donors, found = {(epoch, receiver): donor for epoch, receiver, donor in exploits}, []
    for epoch in range(len(rates[0]), 0, -1):
        found.append(rates[trial][epoch - 1])
        trial = donors.get((epoch - 1, trial), trial)
    return found[::-1]


POPULATIONS = (
    ([[0.1, 0.1, 0.2, 0.2], [0.4, 0.4, 0.4, 0.4]], [], 0, "nobody has received anything"),
    ([[0.1, 0.1, 0.2, 0.2], [0.4, 0.4, 0.4, 0.4]], [(2, 0, 1)], 0, "after epoch 2 trial 0 got the weights of trial 1"),
    ([[0.1, 0.1, 0.2, 0.2], [0.4, 0.4, 0.4, 0.4]], [(2, 0, 1)], 1, "a donor keeps its own weights"),
    (
        [[1, 1, 2, 2, 3, 3], [4, 4, 4, 4, 5, 5], [6, 6, 7, 7, 8, 8]],
        [(2, 0, 1), (4, 2, 0)],
        2,
        "trial 2 got the weights of trial 0, which had got them from trial 1 two epochs before",
    ),
    (
        [[1, 1, 2, 2, 3, 3], [4, 4, 4, 4, 5, 5], [6, 6, 7, 7, 8, 8]],
        [(2, 2, 1), (4, 2, 0)],
        2,
        "what trial 2 got after epoch 2 was thrown away after epoch 4",
    ),
    (
        [[1, 1, 2, 2], [3, 3, 4, 4], [5, 5, 6, 6]],
        [(2, 0, 1), (2, 1, 2)],
        0,
        "both exploits are after epoch 2: trial 0 got what trial 1 had before it received",
    ),
)


@exercise("4.2b", "a schedule belongs to weights, not to a trial.")
def exercise_4_2b(schedule: Callable[[list, list, int], list[float]]) -> None:
    """schedule(rates, exploits, trial) -> the learning rate of each epoch on the path of the trial's last weights."""
    for rates, exploits, trial, why in POPULATIONS:
        call = f"schedule({rates}, {exploits}, {trial})"
        expected = schedule_of(rates, exploits, trial)
        # In a log they may stand in any order.
        orders = [exploits, exploits[::-1], random.Random(0).sample(exploits, len(exploits))]
        for given in orders:
            seen = schedule([list(each) for each in rates], list(given), trial)
            try:
                seen = list(seen)
            except TypeError:
                raise Wrong(f"{call} should be a list with a rate for each epoch, and is {seen!r}") from None
            if seen == expected:
                continue
            if len(seen) != len(expected):
                raise Wrong(f"{call} should have a rate for each of {len(expected)} epochs; yours is {seen}")
            hint = f"See: {why}."
            if given != exploits:
                hint = "The exploits may come in any order."
            elif seen == expected[::-1]:
                hint = "The first epoch comes first."
            elif seen == rates[trial]:
                hint += " These are the rates of the trial, and not of its weights."
            raise Wrong(f"{call} is {expected}; you say {seen}. {hint}")


def epochs_of_halving(trials: int, grace: int, factor: int, longest: int) -> int:
    """What exercise 4.2c asks for."""
    total, reached, rung = 0, 0, min(grace, longest)
    while True:
        total += trials * (rung - reached)
        if rung == longest:
            return total
        trials, reached, rung = max(1, trials // factor), rung, min(rung * factor, longest)


@exercise("4.2c", "fewer trials, longer ones: the bad ones cost little.")
def exercise_4_2c(halving_epochs: Callable[[int, int, int, int], int]) -> None:
    """halving_epochs(trials, grace, factor, longest) -> the epochs of synchronous successive halving."""
    for trials, grace, factor, longest in (
        (8, 1, 2, 8),
        (8, 8, 2, 8),
        (27, 1, 3, 27),
        (10, 2, 2, 16),
        (16, 1, 4, 10),
        (3, 1, 4, 64),
        (5, 4, 2, 3),
    ):
        call = f"halving_epochs({trials}, {grace}, {factor}, {longest})"
        expected = epochs_of_halving(trials, grace, factor, longest)
        seen = halving_epochs(trials, grace, factor, longest)
        if not isinstance(seen, int | float) or isinstance(seen, bool):
            raise Wrong(f"{call} should be a number of epochs, and is {seen!r}")
        if seen == expected:
            continue
        left, rung, anew, steps = trials, min(grace, longest), trials * min(grace, longest), []
        while rung < longest:
            left, before, rung = max(1, left // factor), rung, min(rung * factor, longest)
            anew += left * rung
            steps.append(f"{left} go{'es' * (left == 1)} on from epoch {before} to {rung}")
        hint = f"{trials} train to epoch {min(grace, longest)}, {', '.join(steps) or 'where they end'}."
        if seen == anew:
            hint += " A trial that goes on does not begin anew: count only what it adds."
        raise Wrong(f"{call} is {seen:g}, expected {expected}. {hint}")
