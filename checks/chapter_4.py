"""The exercise checks of chapter 4: Ray in production."""

import json
import math
import random
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checks.machinery import (
    Wrong,
    exercise,
    expect_answers,
    expect_close,
    expect_success,
    probe,
    refuse_stub,
    reports_of_ranks,
    run_command,
)
from checks.recordings import recorded

if TYPE_CHECKING:
    from checks.rescue import Rescued

# --- Lesson 4.1: failures --------------------------------------------------------------------------------------------


FAILURES = ((34, "killed"), (64, "hangs"), (93, "killed"))  # solve 4.1a before you read on
NUM_STEPS, SAVE_STEPS, MOST_LOST_STEPS, LONGEST_TIMEOUT_S = 100, 5, 65, 4


@exercise("4.1a", "the run came through all of its failures, at an acceptable price.")
def exercise_4_1a(choose: Callable[[], tuple[int, float]]) -> str:
    """choose() -> (steps between two saves, timeout in seconds) for two ranks that fail at hidden steps."""
    choice = choose()
    try:
        save_every, timeout_s = choice
        whole = save_every == int(save_every) and 1 <= save_every <= NUM_STEPS
        timeout_s = float(timeout_s)
    except (TypeError, ValueError):
        raise Wrong(f"return a number of steps and a number of seconds; yours is {choice!r}") from None
    if not whole:
        raise Wrong(f"between two saves lie 1 to {NUM_STEPS} whole steps; you say {save_every}")
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise Wrong(f"the timeout is above 0 and at most {LONGEST_TIMEOUT_S} s; you say {timeout_s:g}")
    (lines,) = hidden_failures((int(save_every), timeout_s))
    return judge_failures(lines, int(save_every), timeout_s)


