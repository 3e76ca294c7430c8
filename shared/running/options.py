"""Define the options of all training scripts, with the same names, defaults and meaning."""

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn, TextIO

from shared.distributed import rank_from_environment
from shared.errors import UsageError
from shared.paths import local_path
from shared.tasks import Task, task_for

PRECISIONS = {
    "fp32": "float32, except that cuDNN convolutions may use TF32 on a GPU",
    "bf16": "autocast, weights stay float32",
    "fp64": "to compare runs",
}


class Options(argparse.Namespace):
    """The parsed options, frozen: nothing is added or changed after parsing."""

    def __init__(self, **values: object) -> None:
        vars(self).update(values)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"options are frozen: {name} cannot be set")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError, prints its help on rank 0 only, and freezes the options.

    completions: functions that are called with the parsed options before these are frozen. They fill in defaults that
    depend on other options, and raise UsageError for options that contradict each other.
    """

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
            conflict_handler="resolve",  # an option that is added again replaces the earlier one
        )  # fmt: skip
        self.completions: list[Callable[[argparse.Namespace], None]] = []

    def parse_args(self, words: Sequence[str] | None = None) -> Options:
        """Return the options of a command line, by default this process's. Raises UsageError."""
        parsed = super().parse_args(words)
        for complete in self.completions:
            complete(parsed)
        return Options(**vars(parsed))

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")

    def print_help(self, file: TextIO | None = None) -> None:
        if rank_from_environment() == 0:
            super().print_help(file)


def checked(convert: Callable, is_valid: Callable[[object], bool], meaning: str) -> Callable[[str], object]:
    """Return an argparse type: `convert` reads the text, and `is_valid` accepts or rejects the value.

    meaning: completes the error message "... is not ...".
    """

    def read(text: str) -> object:
        with contextlib.suppress(ValueError):
            if is_valid(value := convert(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {meaning}")

    return read


positive_int = checked(int, lambda value: value > 0, "a whole number above 0")
# In float32 Adam divides the learning rate by 0.1 in the first step. That overflows above 3e37.
positive_float = checked(float, lambda value: 1e-37 <= value <= 1e37, "a number above 0, between 1e-37 and 1e37")
seed = checked(int, lambda value: 0 <= value <= 2**62, "a whole number between 0 and 2**62")  # an epoch is added to it
run_name = checked(
    str, lambda name: re.fullmatch(r"[^./#?%][^/#?%]*", name) is not None,
    "the name of a run: it becomes a folder under --storage-path, and part of a URI, so no / # ? % and no dot first",
)  # fmt: skip


def training_parser(
    description: str, tasks: Sequence[type[Task]], models: Sequence[str] = (),
    precisions: Mapping[str, str] = PRECISIONS,
) -> Parser:  # fmt: skip
    """Return a parser with the options of all training scripts; a script adds its own.

    tasks: those that the script serves. The default data set is the first one of the first task.
    models: the models that the script serves, by default all of the tasks' models.
    precisions: the choices for --precision, each with its meaning.
    """
    datasets = [name for task in tasks for name in task.dataset_names]
    models = models or [name for task in tasks for name in task.model_names]
    parser = Parser(description)
    parser.completions += [refuse_resume_without_name, partial(complete_for_task, tasks)]
    add = parser.add_argument
    add("--epochs", type=positive_int, default=5, help="passes over the training set (default: %(default)s)")
    add("--max-steps", type=positive_int, help="stop after this many optimizer steps in all (default: no limit)")
    add("--save-every-steps", type=positive_int, metavar="STEPS",
        help="also save inside an epoch, every STEPS optimizer steps (default: only at its end)")  # fmt: skip
    add("--batch-size", type=positive_int, default=64,
        help="GLOBAL batch: samples per optimizer step, over all ranks (default: %(default)s)")  # fmt: skip
    add("--lr", type=positive_float, default=1e-3,
        help="Adam's learning rate at the start (default: %(default)s)")  # fmt: skip
    add("--lr-step-size", type=positive_int, default=2, metavar="EPOCHS",
        help="halve the learning rate every EPOCHS epochs (default: %(default)s; long runs want more)")  # fmt: skip
    add("--seed", type=seed, default=0, help="seed of weights, sample order and dropout (default: %(default)s)")
    add("--dataset", choices=datasets, default=datasets[0], help="default: %(default)s, which needs no download")
    add("--model", choices=models,
        help=f"default: {', '.join(f'{task.model_names[0]} for {task.name}' for task in tasks)}")  # fmt: skip
    # Ray's workers run in folders of their own, so a relative path must be made absolute here.
    add("--data-dir", type=local_path, default="data", help="where data sets are downloaded to (default: ./data)")
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in precisions.items())
    add("--precision", choices=tuple(precisions), default="fp32", help=f"{meanings} (default: %(default)s)")
    add("--storage-path", type=os.path.expanduser, default="runs",
        help="folder that holds the runs' checkpoints (default: ./%(default)s)")  # fmt: skip
    add("--run-name", type=run_name,
        help="the run's folder under --storage-path (default: a new one, with the time in its name)")  # fmt: skip
    add("--resume", action="store_true", help="continue from the newest readable checkpoint of --run-name")
    add("--metrics-out", type=local_path, metavar="FILE", help="write one JSON line per epoch to FILE")
    add("--quiet", action="store_true", help="print no progress lines while an epoch is running")
    for task in tasks:
        task.add_options(parser)
    return parser


def refuse_resume_without_name(options: argparse.Namespace) -> None:
    """Raise UsageError for --resume without --run-name."""
    if options.resume and options.run_name is None:
        raise UsageError("--resume needs the --run-name of the run to continue")


def complete_for_task(tasks: Sequence[type[Task]], options: argparse.Namespace) -> None:
    """Let the data set's task fill in its defaults. Raises UsageError for options that only another task has."""
    task = task_for(options.dataset, tasks)
    for other in tasks:
        for name in other.own_options:
            if other is not task and getattr(options, name):
                raise UsageError(f"--{name.replace('_', '-')} goes with --dataset {other.dataset_names[0]}")
    task.complete_options(options)
