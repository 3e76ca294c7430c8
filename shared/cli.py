"""The contract that every training script keeps: the same options, metrics file, errors and signals."""

import argparse
import json
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn, TextIO

import torch
import torch.distributed as dist

from shared import checkpoint
from shared.data import IMAGE_DATASETS
from shared.distributed import (
    UsageError,
    Worker,
    agent_store,
    claimed,
    end_at_once,
    from_rank_zero,
    rank_from_environment,
)
from shared.models import IMAGE_MODELS

IMAGE_PRECISIONS = {
    "fp32": "everything in float32", "bf16": "autocast, weights stay float32", "fp64": "to compare runs"
}  # fmt: skip


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
    add("--batch-size", type=positive_int, default=64,
        help="GLOBAL batch: samples an optimizer step, over all ranks (default: %(default)s)")  # fmt: skip
    add("--lr", type=positive_float, default=1e-3,
        help="Adam's learning rate at the start (default: %(default)s)")  # fmt: skip
    add("--lr-step-size", type=positive_int, default=2, metavar="EPOCHS",
        help="halve the learning rate every so many epochs (default: %(default)s; long runs want more)")  # fmt: skip
    add("--seed", type=seed, default=0, help="seed of weights, sample order and dropout (default: %(default)s)")
    add("--model", choices=models, default=models[0], help="default: %(default)s")
    add("--dataset", choices=datasets, default=datasets[0], help="default: %(default)s, which needs no download")
    add("--data-dir", default="data", help="where data sets are downloaded to (default: ./%(default)s)")
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in precisions.items())
    add("--precision", choices=tuple(precisions), default="fp32", help=f"{meanings} (default: %(default)s)")
    add("--storage-path", default="runs", help="folder that holds the runs' checkpoints (default: ./%(default)s)")
    add("--run-name", help="the run's folder under --storage-path (default: a new one, with the time in its name)")
    add("--resume", action="store_true", help="go on from the newest readable checkpoint of --run-name")
    add("--metrics-out", metavar="FILE", help="write one JSON line an epoch to FILE")
    return parser


def check_precision(precision: str, device: torch.device) -> None:
    """Raises ValueError for bf16 on a GPU without bf16 units, where it would be emulated, and for fp16 on a CPU."""
    if precision == "fp16" and device.type == "cpu":
        raise ValueError("--precision fp16 needs a GPU; on a CPU use fp32 or bf16")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(f"{torch.cuda.get_device_name(device)} has no bf16 units; use --precision fp32")


def new_run_name() -> str:
    """A name for a run that was given none: the script, the time, the process."""
    return time.strftime(f"{Path(sys.argv[0]).stem}-%Y%m%d-%H%M%S-") + str(os.getpid())


def run_folder(args: argparse.Namespace) -> Path:
    """The run's folder, the same on every rank and after every restart by torchrun.

    Without --run-name the first process to ask puts the time into torchrun's own key-value store, which outlives the
    processes that torchrun restarts.
    """
    name = args.run_name
    if name is None:
        name = new_run_name()
        if (store := agent_store()) is not None:
            name = store.compare_set("workshop/run_name", "", name).decode()
        else:
            name = from_rank_zero(name)
    if "://" in args.storage_path:
        raise UsageError(f"--storage-path {args.storage_path}: this script writes to a folder that its node can see")
    return Path(args.storage_path).absolute() / name


def claim_run(
    args: argparse.Namespace, folder: Path | str, worker: Worker, storage: ModuleType = checkpoint
) -> dict | None:
    """Make the run's folder; return the state to go on from, or None to start from nothing. For rank 0 alone.

    storage: where `folder` is: `shared.checkpoint` for a folder that this node sees, or `shared.cluster` for Ray's
    storage. Raises ValueError for a run that exists and is not resumed, for one that has nothing to resume, and for a
    storage path that cannot be written.
    """
    if args.resume and args.run_name is None:
        raise ValueError("--resume needs the --run-name of the run to go on with")
    if storage.list_newest_first(folder) and not (args.resume or worker.restarted):
        raise ValueError(f"{folder} holds a run already: add --resume to go on with it, or choose another --run-name")
    path, state, skipped = storage.load_newest(folder)
    for what in skipped:
        worker.log(f"skipped {what}")
    if state is None and (skipped or (args.resume and not worker.restarted)):
        raise ValueError(f"nothing to resume: no readable checkpoint in {folder}")
    if state is None and worker.restarted:
        worker.log(f"restarted, and there is no checkpoint in {folder}: beginning anew")
    try:
        storage.make_folder(folder)
    except OSError as error:
        raise ValueError(f"cannot write to --storage-path: {error.strerror or error}: {folder}") from error
    check_metrics_out(args)
    if state is not None:
        check_same_run(args, path, state.get("progress", {}).get("options", {}), worker)
        worker.log(f"resuming from {path}")
    claimed()
    return state


def check_metrics_out(args: argparse.Namespace) -> None:
    """Raises ValueError where --metrics-out cannot be written to; what is in it stays."""
    if args.metrics_out is not None:
        try:
            Path(args.metrics_out).parent.mkdir(parents=True, exist_ok=True)
            open(args.metrics_out, "a").close()
        except OSError as error:
            raise ValueError(f"cannot write to --metrics-out: {error.strerror}: {args.metrics_out}") from error


