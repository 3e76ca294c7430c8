"""Run searches of four trials, each of which needs a worker process of its own, on a Ray with two CPUs.

    python nested_trials.py '[{"resources": {"CPU": 1}, "max_concurrent_trials": 2}]' [OUT.json]

For each setting it prints what happened, or writes a list of outcomes. A search in which every process waits is ended
after some seconds, and Ray's reservations are recorded first.
"""

import json
import logging
import os
import sys
import tempfile
import time

os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # trials that are stuck end with an error
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ.pop("RAY_ADDRESS", None)

import ray  # after its settings
from ray import tune
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

TRIALS, CPUS, STILL_S = 4, 2, 6


@ray.remote(num_cpus=0)
class Board:
    """Hold what each trial says of itself."""

    def __init__(self) -> None:
        self.states, self.changed, self.stuck = {}, time.monotonic(), None

    def say(self, trial: str, state: str) -> None:
        self.states[trial], self.changed = state, time.monotonic()

    def is_stuck(self) -> bool:
        """Return whether every trial that has begun and not ended has waited for some seconds. It stays true."""
        states = self.states.values()
        waiting = [state for state in states if state == "waits"]
        still = waiting and "trains" not in states and time.monotonic() - self.changed > STILL_S
        if not self.stuck and still and ray.available_resources().get("CPU", 0) < 1:  # with more, Ray is only slow
            groups = placement_group_table().values()
            held = [[group["state"], bundle] for group in groups for bundle in group["bundles"].values()]
            held = sorted((each for each in held if each[0] != "REMOVED"), key=str)
            self.stuck = {"free": ray.available_resources().get("CPU", 0), "reservations": held}
        return bool(self.stuck)

    def outcome(self) -> dict:
        return {"ended": sum(state == "ended" for state in self.states.values()), "stuck": self.stuck}


def train_epoch(lr: float) -> float:
    """Take a few steps down a parabola, in a worker process."""
    x = 1.0
    for _ in range(10):
        x -= lr * 2 * x
    return x * x


def trial(values: dict, board: ray.actor.ActorHandle) -> None:
    """Reserve a CPU for a worker, as Ray Train does, and train there."""
    name = tune.get_context().get_trial_id()
    if ray.get(board.is_stuck.remote()):
        raise RuntimeError("the search is stuck")
    ray.get(board.say.remote(name, "waits"))
    group = placement_group([{"CPU": 1}])
    try:
        while not group.wait(0.5):
            if ray.get(board.is_stuck.remote()):
                raise RuntimeError("the search is stuck")
        ray.get(board.say.remote(name, "trains"))
        on_group = PlacementGroupSchedulingStrategy(placement_group=group)
        worker = ray.remote(num_cpus=1)(train_epoch).options(scheduling_strategy=on_group)
        loss = ray.get(worker.remote(values["lr"]))
    finally:
        remove_placement_group(group)
    ray.get(board.say.remote(name, "ended"))
    tune.report({"loss": loss})


def search(resources: dict, max_concurrent_trials: int, folder: str) -> dict:
    """Run one search and return how many trials ended, and Ray's reservations if all waited."""
    board = Board.remote()
    tune.Tuner(
        tune.with_resources(tune.with_parameters(trial, board=board), resources),
        param_space={"lr": tune.grid_search([0.1 * number for number in range(1, TRIALS + 1)])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=max_concurrent_trials),
        run_config=tune.RunConfig(storage_path=folder, verbose=0, failure_config=tune.FailureConfig(fail_fast=True)),
    ).fit()
    return ray.get(board.outcome.remote())


def describe(outcome: dict) -> str:
    """Describe an outcome in lines that Ray's own table supports."""
    lines = [f"{outcome['ended']} of {TRIALS} trials ended"]
    if stuck := outcome["stuck"]:
        lines.append(f"then nothing happened for {STILL_S} s; CPUs free: {stuck['free']:g} of {CPUS}")
        lines += [f"reservation {state:8} {bundle}" for state, bundle in stuck["reservations"]]
    return "\n".join(lines)


def main() -> None:
    settings, *out = sys.argv[1:]
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    ray.init("local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = [search(**setting, folder=folder) for setting in json.loads(settings)]
    ray.shutdown()
    if out:
        with open(out[0], "w") as file:
            json.dump(outcomes, file)
    else:
        print(*map(describe, outcomes), sep="\n\n")


if __name__ == "__main__":
    main()