def hidden_failures(*choices: tuple[int, float]) -> list[list[dict]]:
    """Run two ranks through the hidden failures with each choice, side by side. Return the lines of each run's log."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, str(number)) for number in range(len(choices))]
        settings = []
        for each, (save_every, timeout_s) in zip(folders, choices, strict=True):
            each.mkdir()
            settings.append(f"{each},{save_every},{timeout_s}")
        words = [str(probe("hidden_failures")), str(NUM_STEPS), json.dumps(FAILURES), *settings]
        expect_success(*run_command(words))
        return [list(map(json.loads, (each / "log.jsonl").read_text().splitlines())) for each in folders]


def judge_failures(lines: list[dict], save_every: int, timeout_s: float) -> str:
    """Raise Wrong for a false alarm or too many lost steps; return what was counted, in words."""
    noticed = []
    for attempt in range(1, max(line["attempt"] for line in lines) + 1):
        happened = {line["what"]: line for line in lines if line["attempt"] == attempt}
        failed = happened.get("killed") or happened.get("hangs")
        if failed:
            seconds = happened["over"]["time"] - failed["time"]
            noticed.append(f"rank {failed['rank']} {failed['what']}, noticed after {seconds:.1f} s")
        elif "gives up" in happened:
            gave_up = happened["gives up"]
            alarms = [line for line in lines if line["what"] == "gives up" and line["step"] == gave_up["step"]]
            again = ". After the restart the same happened there again" if len(alarms) > 1 else ""
            raise Wrong(
                f"a false alarm. In step {gave_up['step']} rank {gave_up['rank']} gave up after "
                f"{gave_up['waited_s']:.2f} s, and nothing had failed: the other rank was still busy with what comes "
                f"after step {gave_up['step'] - 1}{again}"
            )
    first = [line for line in lines if line["what"] == "step" and line["rank"] == 0]
    replayed = len(first) - len({line["step"] for line in first})
    saves = sum(line["what"] == "saved" for line in lines)
    lost = replayed + SAVE_STEPS * saves
    counted = f"{replayed} steps were replayed, and {saves} saves took as long as {SAVE_STEPS * saves} steps"
    if lost > MOST_LOST_STEPS:
        less = "more" if replayed > SAVE_STEPS * saves else "less"
        raise Wrong(f"{counted}: {lost} in all, at most {MOST_LOST_STEPS} are allowed. Would you save {less} often?")
    return f"{'; '.join(noticed)}. {counted}."


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


# --- Lesson 4.2: tuning ----------------------------------------------------------------------------------------------


NESTED_TRIALS, NESTED_CPUS = 4, 2
# Random orders of these rates rarely fit into this budget; tests/all/test_searches.py counts them.
BUDGET_EPOCHS, FIRST_EPOCHS, LAST_EPOCH, GOAL = 46, 2, 12, 0.65
RATES_4_2B = (0.0004, 0.0006, 0.0016, 0.0022, 0.0045, 0.012, 0.018, 0.045, 0.07, 0.2, 0.4, 0.8)


@exercise("4.2a", "all trials of both searches ended, on real processes.")
def exercise_4_2a(two_fixes: Callable[[], tuple[int, dict]]) -> None:
    """two_fixes() -> (max_concurrent_trials for trials that hold a CPU, what each of four trials at a time holds)."""
    answer = two_fixes()
    try:
        at_once, resources = answer
        resources = {str(name): float(amount) for name, amount in dict(resources).items()}
    except (TypeError, ValueError):
        raise Wrong(f'return a number and resources, such as (2, {{"CPU": 1}}); yours is {answer!r}') from None
    if isinstance(at_once, bool) or at_once != int(at_once) or at_once < 1:
        raise Wrong(f"the first fix is a whole number of trials, at least 1; yours is {at_once!r}")
    if set(resources) != {"CPU"}:
        raise Wrong(f"the second fix says how many CPUs a trial holds, and nothing else; yours is {resources}")
    if not 0 < resources["CPU"] <= NESTED_CPUS:
        chosen = f"at most {NESTED_CPUS}; yours is {resources['CPU']:g}"
        raise Wrong(f"for the second fix choose more than 0 CPUs (Tune refuses 0) and {chosen}")
    fixes = (("first", 1, int(at_once)), ("second", resources["CPU"], NESTED_TRIALS))
    outcomes = nested_searches(*(({"CPU": cpus}, trials) for _, cpus, trials in fixes))
    for (which, cpus, trials), outcome in zip(fixes, outcomes, strict=True):
        if outcome["stuck"]:
            states = [state for state, _ in outcome["stuck"]["reservations"]]
            free = outcome["stuck"]["free"]
            raise Wrong(
                f"with the {which} fix, up to {trials} trials at a time, each holding {cpus:g} CPUs, "
                f"{outcome['ended']} of {NESTED_TRIALS} trials ended. Then {states.count('PENDING')} reservations "
                f"waited, and {free:g} of {NESTED_CPUS} CPUs were free. How much does a worker need, and what would "
                "have to end first?"
            )
        if outcome["ended"] < NESTED_TRIALS:
            raise Wrong(f"with the {which} fix only {outcome['ended']} of {NESTED_TRIALS} trials ended")


def nested_searches(*settings: tuple[dict, int]) -> list[dict]:
    """Run a search with nested workers for each (resources, max_concurrent_trials), one after the other, on one Ray."""
    with tempfile.TemporaryDirectory() as folder:
        named = [{"resources": resources, "max_concurrent_trials": at_once} for resources, at_once in settings]
        out = Path(folder, "outcomes.json")
        expect_success(*run_command([str(probe("nested_trials")), json.dumps(named), str(out)]))
        return json.loads(out.read_text())


@exercise("4.2b", "a search of your own, within its budget.")
def exercise_4_2b(my_search: Callable[[list[float]], list[list[dict]]]) -> str:
    """my_search(rates) -> the reports of each trial: dicts with `lr`, `epoch` and `accuracy`."""
    trials = my_search(list(RATES_4_2B))
    try:
        rates = sorted(rows[0]["lr"] for rows in trials)
        curves = [[float(row["accuracy"]) for row in rows] for rows in trials]
        epochs = [[int(row["epoch"]) for row in rows] for rows in trials]
    except (TypeError, KeyError, IndexError):
        raise Wrong("return what run_search returns: a list with the reports of each trial") from None
    if any(each != [*range(1, len(each) + 1)] for each in epochs):
        raise Wrong("a trial reports the epochs 1, 2, 3 and so on; was a report left out?")
    if rates != list(RATES_4_2B):
        raise Wrong(f"try each of the {len(RATES_4_2B)} rates once; yours were {', '.join(f'{lr:g}' for lr in rates)}")
    spent = sum(map(len, curves))
    by_trial = " ".join(str(len(curve)) for curve in curves)
    if min(map(len, curves)) < FIRST_EPOCHS:
        raise Wrong(
            f"no trial may stop before epoch {FIRST_EPOCHS}; which argument of the scheduler says so? The trials "
            f"trained, in your order: {by_trial}"
        )
    if spent > BUDGET_EPOCHS:
        raise Wrong(f"{spent} epochs, and {BUDGET_EPOCHS} are allowed. The trials trained, in your order: {by_trial}")
    best, to_the_end = max(map(max, curves)), [max(curve) for curve in curves if len(curve) == LAST_EPOCH]
    if best not in to_the_end:
        raise Wrong(
            f"the highest accuracy, {best:.3f}, belongs to no trial that trained {LAST_EPOCH} epochs. The trials "
            f"trained, in your order: {by_trial}"
        )
    if best < GOAL:
        raise Wrong(f"your best accuracy is {best:.3f}; reach {GOAL}. The trials trained, in your order: {by_trial}")
    return f"{spent} epochs, best accuracy {best:.3f}."


# --- Lesson 4.3: watching a run --------------------------------------------------------------------------------------


WATCHED_STEPS, WATCHED_DELAY_S = 12, 0.3  # ten times a healthy step of the probe
WATCHED_PARTS = ("reading", "computing")


def watched_runs(seed: int) -> dict[str, tuple[list, tuple[int, str] | None, str]]:
    """Draw the hidden runs of 4.3a. Return for each its delays, the right diagnosis and what was planted, in words."""
    draw = random.Random(seed)
    reader, computer, stumbler, odd = (draw.randrange(3) for _ in range(4))
    delay_s, ten_times = WATCHED_DELAY_S, "ten times a step"
    return {
        "reads": (
            [[reader, "reading", delay_s, None]], (reader, "reading"),
            f"rank {reader} reads longer, by {ten_times}",
        ),
        "computes": (
            [[computer, "computing", delay_s, None]], (computer, "computing"),
            f"rank {computer} computes longer, by {ten_times}",
        ),
        "healthy": ([], None, "no rank is slow"),
        "one long step": (
            [[stumbler, "reading", 2.0, WATCHED_STEPS // 2]], None,
            f"rank {stumbler} reads for 2 s in a single step, and is as fast as the others in all other steps",
        ),
        "network": ([["all", "network", delay_s, None]], None, "the network is slow, and all ranks wait for it"),
        "both": (
            [["all", "reading", 1.25 * delay_s, None], [odd, "computing", delay_s, None]], (odd, "computing"),
            f"all ranks read slowly, and rank {odd} also computes longer, by {ten_times}",
        ),
        "in turn": ([["in turn", "reading", delay_s, None]], None, "a different rank is slow in each step"),
    }  # fmt: skip


def watched_lines(seed: int) -> dict[str, list[dict]]:
    """Let three ranks do the hidden runs of 4.3a, and return the shuffled lines of each run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "lines.json")
        planned = {name: delays for name, (delays, *_) in watched_runs(seed).items()}
        expect_success(*run_command([str(probe("one_slow_rank")), str(out), str(WATCHED_STEPS), json.dumps(planned)]))
        runs = json.loads(out.read_text())
    for lines in runs.values():
        random.Random(seed).shuffle(lines)
    return runs


