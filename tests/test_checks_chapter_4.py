"""The checks of chapter 4's exercises accept right answers, and reject the stub and plausible mistakes with help."""

import dataclasses
import importlib.util
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from answers import OnRanks, assert_rejects, judge, stub, written
from ray import tune

import checks
from checks import chapter_4
from checks.machinery import Wrong
from checks.probes import hidden_failures as hidden
from checks.rescue import Rescued

ON_RANKS = OnRanks({2: ()})
launched, run_before = ON_RANKS.fixtures()

# --- 4.1: failures ----------------------------------------------------------------------------------------------------


# On a busy machine a rank may wait seconds longer, or come late itself and wait less. So the false alarm's timeout is
# far below an evaluation with a save (1.25 s), the others are far above it, and no test says in which step it comes.
CHOICES = {"right": (18, 4), "false alarm": (20, 0.5), "rare saves": (50, 4), "many saves": (5, 4)}


@pytest.fixture(scope="module")
def logs_of_choices() -> dict[tuple, list[dict]]:
    """What really happens with each choice; the check runs only one at a time."""
    logs = chapter_4.hidden_failures(*CHOICES.values())
    return dict(zip(CHOICES.values(), logs, strict=True))


@pytest.fixture
def choices_run_before(logs_of_choices, monkeypatch):
    """Let the check find what the processes have done already."""
    monkeypatch.setattr(chapter_4, "hidden_failures", lambda choice: [logs_of_choices[choice]])
    return lambda answer: answer


test_4_1a = judge(checks.exercise_4_1a, [lambda: CHOICES["right"]], [
    (stub, "not done yet"),
    (lambda: CHOICES["false alarm"], re.compile(r"step \d+ rank \d gave up after [0-9.]+ s, and nothing had failed")),
    (lambda: CHOICES["rare saves"], "98 in all, at most 65 are allowed. Would you save more often"),
    (lambda: CHOICES["many saves"], "108 in all, at most 65 are allowed. Would you save less often"),
    (lambda: 18, "yours is 18"),
    (lambda: (18.5, 3), "whole steps; you say 18.5"),
    (lambda: (18, 1800), "at most 4 s; you say 1800"),
], prepare="choices_run_before")  # fmt: skip


def test_4_1a_a_kill_is_noticed_without_the_timeout_and_a_hang_by_it(logs_of_choices):
    lines = logs_of_choices[CHOICES["right"]]
    gave_up = [line for line in lines if line["what"] == "gives up" and line["waited_s"] > 3.9]
    assert [(line["rank"], line["step"]) for line in gave_up] == [(0, 64)]
    assert [line["step"] for line in lines if line["what"] == "resumes" and line["rank"] == 0] == [0, 18, 54, 90]


def test_4_1a_a_false_alarm_that_repeats_itself_is_called_so():
    alarm = {"what": "gives up", "rank": 1, "step": 41, "waited_s": 1.1}
    said = r"In step 41 rank 1 gave up after 1.10 s, .* After the restart the same happened there again"
    with pytest.raises(Wrong, match=said):
        chapter_4.judge_failures([{**alarm, "attempt": 1}, {**alarm, "attempt": 2}], 20, 1.1)


def test_4_1a_an_evaluation_makes_the_other_rank_wait(logs_of_choices):
    longest = max(line["waited_s"] for line in logs_of_choices[CHOICES["right"]] if line["what"] == "step")
    assert longest >= hidden.EVALUATE_S  # how much longer depends on the machine


def test_4_1a_the_quiet_run_holds_what_is_asked_for():
    waited = [waited_s for _, waited_s in checks.recorded("quiet_run.json")["rank 1"]]
    assert len(waited) == 60 and not any(0.02 < seconds < 0.2 for seconds in waited)
    assert [step for step, seconds in enumerate(waited, start=1) if seconds > 0.2] == [16, 31, 41, 46]
    assert round(hidden.SAVE_S / hidden.STEP_S) == chapter_4.SAVE_STEPS


def ask_every(notice_s, poll_s, step_s, save_s):
    return max(0, math.floor((notice_s - poll_s - save_s) / step_s))


