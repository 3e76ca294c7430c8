"""Train two ranks through failures at given steps, for exercise 4.1a: one run for each choice of settings.

    python hidden_failures.py NUM_STEPS FAILURES FOLDER,SAVE_EVERY,TIMEOUT_S...

FAILURES: JSON, a list of [step, "killed" or "hangs"]. A kill takes rank 0 and a hang rank 1, before they compute this
step, once each. The runs are forked from this process and go side by side. In each, a supervisor forks the ranks, and
forks both again when one of them ends. It stops when all steps are done, or when ranks have given up twice although
nothing had failed. FOLDER/log.jsonl holds what happened.

checks/data/quiet_run.json was made of such a log: 60 steps, no failures, SAVE_EVERY 15, TIMEOUT_S 20.
"""

import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

STEP_S, SAVE_S, EVALUATE_S, EVALUATE_EVERY = 0.05, 0.25, 1.0, 40
PATIENCE_S = 60  # for the ranks to meet, and for a step that no timeout ends
MAX_FALSE_ALARMS = 2


def main() -> None:
    num_steps, failures = int(sys.argv[1]), json.loads(sys.argv[2])
    settings = [words.rsplit(",", 2) for words in sys.argv[3:]]
    runs = [
        fork(supervise, Path(folder), num_steps, failures, int(save_every), float(timeout_s))
        for folder, save_every, timeout_s in settings
    ]
    sys.exit(max([os.waitstatus_to_exitcode(os.waitpid(run, 0)[1]) for run in runs], key=abs))


def supervise(folder: Path, num_steps: int, failures: list, save_every: int, timeout_s: float) -> None:
    """Start both ranks again and again."""
    failing = {(step, int(what == "hangs")): what for step, what in failures}
    false_alarms, attempt, done = 0, 0, False
    while not done and false_alarms < MAX_FALSE_ALARMS:
        attempt += 1
        ranks = [fork(train, folder, attempt, rank, num_steps, failing, save_every, timeout_s) for rank in (0, 1)]
        try:
            done = wait_for_the_first_end(folder, attempt, ranks)
        finally:
            note(folder, "over", attempt=attempt)
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
                os.waitpid(rank, 0)
        lines = [line for line in read(folder) if line["attempt"] == attempt]
        false_alarms += not done and not any(line["what"] in ("killed", "hangs") for line in lines)


def fork(function, *arguments) -> int:
    """Call a function in a fork of this process, which then ends, and return the fork's process ID."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        function(*arguments)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait_for_the_first_end(folder: Path, attempt: int, ranks: list[int]) -> bool:
    """Wait until all steps are done (True) or a rank has ended (False), and remove that one from `ranks`."""
    deadline, seen = time.monotonic() + PATIENCE_S, 0
    while time.monotonic() < deadline:
        lines = read(folder)
        if sum(line["what"] == "done" and line["attempt"] == attempt for line in lines) == 2:
            return True
        for rank in ranks:
            if os.waitpid(rank, os.WNOHANG)[0]:
                ranks.remove(rank)
                return False
        if len(lines) > seen:
            deadline, seen = time.monotonic() + PATIENCE_S, len(lines)
        time.sleep(0.01)
    raise TimeoutError("the ranks did nothing for a minute")


def train(
    folder: Path, attempt: int, rank: int, num_steps: int, failing: dict[tuple[int, int], str], save_every: int,
    timeout_s: float,
) -> None:  # fmt: skip
    """Be one rank, from the newest checkpoint to the end."""
    store = f"file://{folder}/store-{attempt}"
    dist.init_process_group("gloo", store, timedelta(seconds=PATIENCE_S), world_size=2, rank=rank)
    dist.barrier()
    dist.set_timeout(timedelta(seconds=timeout_s))
    checkpoint, weight = folder / "checkpoint.json", torch.zeros(1)
    step = json.loads(checkpoint.read_text()) if checkpoint.exists() else 0
    note(folder, "resumes", attempt=attempt, rank=rank, step=step)
    while step < num_steps:
        step, began = step + 1, time.monotonic()
        what = failing.get((step, rank))
        if what and not (folder / f"failed-{step}").exists():
            (folder / f"failed-{step}").touch()
            note(folder, what, attempt=attempt, rank=rank, step=step)
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        time.sleep(STEP_S)
        ready = time.monotonic()
        try:
            dist.all_reduce(weight)
        except RuntimeError:
            waited_s = time.monotonic() - ready
            note(folder, "gives up", attempt=attempt, rank=rank, step=step, waited_s=waited_s)
            raise
        waited_s, step_s = time.monotonic() - ready, time.monotonic() - began
        note(folder, "step", attempt=attempt, rank=rank, step=step, step_s=step_s, waited_s=waited_s)
        if rank == 0 and step % EVALUATE_EVERY == 0:
            time.sleep(EVALUATE_S)
        if rank == 0 and step % save_every == 0:
            time.sleep(SAVE_S)
            checkpoint.with_suffix(".new").write_text(json.dumps(step))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)
            note(folder, "saved", attempt=attempt, rank=rank, step=step)
    note(folder, "done", attempt=attempt, rank=rank)
    time.sleep(PATIENCE_S)  # to be killed: a rank that left now could break the other's last all-reduce


def note(folder: Path, what: str, **line: object) -> None:
    """Append a line to the log."""
    with open(folder / "log.jsonl", "a") as file:
        file.write(json.dumps({"time": time.monotonic(), "what": what, **line}) + "\n")


def read(folder: Path) -> list[dict]:
    """Return the lines of the log so far."""
    path = folder / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


if __name__ == "__main__":
    main()