@exercise("4.3a", "each slow rank is named with its part, and nobody else is accused.")
def exercise_4_3a(diagnose: Callable[[list[dict]], tuple[int, str] | None]) -> None:
    """diagnose(lines) -> (rank, "reading" or "computing") if this rank is slow in every step, otherwise None."""
    same = dict.fromkeys((*WATCHED_PARTS, "waiting"), 0.02)
    sample = [{"rank": rank, "step": step + 1, **same} for rank in range(3) for step in range(WATCHED_STEPS)]
    diagnose(sample)  # the stub starts no ranks
    seed = random.SystemRandom().randrange(1000)
    runs = watched_lines(seed)
    for name, (_, expected, planted) in watched_runs(seed).items():
        seen = diagnose([dict(line) for line in runs[name]])
        if isinstance(seen, list):
            seen = tuple(seen)
        if seen == expected:
            continue
        if seen is not None and not (
            isinstance(seen, tuple) and len(seen) == 2 and seen[0] in range(3) and seen[1] in WATCHED_PARTS
        ):
            raise Wrong(f"return None, or a rank and one of {WATCHED_PARTS}; yours is {seen!r}")
        hint = ""
        if seen is not None and expected is not None and seen[0] == expected[0]:
            hint = f"The rank is right. What takes rank {seen[0]} longer than it takes the others?"
        elif seen is not None and expected is not None:
            hint = f"Rank {seen[0]} waits for rank {expected[0]}."
        elif seen is None:
            hint = "Compare this rank's own work with that of the two others."
        elif name == "healthy":
            hint = "Some rank always works longest, or waits least. How much longer is too much?"
        elif name == "one long step":
            hint = "Which summary of 12 numbers does not change if a single one does?"
        elif name == "network":
            hint = "No rank's own work is long."
        elif name == "in turn":
            hint = f"Rank {seen[0]} is slow in a third of the steps, as the others are."
        raise Wrong(f"in one run (seed {seed}) {planted}. It is {expected!r}, and you say {seen!r}. {hint}".strip())


