"""Let forked ranks hang in known ways, and collect what each hang leaves behind: for lesson 4.6.

python hanging_ranks.py FOLDER HANG ...    # all at the same time; FOLDER/HANG gets logs, stacks and dumps
python hanging_ranks.py FOLDER --seed N    # six of them, drawn: into FOLDER/A to FOLDER/F, names in FOLDER/names.json

A rank's log is what it prints. Its stack is what py-spy sees from outside. Its dump is what its flight recorder holds:
the last 2,000 collectives. With gloo a timeout writes no dump, so a thread in each rank writes it during the hang.
"""

import argparse
import contextlib
import json
import logging
import os
import pickle
import random
import re
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

import explain_hang
import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.loader import read_dir
from torch.utils.data import DataLoader

RANKS = 4
TIMEOUT_S = float(os.getenv("TIMEOUT_S", "8"))  # of every collective
QUIET_S = float(os.getenv("QUIET_S", "2"))  # if no rank has made a call for this long, they hang
FOREVER = 3600


# --- The hangs. Each function is called on all four ranks. -----------------------------------------------------------


def new_group(name: str, ranks: list[int] | None = None) -> dist.ProcessGroup:
    return dist.new_group(ranks, timeout=timedelta(seconds=TIMEOUT_S), group_desc=name)


def train_step(numbers: int = 4) -> None:
    dist.all_reduce(torch.ones(numbers))


def skipped_call(rank):
    for step in range(10):
        if (rank, step) == (2, 5):  # this batch is damaged
            continue
        train_step()
    dist.barrier()


def only_on_rank_0(rank):
    for step in range(10):
        train_step()
        if rank == 0 and step == 9:
            dist.all_reduce(torch.ones(1))  # the mean loss, for the log
    dist.barrier()


def send_weights() -> None:
    dist.broadcast(torch.ones(1000), src=0)


def other_order(rank):
    calls = [train_step, send_weights]
    for call in reversed(calls) if rank == 1 else calls:
        call()


def other_shape(rank):
    train_step()
    # Rank 3 sends a mean, the others their losses. With gloo, rank 3 does not wait.
    dist.all_reduce(torch.ones(1 if rank == 3 else 4))
    dist.barrier()


def slow(rank):
    for step in range(10):
        train_step()
        for _ in range(FOREVER * 10 if (rank, step) == (1, 6) else 0):
            time.sleep(0.1)  # one batch after another comes from a slow disk


def locked(rank):
    lock = threading.Lock()
    for step in range(10):
        train_step()
        lock.acquire()
        if (rank, step) != (3, 4):  # it returned early, and kept the lock
            lock.release()


def busy_loop(rank):
    for step in range(10):
        train_step()
        while (rank, step) == (1, 3):
            pass


class StuckFile:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(FOREVER if index == 5 else 0)
        return index


def stuck_loader(rank):
    dataset = StuckFile() if rank == 1 else range(8)
    for _ in DataLoader(dataset, num_workers=int(rank == 1)):
        train_step()


def fewer_batches(rank):
    for _ in range(9 if rank == 3 else 10):
        train_step()
    dist.barrier()


def swallowed_exception(rank):
    for step in range(10):
        with contextlib.suppress(ZeroDivisionError):
            1 / (0 if (rank, step) == (2, 7) else 1)
            train_step()
    dist.all_gather([torch.zeros(1)] * RANKS, torch.zeros(1))


def resumes_alone(rank):
    train_step()
    if rank == 0:
        dist.broadcast(torch.ones(1000), src=1)
    train_step(1000)


def two_against_two(rank):
    train_step()
    if rank < 2:
        train_step()
    else:
        dist.barrier()


def slow_save(rank):
    for step in range(10):
        train_step()
        if rank == 0 and step == 4:
            time.sleep(FOREVER)  # writes a checkpoint to storage that does not answer
    dist.barrier()


def stopped(rank):
    for step in range(10):
        train_step()
        if (rank, step) == (3, 5):
            os.kill(os.getpid(), signal.SIGSTOP)


def holds_the_gil(rank):
    for step in range(10):
        train_step()
        if (rank, step) == (1, 5):
            re.match("(a|a)*b", "a" * 60)  # a pattern that takes years


def opposite_groups(rank):
    groups = [new_group("tensor"), new_group("data")]
    for group in reversed(groups) if rank == 3 else groups:
        dist.all_reduce(torch.ones(4), group=group)


def receive_cycle(rank):
    train_step()
    dist.recv(torch.zeros(1), src=(rank + 1) % RANKS)
    dist.send(torch.zeros(1), dst=(rank - 1) % RANKS)


