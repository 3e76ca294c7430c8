"""Define the options of all training scripts on Ray."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.distributed import FROM_TORCHRUN
from shared.errors import UsageError
from shared.running.options import Parser, checked, training_parser
from shared.tasks import Task

SHARED_FOLDER = Path("/mnt/cluster_storage")  # on every node of an Anyscale cluster


def ray_parser(description: str, tasks: Sequence[type[Task]], **choices: Sequence[str] | Mapping[str, str]) -> Parser:
    """Return a parser with the options of every training script, and those of the scripts on Ray.

    choices: see `training_parser`.
    """
    parser = training_parser(description, tasks, **choices)
    parser.set_defaults(storage_path=str(SHARED_FOLDER / "runs") if SHARED_FOLDER.is_dir() else "runs")
    parser.add_argument("--num-workers", type=num_workers, default=2, metavar="N",
        help="training processes; 0: Ray's local mode, in this process, to debug (default: %(default)s)")  # fmt: skip
    parser.add_argument("--use-gpu", action=argparse.BooleanOptionalAction, default=None,
        help="one GPU per worker (default: if there are any; give it if a cluster has yet to start them)")  # fmt: skip
    parser.completions += [refuse_torchrun, refuse_resume_in_local_mode, refuse_other_letters]
    return parser


def refuse_torchrun(options: argparse.Namespace) -> None:
    """Raise UsageError if torchrun has started this process and the options ask for Ray workers.

    Each of torchrun's processes would start all of the workers.
    """
    if options.num_workers not in (0, (0, 0)) and all(name in os.environ for name in FROM_TORCHRUN):
        raise UsageError("Ray starts the processes itself: start with plain python, or give --num-workers 0")


def refuse_resume_in_local_mode(options: argparse.Namespace) -> None:
    """Raise UsageError for --resume in local mode."""
    if options.resume and options.num_workers in (0, (0, 0)):
        raise UsageError("--resume: Ray's local mode (--num-workers 0) stores no checkpoints")


def refuse_other_letters(options: argparse.Namespace) -> None:
    """Raise UsageError for a --run-name that Ray Train cannot carry: it goes into an ASCII message."""
    if options.run_name is not None and not options.run_name.isascii():
        raise UsageError(f"--run-name: {options.run_name!r} has letters that Ray Train cannot send: use ASCII only")


def elastic_parser(description: str, tasks: Sequence[type[Task]]) -> Parser:
    """Return the parser of `ray_parser`, with MIN:MAX allowed for --num-workers.

    `num_workers` is then MIN, and `max_workers` is MAX.
    """
    parser = ray_parser(description, tasks)
    parser.add_argument("--num-workers", type=elastic_workers, default="2", metavar="N or MIN:MAX",
        help="training processes; 0: Ray's local mode, in this process, to debug; MIN:MAX: as many as there is room "
        "for, even when nodes come and go (default: %(default)s)")  # fmt: skip
    parser.completions.append(split_worker_range)
    return parser


def worker_range(text: str) -> tuple[int, int]:
    """Return (fewest, most) workers for a text N or MIN:MAX. Raises ValueError for anything else."""
    fewest, _, most = text.partition(":")
    if ":" in text and int(fewest) < 1:
        raise ValueError(f"{text}: a range begins at 1")
    return int(fewest), int(most if ":" in text else fewest)


def split_worker_range(options: argparse.Namespace) -> None:
    """Split the option (MIN, MAX) in two: num_workers and max_workers."""
    options.num_workers, options.max_workers = options.num_workers


num_workers = checked(int, lambda value: value >= 0, "a number of workers, 0 or more (this script takes no MIN:MAX)")
elastic_workers = checked(
    worker_range, lambda value: 0 <= value[0] <= value[1],
    "a number of workers, 0 or more, or MIN:MAX with 1 <= MIN <= MAX",
)  # fmt: skip