@exercise("4.3b", "a repair is worth what it takes off each step, and the second slowest rank limits it.")
def exercise_4_3b(seconds_saved: Callable[[list[dict]], dict[int, float]]) -> None:
    """seconds_saved(lines) -> for each rank how much shorter the run is if it is as fast as the fastest other."""
    for works, why in (
        ([(1.0, 2.0, 5.0)], "with rank 2 repaired the step ends when rank 1 has worked for 2 s"),
        ([(1.0, 5.0, 5.0)], "two ranks are equally slow, and one of them can be repaired"),
        ([(5.0, 1.0, 1.0), (1.0, 5.0, 1.0), (1.0, 1.0, 5.0)], "each rank holds up one step of the three"),
        ([(0.3, 0.1, 0.2)] * 4, "rank 0 takes 0.1 s longer than rank 2 in each of 4 steps"),
        ([(0.1, 0.2, 0.4), (0.1, 0.9, 0.2), (0.5, 0.2, 0.6)], "ranks 1 and 2 hold up different steps"),
        ([(0.25, 0.5)] * 3, "there are only two ranks, and rank 0 takes 0.25 s less"),
    ):
        lines = lines_of(works)
        seen = seconds_saved([dict(line) for line in lines])
        shown = "; ".join(", ".join(f"{work:g} s" for work in each) for each in works)
        if not isinstance(seen, dict) or set(seen) != set(range(len(works[0]))):
            raise Wrong(f"return a dict with each of the {len(works[0])} ranks; yours is {seen!r}")
        for rank in range(len(works[0])):
            expected = sum(max(0.0, each[rank] - max(each[:rank] + each[rank + 1 :])) for each in works)
            what = f"if the ranks' own work takes {shown} in the steps of a run, what a repair of rank {rank} saves"
            expect_close(seen[rank], expected, what, hint=f"See: {why}.")


def lines_of(works: Sequence[Sequence[float]]) -> list[dict]:
    """Return the shuffled lines of ranks with this much own work: `works[step][rank]`, half of it reading."""
    lines = [
        {"rank": rank, "step": step, "reading": work / 2, "computing": work / 2, "waiting": max(each) - work + 0.004}
        for step, each in enumerate(works, start=1)
        for rank, work in enumerate(each)
    ]
    random.Random(4).shuffle(lines)
    return lines


# --- Lesson 4.4: communication hooks ---------------------------------------------------------------------------------


def made_up_run(mbit: int, work_ms: Sequence[Sequence[float]], sent: int) -> dict:
    """A run as timed_hooks.py writes it, whose ranks work this long in each step and then wait for `sent` bytes."""
    transfer_ms = 8e-3 * sent / mbit
    return {"mbit": mbit, "step_ms": [[ms + transfer_ms for ms in of_rank] for of_rank in work_ms], "sent": [sent] * 2}