def options_of(args: argparse.Namespace) -> dict:
    """The options that decide what a run computes, for its checkpoints; an image model has no preset."""
    names = ("model", "preset", "zero_stage", "dataset", "text_file", "precision", "batch_size", "lr", "lr_step_size")
    names += ("seed",)
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def check_same_run(args: argparse.Namespace, path: Path | str, saved: dict, worker: Worker) -> None:
    """Raises ValueError when a checkpoint is of another model, data set or program; says what else is not as it was."""
    now = options_of(args)
    for name in ("model", "preset", "zero_stage", "dataset"):
        if (name in saved) != (name in now):
            raise ValueError(f"{path} was not written by this training script")
        if saved.get(name) != now.get(name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{path} is of {option} {saved[name]}, and this run asks for {option} {now[name]}")
    changed = [f"{name} {saved.get(name)} -> {now[name]}" for name in now if saved.get(name) != now[name]]
    if changed:
        worker.log(
            f"note: not the options it was started with ({', '.join(changed)}); the optimizer keeps its learning rate"
        )


def new_progress(args: argparse.Namespace) -> dict:
    """What a run's checkpoints hold beside the tensors: where it is, and the metrics so far.

    step: optimizer steps in all. epoch: the current epoch, from 0. position: samples of it already trained on, over all
    ranks. loss_sum: their losses added up. step_losses: its steps' global mean losses. metrics: one dict an epoch.
    """
    progress = {"step": 0, "epoch": 0, "position": 0, "loss_sum": 0.0, "step_losses": [], "metrics": []}
    return {**progress, "options": options_of(args)}


def record_steps(progress: dict, step_losses: list[float], counts: list[int]) -> None:
    """Note steps just taken: their global mean losses, and how many samples each took over all ranks.

    Raises UsageError where a loss is not finite, on every rank since all have the same: what follows would be saved,
    and push out the checkpoints that are still good.
    """
    for number, loss in enumerate(step_losses, progress["step"] + 1):
        if not math.isfinite(loss):
            raise UsageError(f"diverged: the loss of step {number} is {loss} (epoch not saved): try a smaller --lr")
    for loss, count in zip(step_losses, counts, strict=True):
        progress["loss_sum"] += loss * count
    progress["step"] += len(counts)
    progress["position"] += sum(counts)
    progress["step_losses"] = progress["step_losses"] + step_losses


def finish_epoch(progress: dict, num_samples: int, measured: dict) -> dict:
    """The epoch's line for --metrics-out. An epoch that --max-steps cut short stays the current one, to be resumed."""
    line = {
        "epoch": progress["epoch"] + 1,
        "train_loss": progress["loss_sum"] / progress["position"],
        **measured,
        "step_losses": progress["step_losses"],
        "samples_seen": progress["position"],
    }
    progress["metrics"] = [*progress["metrics"][: progress["epoch"]], line]
    if progress["position"] == num_samples:
        progress |= {"epoch": progress["epoch"] + 1, "position": 0, "loss_sum": 0.0, "step_losses": []}
    return line


def describe(line: dict, epochs: int) -> str:
    """An epoch's metrics in words."""
    return (
        f"epoch {line['epoch']}/{epochs}  train_loss {line['train_loss']:.4f}  val_loss {line['val_loss']:.4f}  "
        f"val_accuracy {line['val_accuracy']:.3f}  {line['samples_per_second']:.0f} samples/s"
    )


def write_metrics(path: str | Path | None, lines: list[dict]) -> None:
    """Write one JSON line an epoch to `path`, replacing the file at once. None: nothing is written."""
    if path is None:
        return
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.replace(partial, path)


def resume_command(run_name: str) -> str:
    """The shell command that goes on with the run of this name."""
    words = [word for word in sys.argv if word != "--resume"]
    if "--run-name" not in words and not any(word.startswith("--run-name=") for word in words):
        words += ["--run-name", run_name]
    words.append("--resume")
    if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
        return f"the same command on every node, with --run-name {run_name} --resume"
    launcher = ["python"]
    if "LOCAL_WORLD_SIZE" in os.environ:
        launcher = ["torchrun", "--standalone", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]
    return shlex.join(launcher + words)


def farewell(folder: Path | str, storage: ModuleType = checkpoint) -> str:
    """What a user who stops a run needs to know: what is saved, and how to go on."""
    newest = storage.list_newest_first(folder)
    if not newest:
        return "nothing was saved yet"
    return f"{newest[0]} is saved; go on with: {resume_command(Path(folder).name)}"


def stop_on_signals(worker: Worker, message: Callable[[], str], clean_up: Callable[[], None] = lambda: None) -> None:
    """From now on Ctrl-C and SIGTERM end this process at once with exit code 128 + signal; rank 0 prints `message()`.

    clean_up: called before that, and given five seconds. The signal is taken by a thread: Python runs signal handlers
    in the main thread only, which may be waiting in a collective for a rank that has gone. It hears of every signal
    that has a handler, also of the SIGCHLD that a DataLoader's workers end with.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        while (number := os.read(read_end, 1)[0]) not in (signal.SIGINT, signal.SIGTERM):
            pass
        if worker.rank == 0:
            worker.log(f"stopped by {signal.Signals(number).name}: {message()}")
        cleaning = threading.Thread(target=clean_up, daemon=True)
        cleaning.start()
        cleaning.join(5)
        os._exit(128 + number)

    threading.Thread(target=wait, daemon=True).start()


def run(main: Callable[[], None]) -> None:
    """Run a script: a UsageError ends it with exit code 2 and one line, printed by rank 0.

    Where rank 0 has none, and the ranks have not met yet, the first process of the node that has it prints the line.
    """
    try:
        main()
    except UsageError as error:
        rank, met = rank_from_environment(), dist.is_initialized()
        if rank != 0:
            # torchrun ends all processes when the first one exits: let rank 0 speak before that.
            time.sleep(30)
        if rank == 0 or (not met and os.environ.get("LOCAL_RANK") == "0"):
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
        if met:
            end_at_once(2)
        sys.exit(2)
    except RuntimeError:
        # A rank that was stopped breaks the collectives of the others a moment before their own signal arrives.
        time.sleep(1)
        raise
