"""The block of chapter 2's README that validates in a task of its own, watched: async_validation_from_readme.py FILE

It joins a Ray of four CPUs. Two are held until two checkpoints are reported, so that no validation can start before.
The first validation ends only when the training function has returned, the second one raises an exception, and the
process of the third one dies once. FILE gets the order of events, each checkpoint's metrics, and what a direct
call of `validate` returns.
"""

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import ray
import ray.train
from ray.train.v2._internal.execution.callback_manager import CallbackManager
from ray.train.v2._internal.execution.checkpoint.validation_manager import ValidationManager

LIMIT = 900  # seconds
EVENTS = Path("events").absolute()
README = Path(__file__).parents[2] / "02-ddp-pytorch-ray/README.md"


def note(event: str) -> None:
    with open(EVENTS, "a") as file:
        file.write(f"{event}\n")


def events() -> list[str]:
    return EVENTS.read_text().splitlines()


def wait_for(event: str) -> None:
    deadline = time.monotonic() + LIMIT
    while event not in events():
        assert time.monotonic() < deadline, f"no {event!r} in {events()}"
        time.sleep(0.05)


@ray.remote(num_cpus=2)
def hold_cpus() -> None:
    note("held")
    wait_for("reported 2")


def watch_train(train: Callable[[], None]) -> Callable[[], None]:
    def watched() -> None:
        rank, real_report = ray.train.get_context().get_world_rank(), ray.train.report

        def report(metrics: dict, **options: object) -> None:
            real_report(metrics, **options)
            if rank == 0:
                note(f"reported {metrics['epoch']}")
            if metrics["epoch"] == 2:
                wait_for("1 begins")  # so all steps of the third epoch fall into the first validation

        ray.train.report = report
        train()
        if rank == 0:
            note("trained")

    return watched


def watch_validate(validate: Callable[[ray.train.Checkpoint], dict]) -> Callable[[ray.train.Checkpoint], dict]:
    def watched(checkpoint: ray.train.Checkpoint) -> dict:
        path = Path(checkpoint.path)
        number = sorted(path.parent.glob("checkpoint_2*")).index(path) + 1  # the names hold the time
        note(f"{number} begins")
        if number == 1:
            wait_for("trained")
            ray.get(ray.remote(num_cpus=4)(lambda: None).remote(), timeout=LIMIT)  # it needs the CPUs of both workers
            note("workers have gone")
        elif number == 2:
            raise RuntimeError("planted")
        elif events().count("3 begins") == 1:
            os._exit(1)
        metrics = validate(checkpoint)
        note(f"{number} ends")
        return metrics

    return watched


def validate_alone(
    fn: Callable, task_config: ray.train.ValidationTaskConfig | None = None, **ray_remote_kwargs: object
) -> tuple[dict, str]:
    """Return the metrics and the status that a checkpoint gets at the end of a fit, without training."""
    updates: dict = {}
    checkpoints = SimpleNamespace(
        get_pending_training_results=dict, update_checkpoints_with_validation_result=updates.update
    )
    config = ray.train.ValidationConfig(fn, task_config=task_config, ray_remote_kwargs=ray_remote_kwargs)
    manager = ValidationManager(checkpoints, config)
    manager.after_report(SimpleNamespace(validation=True, checkpoint="a checkpoint"), [])
    asyncio.run(CallbackManager([manager]).async_invoke("before_controller_shutdown"))
    metrics, status = updates["a checkpoint"]
    return metrics, status.value


def main() -> None:
    (block,) = re.findall(r"^```python\n(import tempfile.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    definitions, trainer_begins, rest = block.partition("trainer = ")
    scope = {"__name__": "__main__"}
    exec(definitions, scope)
    validate = scope["validate"]
    scope |= {"train": watch_train(scope["train"]), "validate": watch_validate(validate)}

    ray.init(log_to_driver=False)
    EVENTS.touch()
    held = hold_cpus.remote()
    wait_for("held")
    exec(trainer_begins + rest.replace("trainer.fit()", "(result := trainer.fit())"), scope)
    ray.get(held)
    found = {
        "events": events(),
        "metrics": [metrics for _, metrics in scope["result"].best_checkpoints],
        "direct": [validate(checkpoint) for checkpoint, _ in scope["result"].best_checkpoints],
        "timeout": validate_alone(lambda _: time.sleep(LIMIT), ray.train.ValidationTaskConfig(timeout_s=0.1)),
    }
    try:
        validate_alone(lambda _: os._exit(1), max_retries=0)
    except ray.train.ControllerError as error:
        found["dead"] = type(error.controller_failure).__name__
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