@exercise("4.4a", "your predictions agree with the bandwidths that were measured.")
def exercise_4_4a(break_even: Callable[[dict, dict, bool, int], float]) -> None:
    """break_even(run without a hook, run with it, whether it all-gathers, ranks) -> Mbit/s below which it pays."""
    even = [[10.0] * 5] * 2
    plain = made_up_run(1000, even, 2_000_000)
    cheap = made_up_run(1000, [[30.0] * 5] * 2, 500_000)
    outlier = made_up_run(1000, [[30.0, 30.0, 500.0, 30.0, 30.0]] * 2, 500_000)
    slow_in_turn = made_up_run(1000, [[30.0, 12.0, 30.0, 12.0], [12.0, 30.0, 12.0, 30.0]], 500_000)
    no_work, larger = made_up_run(1000, even, 500_000), made_up_run(1000, [[12.0] * 5] * 2, 3_000_000)
    quicker = made_up_run(1000, [[8.0] * 5] * 2, 3_000_000)
    for what, hooked, gathers, ranks, expected, hint in (
        ("a hook that adds 20 ms and saves 1.5 MB", cheap, False, 2, 600.0,
         "Both times contain a transfer at 1,000 Mbit/s: 16 ms without the hook, 4 ms with it."),
        ("a hook with one very slow step", outlier, False, 2, 600.0, "One of its five steps took half a second."),
        ("a hook whose ranks are slow in turn", slow_in_turn, False, 2, 600.0,
         "In each step one of the ranks works for 30 ms, and the other waits for it."),
        ("the first hook on 4 ranks", cheap, False, 4, 900.0,
         "For an all-reduce a rank sends 2(W-1)/W of the bytes: with 4 ranks 1.5 times what it sends with 2."),
        ("the first hook on 4 ranks, if it all-gathers", cheap, True, 4, 600.0,
         "In a ring all-gather a rank passes on the parts of all others: 3 parts with 4 ranks, 1 part with 2."),
        ("the first hook on 8 ranks, if it all-gathers", cheap, True, 8, 0.0,
         "With 8 ranks a rank passes on 7 parts of 0.5 MB, and the all-reduce without a hook sends 3.5 MB."),
        ("a hook that adds no time", no_work, False, 2, math.inf, "It saves bytes and takes no time: math.inf."),
        ("a hook that sends more", larger, False, 2, 0.0, "It saves nothing, so it pays at no bandwidth: 0."),
        ("a quicker hook that sends more", quicker, False, 2, 0.0, "It saves no bytes, so return 0."),
    ):  # fmt: skip
        try:
            seen = break_even(json.loads(json.dumps(plain)), json.loads(json.dumps(hooked)), gathers, ranks)
        except ZeroDivisionError:
            raise Wrong(f"for {what} on {ranks} ranks yours divides by zero. {hint}") from None
        if not isinstance(seen, int | float) or isinstance(seen, bool):
            raise Wrong(f"for {what} return a number of Mbit/s; yours returns {seen!r}")
        if not math.isclose(seen, expected, rel_tol=1e-6, abs_tol=1e-6):
            raise Wrong(f"{what} pays below {expected:g} Mbit/s; you say {seen:g}. {hint}")
    runs = {(run["mbit"], run["hook"]): run for run in recorded("recorded_hooks.json")["runs"]}
    for hook in sorted({hook for _, hook in runs} - {"float32"}):
        below = break_even(runs[10_000, "float32"], runs[10_000, hook], hook.startswith("SVD"), 2)
        for mbit in (1000, 100):
            times = [statistics.median(map(max, *runs[mbit, name]["step_ms"])) for name in ("float32", hook)]
            if max(times) > 1.2 * min(times) and (mbit < below) != (times[1] < times[0]):
                ends = "{:.0f} ms without it and {:.0f} ms with it".format(*times)
                raise Wrong(f"{hook} should pay below {below:,.0f} Mbit/s, you say, but at {mbit:,} a step took {ends}")


CHOSEN_4_4B = {
    "a slow network": ("low rank", "At 100 Mbit/s the bytes of float32 take 200 ms."),
    "a fast network": ("float32", "At 10,000 Mbit/s the bytes of float32 take 2 ms."),
    "one slow rank": ("bf16", "With float32 one rank takes 10 ms and the other 24: how long is a step?"),
    "the same, the other way round": ("bf16", "With float32 one rank takes 24 ms and the other 10."),
    "two slow steps first": ("bf16", "Its steps take 900, 90, 10, 10, ... ms: which of them will the job see?"),
    "a tie": (None, ""),
}


@exercise("4.4b", "all ranks register the same hook, the one with the shortest step.")
def exercise_4_4b(script: str | Path) -> None:
    """A file with choose(step, hooks, mbit) -> the name of one of the hooks, on two ranks."""
    refuse_stub(script)
    question = "Does every rank call `step` equally often, with the same hooks in the same order?"
    reports = reports_of_ranks("choose_hook", 2, str(script), question=question)
    for job, planned in recorded("hooks_to_choose.json").items():
        mbit, hooks = planned["mbit"], planned["hooks"]
        seen, (expected, hint) = [report[job] for report in reports], CHOSEN_4_4B[job]
        if different := next((each["different"] for each in seen if each["different"]), None):
            raise Wrong(f"{job}: one rank calls step({different[0]!r}) while the other calls step({different[1]!r})")
        names = [each["name"] for each in seen]
        if wrong := [name for name in names if name not in hooks]:
            raise Wrong(f"{job}: return one of {', '.join(map(repr, hooks))}; yours returns {wrong[0]!r}")
        if names[0] != names[1]:
            raise Wrong(
                f"{job}, {mbit:,} Mbit/s: rank 0 chooses {names[0]!r} and rank 1 {names[1]!r}. Each rank knows its own "
                "times: decide from numbers that all ranks have"
            )
        if expected and names[0] != expected:
            raise Wrong(f"{job}, {mbit:,} Mbit/s: {expected!r} has the shortest step; you choose {names[0]!r}. {hint}")


# --- Lesson 4.5: onto a cluster --------------------------------------------------------------------------------------


