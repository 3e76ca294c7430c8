"""The contract that every training script keeps with its user: the same options, errors and signals."""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, TextIO

import torch
import torch.distributed as dist

from shared.data import IMAGE_DATASETS
from shared.distributed import UsageError, Worker, rank_from_environment
from shared.models import GPT_PRESETS, IMAGE_MODELS
from shared.runs import Run

SHARED_FOLDER = Path("/mnt/cluster_storage")  # on every node of an Anyscale cluster
IMAGE_PRECISIONS = {
    "fp32": "float32, but that cuDNN's convolutions may round to TF32 on a GPU",
    "bf16": "autocast, weights stay float32",
    "fp64": "to compare runs",
}


class RunFailed(UsageError):
    """A run that ended for good, by no mistake of its user: told in the same way, with exit code 1."""

    kind, exit_code = "failed", 1


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are UsageErrors, and whose help is printed by rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")

    def print_help(self, file: TextIO | None = None) -> None:
        if rank_from_environment() == 0:
            super().print_help(file)


def positive_int(text: str) -> int:
    """An option's value as an integer above 0."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def positive_float(text: str) -> float:
    """An option's value as a number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not a number above 0")
    return value


def seed(text: str) -> int:
    """An option's value as a seed that every generator takes, also with an epoch or a rank added: 0 to 2**62."""
    value = int(text)
    if not 0 <= value <= 2**62:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 2**62")
    return value


def path_or_uri(text: str) -> str:
    """An option's value as an absolute path; a URI as it is, but for a slash at its end."""
    return text.rstrip("/") if "://" in text else os.path.abspath(text)


def run_name(text: str) -> str:
    """An option's value as the name of a folder, not the path of one."""
    if "/" in text or text in ("", ".", ".."):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a folder: --storage-path says where runs lie")
    return text


def training_parser(
    description: str, models: Sequence[str] = IMAGE_MODELS, datasets: Sequence[str] = IMAGE_DATASETS,
    precisions: Mapping[str, str] = IMAGE_PRECISIONS,
) -> Parser:  # fmt: skip
    """The options that all training scripts share, with the choices that a script serves; it adds options of its own.

    The first of the choices is the default. precisions: with what each one means, for --help.
    """
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=positive_int, default=5, help="passes over the training set (default: %(default)s)")
    add("--max-steps", type=positive_int, help="stop after this many optimizer steps in all (default: no limit)")
    add("--save-every-steps", type=positive_int, metavar="STEPS",
        help="save inside an epoch too, after every so many optimizer steps (default: at its end)")  # fmt: skip
    add("--batch-size", type=positive_int, default=64,
        help="GLOBAL batch: samples an optimizer step, over all ranks (default: %(default)s)")  # fmt: skip
    add("--lr", type=positive_float, default=1e-3,
        help="Adam's learning rate at the start (default: %(default)s)")  # fmt: skip
    add("--lr-step-size", type=positive_int, default=2, metavar="EPOCHS",
        help="halve the learning rate every so many epochs (default: %(default)s; long runs want more)")  # fmt: skip
    add("--seed", type=seed, default=0, help="seed of weights, sample order and dropout (default: %(default)s)")
    add("--model", choices=models, default=models[0], help="default: %(default)s")
    add("--dataset", choices=datasets, default=datasets[0], help="default: %(default)s, which needs no download")
    # Ray moves its workers to folders of their own: what is relative must be made absolute here.
    add("--data-dir", type=os.path.abspath, default="data", help="where data sets are downloaded to (default: ./data)")
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in precisions.items())
    add("--precision", choices=tuple(precisions), default="fp32", help=f"{meanings} (default: %(default)s)")
    add("--storage-path", default="runs", help="folder that holds the runs' checkpoints (default: ./%(default)s)")
    add("--run-name", type=run_name,
        help="the run's folder under --storage-path (default: a new one, with the time in its name)")  # fmt: skip
    add("--resume", action="store_true", help="go on from the newest readable checkpoint of --run-name")
    add("--metrics-out", metavar="FILE", help="write one JSON line an epoch to FILE")
    return parser


def num_workers(text: str) -> int:
    """An option's value as a number of workers, 0 among them."""
    if ":" in text:
        raise argparse.ArgumentTypeError(f"{text}: this script trains with one number of workers, not MIN:MAX")
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def elastic_workers(text: str) -> tuple[int, int]:
    """An option's value, MIN:MAX, as the fewest and the most workers; or one number for both, as `num_workers`."""
    if ":" not in text:
        return num_workers(text), num_workers(text)
    fewest, most = map(int, text.split(":", maxsplit=1))
    if not 1 <= fewest <= most:
        raise argparse.ArgumentTypeError(f"{text} is not MIN:MAX with 1 <= MIN <= MAX")
    return fewest, most