def outside_the_group(rank):
    group = new_group("trainers", [0, 1, 2])
    if rank == 3:  # it serves a web page
        time.sleep(FOREVER)
    dist.all_reduce(torch.ones(4), group=group)
    if rank == 1:
        time.sleep(FOREVER)
    dist.all_reduce(torch.ones(4), group=group)


# The guilty ranks. Nobody can say which two of `two_against_two` are wrong; in `receive_cycle` all are.
GUILTY = {
    "skipped_call": [2], "only_on_rank_0": [0], "other_order": [1], "other_shape": [3], "slow": [1], "locked": [3],
    "busy_loop": [1], "stuck_loader": [1], "fewer_batches": [3], "swallowed_exception": [2], "resumes_alone": [0],
    "two_against_two": [], "slow_save": [0], "stopped": [3], "holds_the_gil": [1], "opposite_groups": [3],
    "receive_cycle": [], "outside_the_group": [1],
}  # fmt: skip


KINDS = [  # the lesson draws a hang of each kind
    ("slow", "locked", "busy_loop", "stuck_loader", "slow_save"),
    ("skipped_call", "fewer_batches", "swallowed_exception"),
    ("only_on_rank_0", "resumes_alone"),
    ("stopped", "holds_the_gil"),
    ("opposite_groups", "outside_the_group"),
    ("two_against_two", "receive_cycle"),
]


def draw(seed: int) -> dict[str, str]:
    """Return a hang of each kind by its letter, in a random order."""
    generator = random.Random(seed)
    names = [generator.choice(kind) for kind in KINDS]
    generator.shuffle(names)
    return dict(zip("ABCDEF", names, strict=True))


# --- What else a rank does. -------------------------------------------------------------------------------------------


def write_dump(path: Path) -> None:
    """Write this rank's flight recorder as NCCL would: gloo leaves out the names and ranks of the groups."""
    with_collectives, with_stacks, only_active = True, False, False  # with stacks, it would take seconds
    dump = pickle.loads(_dump_fr_trace(with_collectives, with_stacks, only_active))
    dump["pg_config"] = {
        group.group_name: {"name": group.group_name, "desc": group.group_desc, "ranks": str(sorted(ranks))}
        for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items()
        if isinstance(group, dist.ProcessGroup)  # only groups to which this rank belongs
    }
    path.with_suffix(".part").write_bytes(pickle.dumps(dump))
    path.with_suffix(".part").replace(path)


def watch(rank: int, folder: Path) -> None:
    """Note how many calls this rank has made, until the file `now` asks for its dump."""
    seen = -1
    while not (folder / "now").exists():
        calls = len(pickle.loads(_dump_fr_trace(True, False, False))["entries"])
        if calls != seen:
            (folder / f"calls-{rank}").write_text(str(calls))
            seen = calls
        time.sleep(0.1)
    write_dump(folder / f"dumps/rank_{rank}")