@exercise("4.5a", "the sick machine has no worker, and the job continues where it was interrupted.")
def exercise_4_5a(rescue: Callable[[list[dict], Path, Path], dict]) -> str:
    """rescue(items, laptop, storage) -> {"sick": name, "job": {"command": ..., "working_dir": ..., ...}}."""
    if "NotImplementedError" in rescue.__code__.co_names:
        raise NotImplementedError  # before a cluster is started
    return judge_rescue(tried_on_machines(rescue))


def tried_on_machines(rescue: Callable) -> "Rescued":
    """Start a sick cluster, show what verify_cluster.py says of it, and try the answer there."""
    from checks.rescue import sick_cluster, try_rescue  # ray reads its settings when it is imported

    with sick_cluster() as sick:
        for item in sick.items:
            print(f"{'[OK]  ' if item['ok'] else '[FAIL]'} {item['name']}: {item['seen']}")
        return try_rescue(rescue, sick)


def judge_rescue(seen: "Rescued") -> str:
    """Return the praise for a job that continues on the healthy machine; raise Wrong otherwise."""
    if seen.named != seen.sick:
        raise Wrong(
            f"machine {seen.named!r} is healthy. The failed item names the sick one by its address and the first "
            "digits of its node ID. Which machine has that ID?"
        )
    printed = "\n".join(seen.lines)
    if "can't open file" in printed:
        raise Wrong("the head has no train.py. Which folder of the laptop has to travel with the command?")
    if missing := re.search(r"No module named '(\w+)'", printed):
        raise Wrong(
            f"the job found no module {missing[1]!r}. Is it directly in the working_dir? If not, which folder should "
            "that be, or what else sends code?"
        )
    if "worker group startup timed out" in printed:
        raise Wrong("the job waited for more workers than there is room for. How many CPUs do healthy machines have?")
    workers = re.findall(r"rank \d+ on machine (\w+) continues after step (\d+)", printed)
    if not workers:
        raise Wrong(f"the job has trained nothing. Its last line: {seen.lines[-1] if seen.lines else ''}")
    if seen.sick in [machine for machine, _ in workers]:
        raise Wrong(f"a worker ran on the sick machine {seen.sick}. Which option of train.py keeps it away?")
    if not re.search(rf"--avoid[ =]['\"]?{seen.sick}\b", seen.command):
        raise Wrong(f"no worker ran on {seen.sick}, but only by chance. Which option of train.py keeps it away?")
    if int(workers[0][1]) != seen.saved_step:
        raise Wrong(
            f"the job continued after step {workers[0][1]}, but the interrupted run had saved step {seen.saved_step}. "
            "Where is newest.pt, and can the machine of rank 0 see that folder?"
        )
    if max(seen.losses, default=0) != seen.last_step:
        raise Wrong(f"the last step should be {seen.last_step}, but is {max(seen.losses, default=0)}")
    apart = max(abs(loss - seen.expected[step]) for step, loss in seen.losses.items())
    if apart > 1e-9:
        raise Wrong(f"the losses differ from those of one process by up to {apart:.1e}")
    return f"Machine {seen.sick} was sick; steps {min(seen.losses)} to {seen.last_step} have the losses of one process."


@exercise("4.5b", "a path survives in a folder that all machines share, or in a bucket.")
def exercise_4_5b(survives: Callable[[str, list[str]], bool]) -> None:
    """survives(path, mounts) -> whether files under this path are still there after their machine is lost."""
    mounts = ["/mnt/shared", "/mnt/data"]
    for path, expected, why in (
        ("/mnt/shared/runs", True, "it is in a shared folder"),
        ("/mnt/data/sets/a.csv", True, "there are two shared folders"),
        ("/mnt/shared", True, "it is the shared folder"),
        ("s3://bucket/runs", True, "a bucket belongs to no machine"),
        ("gs://bucket/runs", True, "a bucket belongs to no machine"),
        ("runs/a", False, "a relative path leads into the job's own folder"),
        ("mnt/shared/a", False, "without a slash at its beginning it is relative"),
        ("/tmp/runs", False, "it is the machine's own disk"),
        ("/mnt/shared2/runs", False, "it begins with the letters of /mnt/shared, but is a different folder"),
        ("/mnt/shared/../private", False, "`..` leads out of the folder again: it is /mnt/private"),
        ("file:///tmp/runs", False, "a URI, but it points to the machine's own disk"),
    ):
        seen = survives(path, list(mounts))
        if bool(seen) != expected or seen is None:
            raise Wrong(f"survives({path!r}, {mounts}) should be {expected}, but yours says {seen!r}: {why}")


# --- Lesson 4.6: whose fault is a hang? ------------------------------------------------------------------------------