def ray_parser(
    description: str, workers: Callable[[str], object] = num_workers, **choices: Sequence[str] | Mapping[str, str]
) -> Parser:
    """The options of every training script, and those of the scripts on Ray. choices: see `training_parser`.

    workers: what reads --num-workers.
    """
    parser = training_parser(description, **choices)
    parser.set_defaults(storage_path=str(SHARED_FOLDER / "runs") if SHARED_FOLDER.is_dir() else "runs")
    parser.add_argument("--num-workers", type=workers, default="2", metavar="N",
        help="training processes; 0: Ray's local mode, in this process, to debug; MIN:MAX (train_ray_ddp.py alone): as "
        "many as there is room for, also when nodes come and go (default: %(default)s)")  # fmt: skip
    parser.add_argument("--use-gpu", action=argparse.BooleanOptionalAction, default=None,
        help="one GPU a worker (default: if there are any; say so where a cluster has yet to start them)")  # fmt: skip
    return parser


def gpt_parser(description: str, precisions: Mapping[str, str]) -> Parser:
    """The options of the scripts on Ray that train a GPT. precisions: see `training_parser`."""
    parser = ray_parser(description, models=("gpt",), datasets=("text",), precisions=precisions)
    parser.add_argument("--preset", choices=tuple(GPT_PRESETS), default="nano",
        help="size of the GPT; nano has 1 M parameters (default: %(default)s)")  # fmt: skip
    parser.add_argument("--text-file", metavar="FILE", type=os.path.abspath,
        help="train on 1,280 windows of this text, which every node has at this path, the same ones each epoch "
        "(default: Python's standard library)")  # fmt: skip
    parser.add_argument("--activation-checkpointing", action="store_true",
        help="keep only the blocks' inputs, and compute the rest again in the backward pass")  # fmt: skip
    return parser


def check_precision(precision: str, device: torch.device) -> None:
    """Raises ValueError for bf16 on a GPU without bf16 units, where it would be emulated, and for fp16 on a CPU."""
    if precision == "fp16" and device.type == "cpu":
        raise ValueError("--precision fp16 needs a GPU; on a CPU use fp32 or bf16")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(f"{torch.cuda.get_device_name(device)} has no bf16 units; use --precision fp32")


STOPPING = threading.Event()


def stop_on_signals(worker: Worker, run: Run, clean_up: Callable[[], None] = lambda: None) -> None:
    """From now on Ctrl-C and SIGTERM end this process within seconds, with exit code 128 + signal.

    Rank 0 says before that what is saved of `run`, and how to go on with it; then clean_up is called. None of them can
    keep the process from ending: a storage that does not answer, a printer that is gone, an error each get some
    seconds. The signal is taken by a thread: Python runs signal handlers in the main thread only, which may be waiting
    in a collective for a rank that has gone. It hears of every signal that has a handler, also of the SIGCHLD that a
    DataLoader's workers end with.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: STOPPING.set())

    def say(name: str, pool: ThreadPoolExecutor) -> None:
        try:
            words = pool.submit(run.farewell).result(timeout=5)
        except TimeoutError:
            words = f"{run.folder} does not answer; go on with: {run.resume_command()}"
        pool.submit(worker.log, f"stopped by {name}: {words}").result(timeout=5)

    def wait() -> None:
        while (number := os.read(read_end, 1)[0]) not in (signal.SIGINT, signal.SIGTERM):
            pass
        STOPPING.set()
        try:
            pool = ThreadPoolExecutor()
            if worker.rank == 0:
                with contextlib.suppress(Exception):
                    say(signal.Signals(number).name, pool)
            pool.submit(clean_up).result(timeout=5)
        finally:
            os._exit(128 + number)

    threading.Thread(target=wait, daemon=True).start()


def run(main: Callable[[], None]) -> None:
    """Run a script: a UsageError ends it with exit code 2 (a RunFailed with 1) and one line, printed by rank 0.

    Where rank 0 has none, and the ranks have not met yet, the first process of the node that has it prints the line.
    """
    try:
        main()
    except Exception as error:
        told = isinstance(error, UsageError)
        if not told:
            # A rank that was stopped breaks the collectives of the others a moment before their own signal arrives.
            time.sleep(1)
        if STOPPING.is_set():
            time.sleep(60)  # what breaks while this process is being ended is no error of its own
        if not told:
            raise
        rank, met = rank_from_environment(), dist.is_initialized()
        if rank != 0:
            # torchrun ends all processes when the first one exits: let rank 0 speak before that.
            time.sleep(30)
        if rank == 0 or (not met and os.environ.get("LOCAL_RANK") == "0"):
            print(f"{Path(sys.argv[0]).name}: {error.kind}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Where there is a process group, without the teardown of Python's modules, which may abort.
        (os._exit if met else sys.exit)(error.exit_code)