test_4_1b = judge(checks.exercise_4_1b, [ask_every], [
    (stub, "not done yet"),
    (lambda notice, poll, step, save: max(0, (notice - save) // step), "looks only that often"),
    (lambda notice, poll, step, save: max(0, (notice - poll) // step), "Saving takes 15 s"),
    (lambda notice, poll, step, save: max(0, math.ceil((notice - poll - save) / step)), "round down"),
    (lambda notice, poll, step, save: max(0, (notice - poll - save) / step), "whole steps"),
    (lambda notice, poll, step, save: max(1, ask_every(notice, poll, step, save)), "not even one step"),
    (lambda notice, poll, step, save: math.floor((notice - poll - save) / step), "not even one step"),
    (lambda notice, poll, step, save: max(0, math.ceil((notice - poll - save) / step) - 1), "exactly in time counts"),
    (lambda *given: None, "a number of steps"),
])  # fmt: skip


# --- 4.2: tuning ------------------------------------------------------------------------------------------------------


def stuck(cpus: float, trials: int) -> dict:
    """What the searches of exercise 4.2a report if no trial ends; tests/all/test_searches.py runs two of them."""
    held = [["CREATED", {"CPU": cpus}]] * trials + [["PENDING", {"CPU": 1.0}]] * trials
    return {"ended": 0, "stuck": {"free": 2 - cpus * trials, "reservations": held}}


@pytest.fixture
def nested_run_before(monkeypatch):
    """Let the check find what the searches would report. The solutions run the right answer on real processes."""

    def nested_searches(*settings):
        fits = [cpus["CPU"] * trials + 1 <= 2 for cpus, trials in settings]
        ended = {"ended": chapter_4.NESTED_TRIALS, "stuck": None}
        return [
            ended if fit else stuck(cpus["CPU"], trials) for fit, (cpus, trials) in zip(fits, settings, strict=True)
        ]

    monkeypatch.setattr(chapter_4, "nested_searches", nested_searches)
    return lambda answer: answer


test_4_2a = judge(checks.exercise_4_2a, [lambda: (1, {"CPU": 0.01}), lambda: [1, {"CPU": 0.25}]], [
    (stub, "not done yet"),
    (lambda: (2, {"CPU": 0.01}), "the first fix, up to 2 trials at a time, each holding 1 CPUs, 0 of 4 trials ended"),
    (lambda: (1, {"CPU": 0.5}), "the second fix, up to 4 trials at a time, each holding 0.5 CPUs, 0 of 4 trials ended"),
    (lambda: (1, {"CPU": 0}), "choose more than 0 CPUs (Tune refuses 0)"),
    (lambda: (1, {"CPU": 0.01, "GPU": 1}), "and nothing else"),
    (lambda: (0.5, {"CPU": 0.01}), "a whole number of trials"),
    (lambda: 1, "yours is 1"),
], prepare="nested_run_before")  # fmt: skip


def searched(epochs=(12, 2, 2, 2, 4, 2, 2, 2, 2, 2, 2, 2), best=0.67, left_out=0) -> Callable:
    """A search whose first trial is the best, and which leaves out as many rates."""

    def search(rates):
        return [
            [{"lr": lr, "epoch": epoch, "accuracy": best if number == 0 else 0.5} for epoch in range(1, last + 1)]
            for number, (lr, last) in enumerate(zip(rates[left_out:], epochs, strict=False))
        ]

    return search


test_4_2b = judge(checks.exercise_4_2b, [searched()], [
    (stub, "not done yet"),
    (searched(epochs=(12,) * 12), "144 epochs, and 46 are allowed. The trials trained, in your order: 12 12"),
    (searched(left_out=4), "try each of the 12 rates once; yours were 0.0045, 0.012"),
    (searched(epochs=(12, 1, 1, 2, 4, 1, 1, 1, 1, 1, 2, 1)), "no trial may stop before epoch 2; which argument"),
    (searched(epochs=(4, 2, 2, 2, 12, 2, 2, 2, 2, 2, 2, 2)), "0.670, belongs to no trial that trained 12 epochs"),
    (searched(best=0.61), "your best accuracy is 0.610; reach 0.65"),
    (lambda rates: [rows[-1:] for rows in searched()(rates)], "was a report left out"),
    (lambda rates: None, "return what run_search returns"),
])  # fmt: skip


def test_4_2a_tune_refuses_trials_that_hold_no_cpu():
    with pytest.raises(ValueError, match="empty head"):
        tune.with_resources(lambda values: None, {"CPU": 0})


def test_4_2_the_papers_rule_saves_epochs_where_rays_saves_none(monkeypatch):
    """Lesson 4.2 shows it with twelve epochs. With eight trials, each better than all before it, Ray's takes 64."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "04-ray-in-production")
    searches = importlib.import_module("searches")
    flat = [[number] * 8 for number in range(8)]
    assert list(searches.pause_and_promote(flat, range(8), 8).values()) == [1, 2, 4, 8, 8, 8, 8, 8]
    assert sum(searches.pause_and_promote(flat, range(8)[::-1], 8).values()) == 20
    assert sum(searches.pause_and_promote(flat, range(8), 8, grace_period=4).values()) == 4 + 7 * 8


# --- 4.3: watching a run ----------------------------------------------------------------------------------------------


WATCHED_SEED = 3


@pytest.fixture(scope="module")
def lines_of_watched_runs() -> dict[str, list[dict]]:
    """What three real ranks wrote in the hidden runs of 4.3a."""
    return chapter_4.watched_lines(WATCHED_SEED)


@pytest.fixture
def watched_before(lines_of_watched_runs, monkeypatch):
    """Let the check find what the ranks have done already."""
    monkeypatch.setattr(chapter_4, "watched_lines", lambda seed: lines_of_watched_runs)
    monkeypatch.setattr(chapter_4.random.SystemRandom, "randrange", lambda self, limit: WATCHED_SEED)
    return lambda answer: answer


def by_rank(lines: list[dict], part: str, summary=statistics.median) -> dict[int, float]:
    ranks = sorted({line["rank"] for line in lines})
    return {rank: summary([line[part] for line in lines if line["rank"] == rank]) for rank in ranks}


def diagnose(lines, summary=statistics.median, factor=1.5, absolute=False):
    parts = {part: by_rank(lines, part, summary) for part in ("reading", "computing")}
    own = {rank: sum(part[rank] for part in parts.values()) for rank in parts["reading"]}
    slowest = max(own, key=own.get)
    if own[slowest] <= factor * statistics.median(work for rank, work in own.items() if rank != slowest):
        return None

    def excess(part):
        usual = statistics.median(seconds for rank, seconds in parts[part].items() if rank != slowest)
        return parts[part][slowest] - (not absolute) * usual

    return slowest, max(parts, key=excess)


def waits_longest(lines):
    waits = by_rank(lines, "waiting")
    return max(waits, key=waits.get), "reading"


def waits_least(lines):
    waits = by_rank(lines, "waiting")
    slowest = min(waits, key=waits.get)
    part = max(("reading", "computing"), key=lambda part: by_rank(lines, part)[slowest])
    return slowest, part


def no_network(lines):
    """Alarms wherever somebody waits long."""
    return waits_least(lines) if max(by_rank(lines, "waiting").values()) > 0.2 else None


def always_reading(lines):
    found = diagnose(lines)
    return found and (found[0], "reading")


test_4_3a = judge(checks.exercise_4_3a, [diagnose, lambda lines: list(diagnose(lines) or []) or None], [
    (stub, "not done yet"),
    (waits_longest, re.compile(r"reads longer, by ten times a step.* Rank \d waits for rank \d")),
    (waits_least, "How much longer is too much"),
    (lambda lines: diagnose(lines, factor=0), "How much longer is too much"),
    (no_network, "No rank's own work is long"),
    (lambda lines: diagnose(lines, absolute=True), re.compile(r"The rank is right\. What takes rank \d longer")),
    (lambda lines: (diagnose(lines) or (0,))[0], "return None, or a rank and one of"),
    (lambda lines: None, "Compare this rank's own work"),
    (always_reading, re.compile(r"computes longer.* The rank is right")),
], prepare="watched_before")  # fmt: skip


def planned_lines(delays: list) -> list[dict]:
    """The lines of a hidden run on ranks that are never held up by anything but the planned delays."""
    lines = []
    for step in range(chapter_4.WATCHED_STEPS):
        for rank in range(3):
            whose = (rank, "all", "in turn") if step % 3 == rank else (rank, "all")
            parts = dict.fromkeys(("reading", "computing", "network"), 0.015)
            for who, part, seconds, when in delays:
                parts[part] += seconds * (who in whose and when in (step, None))
            lines.append({"rank": rank, "step": step + 1, "waiting": parts.pop("network"), **parts})
    return lines


@pytest.fixture
def planned_runs(monkeypatch, watched_before):
    """Let the check find runs without noise: on a busy machine, any run may have the single long step of one."""
    runs = {name: planned_lines(delays) for name, (delays, *_) in chapter_4.watched_runs(WATCHED_SEED).items()}
    monkeypatch.setattr(chapter_4, "watched_lines", lambda seed: runs)
    return watched_before


test_4_3a_a_single_long_step = judge(checks.exercise_4_3a, [diagnose], [
    (lambda lines: diagnose(lines, summary=statistics.mean, factor=3), "does not change if a single one does"),
    (lambda lines: diagnose(lines, summary=max, factor=4), "does not change if a single one does"),
], prepare="planned_runs")  # fmt: skip


def test_4_3a_draws_rank_and_part_and_its_runs_have_what_they_say(lines_of_watched_runs):
    drawn = [chapter_4.watched_runs(seed) for seed in range(50)]
    assert {runs["reads"][1] for runs in drawn} == {(rank, "reading") for rank in range(3)}
    assert {runs["both"][1] for runs in drawn} == {(rank, "computing") for rank in range(3)}
    for delays, *_, planted in chapter_4.watched_runs(WATCHED_SEED).values():
        assert planted and all(len(delay) == 4 for delay in delays)
    for name, (_, expected, _) in chapter_4.watched_runs(WATCHED_SEED).items():
        lines = lines_of_watched_runs[name]
        assert len(lines) == 3 * chapter_4.WATCHED_STEPS
        if expected:
            rank, part = expected
            assert min(line[part] for line in lines if line["rank"] == rank) >= chapter_4.WATCHED_DELAY_S


def own_work(lines: list[dict]) -> list[list[float]]:
    """The ranks' own work in each step."""
    steps, ranks = ({line[key] for line in lines} for key in ("step", "rank"))
    found = {(line["step"], line["rank"]): line["reading"] + line["computing"] for line in lines}
    return [[found[step, rank] for rank in sorted(ranks)] for step in sorted(steps)]


def seconds_saved(lines, of_others=max, least=0.0, steps=lambda works: works):
    works = steps(own_work(lines))
    return {
        rank: sum(max(least, each[rank] - of_others(each[:rank] + each[rank + 1 :])) for each in works)
        for rank in range(len(works[0]))
    }


def medians_of_all_steps(works):
    return [[statistics.median(rank) for rank in zip(*works, strict=True)]] * len(works)


test_4_3b = judge(checks.exercise_4_3b, [seconds_saved], [
    (stub, "not done yet"),
    (lambda lines: seconds_saved(lines, of_others=statistics.mean), "the step ends when rank 1 has worked for 2 s"),
    (lambda lines: seconds_saved(lines, of_others=min), "the step ends when rank 1 has worked for 2 s"),
    (lambda lines: seconds_saved(lines, least=-9.0), "the step ends when rank 1 has worked for 2 s"),
    (lambda lines: seconds_saved(lines, of_others=statistics.median_low), "the step ends when rank 1 has worked"),
    (lambda lines: seconds_saved(lines, steps=medians_of_all_steps), "each rank holds up one step of the three"),
    (lambda lines: seconds_saved(lines, steps=lambda works: works[:1]), "each rank holds up one step"),
    (lambda lines: {rank: s for rank, s in seconds_saved(lines).items() if s}, "with each of the 3 ranks"),
    (lambda lines: 3.0, "with each of the 3 ranks"),
])  # fmt: skip


# --- 4.4: communication hooks -----------------------------------------------------------------------------------------


def break_even(plain, hooked, gathers, ranks, typical=statistics.median, rank=max, subtract=True, factor=None):
    def work(run):
        return typical(list(map(rank, *run["step_ms"]))) - subtract * 8e-3 * run["sent"][0] / run["mbit"]

    all_reduce, all_gather = 2 * (ranks - 1) / ranks, ranks - 1
    saves = all_reduce * plain["sent"][0] - (factor or (all_gather if gathers else all_reduce)) * hooked["sent"][0]
    adds = work(hooked) - work(plain)
    if saves <= 0:
        return 0
    return math.inf if adds <= 1e-9 else 8e-3 * saves / adds


test_4_4a = judge(checks.exercise_4_4a, [break_even], [
    (stub, "not done yet"),
    (lambda *given: break_even(*given, subtract=False), "Both times contain a transfer"),
    (lambda *given: break_even(*given, typical=statistics.mean), "half a second"),
    (lambda *given: break_even(*given, rank=lambda *ms: ms[0]), "the other waits for it"),
    (lambda *given: break_even(*given, rank=lambda *ms: sum(ms) / 2), "the other waits for it"),
    (lambda *given: break_even(*given[:3], 2), "1.5 times"),
    (lambda plain, hooked, _, ranks: break_even(plain, hooked, False, ranks), "3 parts with 4 ranks"),
    (lambda *given: break_even(*given) or math.inf, "7 parts of 0.5 MB"),
    (lambda *given: min(break_even(*given), 1e9), "It saves bytes and takes no time"),
    (lambda plain, hooked, *rest: math.inf if hooked["step_ms"][0][0] < 33 else break_even(plain, hooked, *rest),
     "It saves no bytes"),
    (lambda *given: 1 / 0, "divides by zero"),
    (lambda *given: None, "a number of Mbit/s"),
])  # fmt: skip


def test_the_recorded_hooks_decide_in_4_4a(monkeypatch, capsys):
    """With the times of another machine in the record, the same answer is wrong."""
    record = checks.recorded("recorded_hooks.json")
    for run in record["runs"]:
        if (run["mbit"], run["hook"]) == (1000, "SVD 4"):
            run["step_ms"] = [[1.0], [1.0]]
    monkeypatch.setattr(chapter_4, "recorded", lambda name: record)
    assert_rejects(checks.exercise_4_4a, break_even, "SVD 4 should pay below", capsys)


HEAD_4_4B = "from shared import distributed\n\n\ndef choose(step, hooks, mbit):\n"
SHORTEST = """
    expected = {}
    for hook in hooks:
        measured = [step(hook) for _ in range(4)][2:]
        own = min(ms for ms, _ in measured) + 8e-3 * measured[0][1] / mbit
        expected[hook] = max(distributed.gather_objects(own))
    return min(hooks, key=expected.get)
"""
test_4_4b = ON_RANKS.judge(
    checks.exercise_4_4b, 2, "choose_hook", HEAD_4_4B,
    {"each rank's": SHORTEST, "rank 0 decides": SHORTEST.replace(
        "return min(hooks, key=expected.get)", "return distributed.from_rank_zero(min(hooks, key=expected.get))")},
    {
        "own times": (SHORTEST.replace("max(distributed.gather_objects(own))", "own"), "numbers that all ranks have"),
        "rank 0's times": (SHORTEST.replace("max(distributed.gather_objects(own))", "distributed.from_rank_zero(own)"),
                           "one slow rank, .*'bf16' has the shortest step"),
        "mean": (SHORTEST.replace("max(", "sum("), "how long is a step"),
        "first steps": (SHORTEST.replace("[2:]", ""). replace("min(ms", "max(ms"), "which of them will the job see"),
        "no transfer": (SHORTEST.replace(" + 8e-3 * measured[0][1] / mbit", ""), "take 200 ms"),
        "own order": (SHORTEST.replace("in hooks:", "in hooks[:: 1 - 2 * distributed.rank_from_environment()]:"),
                      "one rank calls step"),
        "a time": (SHORTEST.replace("return min(hooks, key=expected.get)", "return min(expected.values())"),
                   "return one of"),
        "as long as it takes": ("""
    for _ in range(int(step(hooks[0])[0] > 12)):
        step(hooks[0])
    return distributed.from_rank_zero(hooks[0])
""", "equally often|never reached|do not match"),
    },
)  # fmt: skip


# --- 4.5: onto a cluster ----------------------------------------------------------------------------------------------


RESCUED = Rescued(
    "b", "b", ["rank 0 on machine a continues after step 8"], {20: 1.0}, {20: 1.0}, 8, "python train.py --avoid b"
)


@pytest.fixture
def rescued_before(monkeypatch):
    """Let the check find what the answer returns, instead of trying it on machines: tests/all/test_rescue.py does."""
    monkeypatch.setattr(chapter_4, "tried_on_machines", lambda answer: answer())
    return lambda answer: answer


def rescued(**changes):
    return lambda: dataclasses.replace(RESCUED, **changes)


test_4_5a = judge(checks.exercise_4_5a, [rescued()], [
    (stub, "not done yet"),
    (rescued(named="a"), "Which machine has that ID"),
    (rescued(lines=["python: can't open file 'train.py'"]), "has to travel with the command"),
    (rescued(lines=["ModuleNotFoundError: No module named 'shared'"]), "what else sends code"),
    (rescued(lines=["The worker group startup timed out after 60.0 seconds"]), "How many CPUs do healthy"),
    (rescued(lines=["ValueError: 3"]), "Its last line: ValueError: 3"),
    (rescued(lines=["rank 0 on machine b continues after step 8"]), "keeps it away"),
    (rescued(command="python train.py --avoid a"), "only by chance"),
    (rescued(lines=["rank 0 on machine a continues after step 0"]), "Where is newest.pt"),
    (rescued(losses={19: 1.0}), "the last step should be 20, but is 19"),
    (rescued(losses={20: 1.1}), "those of one process by up to 1.0e-01"),
], prepare="rescued_before")  # fmt: skip


def survives(path, mounts):
    inside = any(Path(os.path.normpath(path)).is_relative_to(mount) for mount in mounts)
    return inside or path.startswith(("s3://", "gs://"))


test_4_5b = judge(checks.exercise_4_5b, [survives], [
    (stub, "not done yet"),
    (lambda path, mounts: path.startswith(tuple(mounts)), "a bucket belongs to no machine"),
    (lambda path, mounts: path.startswith((*mounts, "s3:", "gs:")), "it begins with the letters"),
    (lambda path, mounts: "3:" in path or "gs:" in path or any(
        Path(path).is_relative_to(mount) for mount in mounts), "it is /mnt/private"),
    (lambda path, mounts: "://" in path or survives(path, mounts), "points to the machine's own disk"),
    (lambda path, mounts: path.startswith("/") or survives(path, mounts), "it is the machine's own disk"),
    (lambda path, mounts: survives(path, mounts) or None, "yours says None"),
])  # fmt: skip


# --- 4.6: whose fault is a hang? --------------------------------------------------------------------------------------


def by_majority(calls, first=1, ties=True, ask_all=False, norm=None):
    """The solution, or with other arguments a wrong answer."""
    for at in range(max(map(len, calls.values()))):
        made = {rank: each[at] if at < len(each) else "" for rank, each in calls.items() if ask_all or at < len(each)}
        (most, count), *others = Counter(made.values()).most_common()
        if others:
            most = made[norm] if norm is not None else most
            tie = ties and others[0][1] == count and norm is None
            return at + first, [] if tie else [rank for rank in made if made[rank] != most]
    return None


RIGHT_4_6B = {"X": 3, "Y": 3, "Z": None}
test_4_6a = judge(checks.exercise_4_6a, [by_majority], {
    "stub": (stub, "not done yet"),
    "counts from 0": (partial(by_majority, first=0), "Which call is the first that differs"),
    "rank 0 is the norm": (partial(by_majority, norm=0), "Rank 0 is not the norm"),
    "a tie is decided": (partial(by_majority, ties=False), "equally frequent"),
    "a rank that is behind differs": (partial(by_majority, ask_all=True), "Rank 1 did not make call 2"),
    "always": (lambda calls: 3, "return a number and a list of ranks"),
    "never": (lambda calls: None, "first that differs"),
})  # fmt: skip
test_4_6b = judge(checks.exercise_4_6b, [RIGHT_4_6B], {
    "stub": (stub, "not done yet"),
    "as the tool says": (RIGHT_4_6B | {"Y": 1}, "What does the note say about the missing dump"),
    "somebody must be wrong": (RIGHT_4_6B | {"Z": 2}, "Could the others be right"),
    "the majority": (RIGHT_4_6B | {"X": 0}, "Which group does each rank wait in"),
    "a word": (RIGHT_4_6B | {"Z": "nobody"}, "which is not one of"),
    "two jobs": ({"X": 3, "Y": 3}, "return a dict with the keys"),
}, prepare="returned")  # fmt: skip


# --- 4.7: lose a replica ----------------------------------------------------------------------------------------------

CHAPTER = Path(__file__).parents[1] / "04-ray-in-production"
SOLUTION_4_7 = written(CHAPTER / "solutions/07_lose_a_replica.ipynb", "my-loop")
STUB_4_7 = written(CHAPTER / "07_lose_a_replica.ipynb", "my-loop")
AS_PLANTED = "".join(line for line in STUB_4_7.splitlines(True) if "raise NotImplementedError" not in line)
FAULTS_4_7 = {  # by name: the loop, and what the check says
    "as planted": (AS_PLANTED, "after an attempt that was not committed?"),
    "does not skip": (SOLUTION_4_7.replace("while taken <= step:", "if taken <= step:"), "Who knows which step it is"),
    "asks too early": (
        SOLUTION_4_7.replace("        step, rank, n = manager.current_step(), ", "        rank, n = ").replace(
            "        optimizer.zero_grad()", "        step = manager.current_step()\n        optimizer.zero_grad()"),
        re.compile("loaded the state of step .* and then took step 0. When does a newcomer learn")),
    "steps all the same": (
        SOLUTION_4_7.replace("            optimizer.step()", "            pass\n        optimizer.step()"),
        "What did the attempt that was not committed change"),
    "halves": (SOLUTION_4_7.replace("[rank::n]", "[run.index::2]"), "Who takes the share of a replica"),
    "an error": (SOLUTION_4_7.replace("step, committed, model, n", "step, committed"), "RuntimeError: the run hangs"),
}  # fmt: skip
assert len({SOLUTION_4_7, *(loop for loop, _ in FAULTS_4_7.values())}) == 1 + len(FAULTS_4_7)


@pytest.fixture(scope="module")
def loops_tried(tmp_path_factory):
    """What happens with each loop when a replica is killed and returns: (losses of one process, notes) or an error."""
    pytest.importorskip("torchft")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEARTBEAT_S", "2")
        patch.syspath_prepend(CHAPTER)
        import replicas
    model, optimizer = replicas.build()
    losses = []
    for step in range(replicas.STEPS):
        images, labels = replicas.samples(replicas.global_batch(step))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    server, tried = replicas.Server(), {}
    for loop in (SOLUTION_4_7, *(loop for loop, _ in FAULTS_4_7.values())):
        folder = tmp_path_factory.mktemp("loop")
        (folder / "my_loop.py").write_text(loop)
        try:
            lines = server.run(folder / "run", folder / "my_loop.py", lost="b", place="all-reduce")
            tried[loop] = partial(lambda *trial: trial, losses, lines)
        except RuntimeError as error:
            tried[loop] = partial(raises, error)
    server.close()
    return tried


def raises(error):
    raise error


@pytest.fixture
def loop_tried_before(loops_tried):
    return loops_tried.__getitem__


test_4_7a = judge(checks.exercise_4_7a, [SOLUTION_4_7], FAULTS_4_7, prepare="loop_tried_before")


def test_a_loop_that_is_a_stub_is_not_done_yet(tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(CHAPTER)
        import replicas
    (tmp_path / "my_loop.py").write_text(STUB_4_7)
    trial = partial(replicas.Server().run, tmp_path / "run", tmp_path / "my_loop.py", lost="b")
    assert_rejects(checks.exercise_4_7a, trial, "not done yet", capsys)


def test_without_torchft_the_lesson_says_what_to_run(monkeypatch):
    monkeypatch.syspath_prepend(CHAPTER)
    import replicas

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(replicas.PackageMissing, match="Run `make torchft` in the workshop's folder"):
        replicas.check()


RIGHT_4_7B = {"X": "commit", "Y": "all-reduce", "Z": None}
test_4_7b = judge(checks.exercise_4_7b, [RIGHT_4_7B], {
    "stub": (stub, "not done yet"),
    "the note is missing": (RIGHT_4_7B | {"X": "all-reduce"}, "a committed a step with two replicas"),
    "it came no more": (RIGHT_4_7B | {"Y": "quorum"}, "a tried a step twice"),
    "as in X": (RIGHT_4_7B | {"Z": "commit"}, "Is there a second place"),
    "a word": (RIGHT_4_7B | {"Z": "nobody"}, "which is not one of"),
}, prepare="returned")  # fmt: skip


# --- 4.8: write a hook ------------------------------------------------------------------------------------------------

SOLUTION_4_8 = written(Path(__file__).parents[1] / "04-ray-in-production/solutions/08_write_a_hook.ipynb", "write-hook")
SIGNS = """
import torch
import torch.distributed as dist

WEIGHTS = 2 ** torch.arange(8)


def make_state():
    return {}


def hook(memory, bucket):
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
        wanted = gradient.flatten() + memory.get(parameter, 0)
        scale, signs = wanted.abs().mean(), wanted >= 0
        memory[parameter] = wanted - torch.where(signs, scale, -scale)
        packed = (torch.nn.functional.pad(signs, (0, -len(signs) % 8)).view(-1, 8) * WEIGHTS).sum(1).to(torch.uint8)
        message = torch.cat([packed, scale.view(1).view(torch.uint8)])
        parts = [torch.empty_like(message) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, message)
        total = 0
        for part in parts:
            bits = (part[:-4, None].int() & WEIGHTS > 0).flatten()[: len(signs)]
            total += (2 * bits.float() - 1) * part[-4:].clone().view(torch.float32)
        gradient.copy_((total / len(parts)).view_as(gradient))
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
"""
FAULTS_4_8 = {  # by name: what to replace, by what, and what the check says
    "forgets": (" + memory.get(parameter, 0)", "", "What becomes of what a rank does not send"),
    "cannot find it": ("memory.get(parameter, 0)", "memory.get(bucket.index(), 0)", "find it again"),
    "the sum": (" / dist.get_world_size())", ")", "do you return the mean over the ranks"),
    "own places": ("average.index_add_(0, each_places,", "average.index_add_(0, places,", "the two ranks differ"),
    "everything": ("len(wanted) // 100", "len(wanted) // 10", "at most 5% are allowed"),
    "no future": ("    return future", "    return bucket.buffer()", "failed|error"),
    "own lengths": ("len(wanted) // 100)", "len(wanted) // (100 + dist.get_rank()))",
                    "same length|failed|do not match"),
}  # fmt: skip
assert all(SOLUTION_4_8.count(old) == 1 for old, _, _ in FAULTS_4_8.values())
test_4_8a = ON_RANKS.judge(
    checks.exercise_4_8a, 2, "hook_on_trial", "", {"largest": SOLUTION_4_8, "signs": SIGNS},
    {name: (SOLUTION_4_8.replace(old, new), because) for name, (old, new, because) in FAULTS_4_8.items()},
)  # fmt: skip


def test_a_hook_that_is_a_stub_is_not_done_yet(tmp_path, capsys):
    lesson = Path(__file__).parents[1] / "04-ray-in-production/08_write_a_hook.ipynb"
    (tmp_path / "my_hook.py").write_text(written(lesson, "write-hook"))
    assert_rejects(checks.exercise_4_8a, tmp_path / "my_hook.py", "not done yet", capsys)