REDUCE, OTHER, BARRIER = "all_reduce [4]", "all_reduce [8]", "barrier"
CALLS = (  # what each rank called, the right answer, and what to ask of a wrong one
    ([[REDUCE] * 3, [REDUCE] * 3, [REDUCE] * 2 + [BARRIER]], (3, [2]), "Which call is the first that differs?"),
    ([[REDUCE, BARRIER]] + [[REDUCE] * 2] * 3, (2, [0]), "Rank 0 is not the norm: what do most ranks call?"),
    ([[REDUCE], [OTHER], [REDUCE]], (1, [1]), "Do you count from 1? Does a different size count?"),
    ([[REDUCE, BARRIER]] * 2 + [[REDUCE, OTHER]] * 2, (2, []), "If two calls are equally frequent, who is right?"),
    ([[REDUCE], [BARRIER], [OTHER]], (1, []), "If all calls differ, who is right?"),
    ([[REDUCE] * 3, [REDUCE], [REDUCE] * 3, [REDUCE, BARRIER]], (2, [3]), "Rank 1 did not make call 2. Can it differ?"),
    ([[REDUCE] * 3, [REDUCE] * 2], None, "A rank that is behind has made no different call."),
    ([[], []], None, "Nobody has called anything."),
    ([[REDUCE, OTHER, BARRIER]] * 3 + [[REDUCE, BARRIER, OTHER]] * 2, (2, [3, 4]), "Several ranks may be at fault."),
)


@exercise("4.6a", "the first difference is found, and a tie names nobody.")
def exercise_4_6a(first_difference: Callable[[dict[int, list[str]]], tuple[int, list[int]] | None]) -> None:
    """first_difference(calls) -> (number of the call, ranks at fault), or None if no call differs."""
    for calls, expected, question in CALLS:
        given = {rank: list(each) for rank, each in enumerate(calls)}
        seen = first_difference(given)
        if seen is not None:
            try:
                number, ranks = seen
                seen = int(number), list(ranks)
            except (TypeError, ValueError):
                raise Wrong(f"return a number and a list of ranks, or None; yours is {seen!r}") from None
        if seen != expected:
            raise Wrong(f"of the calls {dict(enumerate(calls))} your answer is {seen}, expected {expected}. {question}")


@exercise("4.6b", "a missing file was not the rank's fault, and one job cannot be decided.")
def exercise_4_6b(diagnose: Callable[[], dict[str, int | None]]) -> None:
    """diagnose() -> the rank at fault in each of the recorded jobs "X", "Y" and "Z", or None."""
    seen = diagnose()
    expect_answers(seen, "XYZ", [0, 1, 2, 3, None])
    questions = {  # look here only after you have tried
        "X": (3, "Which group does each rank wait in? Do three of them agree"),
        "Y": (3, "What does the note say about the missing dump? What do the stacks say without the dumps"),
        "Z": (None, "How many ranks are in each of the two calls? Could the others be right"),
    }
    for job, (rank, question) in questions.items():
        if seen[job] != rank:
            raise Wrong(f"for job {job} it is not {seen[job]}. {question}?")


# --- Lesson 4.7: lose a replica --------------------------------------------------------------------------------------


@exercise("4.7a", "each step counts once, and the result is the same as with one process.")
def exercise_4_7a(trial: Callable[[], tuple[list[float], list[dict]]]) -> str:
    """trial() -> (losses of one process, the notes of replicas of which "b" was killed and returned)."""
    losses, lines = trial()
    committed = [line for line in lines if line["committed"]]
    if early := next((line for line in committed if line["loads"] and line["step"] < line["loads"][-1]), None):
        told = f"b loaded the state of step {early['loads'][-1]} from its peer, and then took step {early['step']}"
        raise Wrong(f"{told}. When does a newcomer learn which step it is?")
    for line in committed:
        step, others = line["step"], [each for each in committed if each["step"] == line["step"]]
        if len({each["bits"] for each in others}) > 1:
            raise Wrong(
                f"after step {step} the replicas have different weights. Does a replica that has not committed a step "
                "still change its weights? Do all replicas average, and all take their optimizer's step?"
            )
        apart = abs(line["loss"] - losses[step])
        if not apart < 1e-12:
            dealt = [sample for each in others for sample in each["samples"]]
            given_up = [line for line in lines if line["step"] == step and not line["committed"]]
            newcomer = next((each for each in lines if each["loads"] and each["step"] <= step), None)
            told = f"in step {step}, with {line['participants']} of 2 replicas, the loss is {apart:.1e} off"
            if len(set(dealt)) < len(dealt):
                raise Wrong(f"{told}, and two replicas learn from the same samples. Who deals, and by which rank?")
            if len(dealt) < sum(len(each["samples"]) for each in committed if each["step"] == 0):
                raise Wrong(f"{told}: {len(dealt)} samples count. Who takes the share of a replica that is not there?")
            if given_up and set(given_up[0]["samples"]) <= set(dealt):
                raise Wrong(f"{told}, with the right batch. What did the attempt that was not committed change?")
            if newcomer:
                question = "Which batch does a newcomer take its share of? Who knows which step it is?"
            else:
                question = "Which batch should it take after an attempt that was not committed?"
            raise Wrong(f"{told}. {question}")
    survivor = [line["step"] for line in committed if line["replica"] == "a"]
    if survivor != list(range(len(losses))):
        raise Wrong(f"replica a committed the steps {survivor}, instead of each of {len(losses)} once")
    joined = next(line["step"] for line in lines if line["loads"])
    return f"b returned in step {joined}."