def run_rank(rank: int, name: str, folder: Path) -> None:
    """Join the group, hang, and end with the error of the timeout. Never returns."""
    log = os.open(folder / f"logs/rank_{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1), os.dup2(log, 2)
    dist.set_debug_level_from_env()
    store = dist.FileStore(str(folder / "store"), RANKS)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    dist.barrier()
    threading.Thread(target=watch, args=(rank, folder), daemon=True).start()
    print(f"[rank{rank}]: training starts", flush=True)
    hang = globals()[name]
    hang.__code__ = hang.__code__.replace(co_name="train", co_qualname="train")  # the stacks must not give it away
    try:
        hang(rank)
        time.sleep(TIMEOUT_S)  # if this rank exited, the others would stop hanging
    except Exception as error:
        print(f"[rank{rank}]: {type(error).__name__}: {error}", flush=True)
    os._exit(1)


# --- The parent: it starts the ranks, waits until they hang, and collects. ------------------------------------------


def start(name: str, folder: Path) -> list[int]:
    """Fork the ranks of a hang, and return their process IDs."""
    for kind in ("logs", "stacks", "dumps"):
        (folder / kind).mkdir(parents=True)
    pids = []
    for rank in range(RANKS):
        pids.append(os.fork())
        if pids[-1] == 0:
            run_rank(rank, name, folder)
    return pids


def wait_until_quiet(folders: list[Path], limit_s: float = 120) -> None:
    """Wait until no rank has made a call for QUIET_S seconds."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        files = [folder / f"calls-{rank}" for folder in folders for rank in range(RANKS)]
        if all(file.exists() for file in files) and time.time() - max(f.stat().st_mtime for f in files) > QUIET_S:
            return
        time.sleep(0.05)
    raise TimeoutError(f"not every rank has started after {limit_s} s")


def write_stack(rank: int, pid: int, folder: Path) -> None:
    """Write what py-spy sees of a rank. A stopped process cannot be paused, so py-spy does not try to."""
    command = ["py-spy", "dump", "--nonblocking", "--pid", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CLICOLOR_FORCE": "0"})
    (folder / f"stacks/rank_{rank}.txt").write_text(done.stdout or done.stderr)


def collect(folders: dict[Path, str]) -> None:
    """Start a hang for each folder; collect dumps and stacks while all of them hang, and logs until the timeout."""
    pids = {folder: start(name, folder) for folder, name in folders.items()}
    try:
        wait_until_quiet(list(folders))
        for folder in folders:
            (folder / "now").touch()
        for folder in folders:
            for rank, pid in enumerate(pids[folder]):
                write_stack(rank, pid, folder)
                if psutil.Process(pid).status() == psutil.STATUS_RUNNING:
                    os.kill(pid, signal.SIGSTOP)  # until the timeout, it would only take a core from the others
        time.sleep(TIMEOUT_S)
    finally:
        for pid in (pid for each in pids.values() for pid in each):
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
                    process.kill()
            os.waitpid(pid, 0)


# --- PyTorch's own command, for comparison. -------------------------------------------------------------------------


def torchfrtrace(folder: Path, last_rank_first: bool = False) -> str:
    """Return the ranks that `torchfrtrace` blames when it reads the dumps in the order of ranks, or reversed.

    The command itself takes the files in the order in which the file system lists them.
    """
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("Flight Recorder")
    handlers, log.handlers = log.handlers, [handler]
    options = argparse.Namespace(trace_dir=str(folder), prefix="rank_", verbose=False, just_print_entries=False)
    options.allow_incomplete_ranks, options.mismatch_cap = False, 10
    try:
        dumps, version = read_dir(options)
        build_db(dict(sorted(dumps.items(), reverse=last_rank_first)), options, version)
    except AssertionError as error:
        messages.append(str(error))
    finally:
        log.handlers = handlers
    blamed = r"(?:Culprit rank |missing ranks: {|Missing dump files from ranks {)([\d, ]+)"
    ranks = re.findall(r"\d+", " ".join(re.findall(blamed, "\n".join(messages))))
    return ", ".join(sorted(set(ranks))) or "nobody"


# --- A picture. -----------------------------------------------------------------------------------------------------


def draw_calls(folders: dict[str, Path], last: int = 3) -> None:
    """Draw a panel for each folder of dumps, by title: the last calls of the default group, a row per rank."""
    import matplotlib.pyplot as plt  # here, because the ranks do not draw

    from shared import plots

    colors = {"all_reduce": plots.COLORS[0], "barrier": plots.COLORS[1]}
    size = (1.45 * last * len(folders), 0.45 * RANKS + 0.9)
    _, panels = plt.subplots(1, len(folders), figsize=size, squeeze=False, layout="constrained")
    for axes, (title, folder) in zip(panels[0], folders.items(), strict=True):
        dumps, guilty = explain_hang.read([folder])[0], explain_hang.explain([folder])["ranks"]
        calls = {rank: next(iter(dump["calls"].values())) for rank, dump in sorted(dumps.items())}
        end = max(max(numbers) for numbers in calls.values())
        first = max(1, end - last + 1)
        for rank, numbers in calls.items():
            for number in range(first, end + 1):
                name, _, sizes = numbers.get(number, (0, ""))[1].partition(" ")
                waits = dumps[rank]["waits"] and dumps[rank]["waits"][1] == number
                box = {"facecolor": colors.get(name, plots.COLORS[2]), "edgecolor": "black" if waits else "none"}
                if name:
                    label = f"{name} {''.join(re.findall(r'[0-9]+', sizes.split(']')[0]))}".rstrip()
                    axes.text(
                        number, rank, label, ha="center", va="center", fontsize=8, color="white",
                        bbox={"boxstyle": "round", "linewidth": 2.5 if waits else 0, **box},
                    )  # fmt: skip
        axes.set(xlim=(first - 0.6, end + 0.6), ylim=(RANKS - 0.5, -0.5), xlabel="call")
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xticks(range(first, end + 1))
        axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
        for rank, label in enumerate(axes.get_yticklabels()):
            label.set(color=plots.COLORS[4], weight="bold") if rank in guilty else None
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("hangs", nargs="*", choices=[*GUILTY, []], metavar="HANG", help=", ".join(GUILTY))
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    names = dict(zip(options.hangs, options.hangs, strict=True)) if options.seed is None else draw(options.seed)
    collect({options.folder / letter: name for letter, name in names.items()})
    (options.folder / "names.json").write_text(json.dumps(names))
