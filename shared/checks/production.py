"""The exercise checks of chapter 4: Ray in production."""

import random
from collections.abc import Callable

from shared.checks.machinery import Wrong, exercise

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


@exercise("4.2c", "fewer trials, longer ones: no rung costs much more than another.")
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