@exercise("4.7b", "one note decides each, and without the notes of b nobody can tell.")
def exercise_4_7b(diagnose: Callable[[], dict[str, str | None]]) -> None:
    """diagnose() -> where replica b died in each of the recorded jobs "X", "Y" and "Z", or None."""
    seen = diagnose()
    expect_answers(seen, "XYZ", ["quorum", "all-reduce", "commit", None])
    questions = {  # look here only after you have tried
        "X": ("commit", "a committed a step with two replicas that b did not note: what had both done by then"),
        "Y": ("all-reduce", "a tried a step twice: with how many replicas did it fail, and what fails then"),
        "Z": (None, "Is there a second place that leaves the same notes of a"),
    }
    for job, (place, question) in questions.items():
        if seen[job] != place:
            raise Wrong(f"for job {job} it is not {seen[job]!r}. {question}?")


# --- Lesson 4.8: write a hook ----------------------------------------------------------------------------------------

MOST_SENT, MOST_LOSS = 0.05, 0.25  # a part of DDP's bytes; above DDP's loss
ARRIVES = 0.5, 1.05  # of a gradient that stays the same


@exercise("4.8a", "both ranks agree, the bytes are few, what is left out comes later, and it trains as well.")
def exercise_4_8a(script: str | Path) -> str:
    """A file with make_state() and hook(state, bucket), a communication hook that sends little and trains as well."""
    refuse_stub(script)
    question = "Does every rank call the same collectives, with tensors of the same length, in each step?"
    reports = reports_of_ranks("hook_on_trial", 2, str(script), question=question)
    plain, hooked = ([report[run] for report in reports] for run in ("float32", "hook"))
    losses = [sum(rank[0]["losses"][-10:]) / 10 for rank in (plain, hooked)]
    apart = max(rank["apart"] for rank in hooked)
    if not apart == 0:
        raise Wrong(
            f"the weights of the two ranks differ by up to {apart:.1e} at the end. Every rank has to return the same "
            "average. Does a rank put the numbers of the other one where that rank took them from, in the same order?"
        )
    sent = [max(rank["sent"] for rank in run) for run in (plain, hooked)]
    shown = "bytes that this system does not count"
    if sent[0]:
        shown = f"{sent[1] / 1e3:,.0f} kB per step, {sent[1] / sent[0]:.1%} of DDP's {sent[0] / 1e3:,.0f}"
    if sent[1] > MOST_SENT * sent[0]:
        raise Wrong(f"a rank sends {shown}; at most {MOST_SENT:.0%} are allowed. What has how many bytes per number?")
    arrives, (least, most) = hooked[0]["arrives"], ARRIVES
    if not least <= arrives <= most:
        question = "What becomes of what a rank does not send? Does each rank remember its own part, and find it again?"
        if arrives > most:
            question = f"The loss of training is {losses[1]:.3f}, and still: do you return the mean over the ranks?"
        raise Wrong(
            f"of a gradient that is the same in 40 steps, {arrives:.0%} of the mean over the ranks arrives per step; "
            f"{least:.0%} to {most:.0%} are allowed. {question}"
        )
    if not losses[1] <= losses[0] + MOST_LOSS:
        raise Wrong(
            f"the loss of the last ten steps is {losses[1]:.3f}, and {losses[0]:.3f} with DDP's all-reduce; at most "
            f"{MOST_LOSS} more are allowed. Does what you left out in one step come in a later one, in all buckets?"
        )
    return f"A rank sends {shown}; loss {losses[1]:.3f}, DDP's {losses[0]:.3f}."
