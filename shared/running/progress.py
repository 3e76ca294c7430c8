"""Track a run's progress: its steps and metrics, rank 0's progress lines, and the metrics file."""

import builtins
import errno
import json
import math
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from tqdm import tqdm

from shared.distributed import Worker, global_sum
from shared.errors import UsageError
from shared.sampling import global_batch_counts

LINE_EVERY_S = 5
written_to_devices: set[tuple[Path, str]] = set()  # (device, line)


class Progress:
    """How far a run has come: the part of a checkpoint that is not tensors, and what rank 0 prints.

    step: optimizer steps in all. epoch: the current epoch, from 0. metrics: one dict per epoch. options: those with
    which the run was started, except the seed, which is the one that deals the current epoch. The other attributes
    describe the current epoch. position: samples trained on so far, over all ranks. seconds: their training time,
    without work lost to a kill. loss_sum: the sum of the samples' losses. step_losses: the global mean loss of each
    step.
    """

    saved = ("step", "epoch", "position", "seconds", "loss_sum", "step_losses", "metrics", "options")

    def __init__(
        self, worker: Worker, num_samples: int, options: dict, *, batch_size: int, epochs: int, data: int = 0,
        max_steps: int | None = None, stop_every: Sequence[int | None] = (), quiet: bool = False,
    ) -> None:  # fmt: skip
        """Start at the first step of epoch 0.

        num_samples: per epoch, over all ranks. batch_size: over all ranks. data: the data's checksum. max_steps: in
        all. stop_every: numbers of steps, or None; an epoch is interrupted after each multiple of one of them. quiet:
        print no progress lines.
        """
        self.worker, self.num_samples, self.options, self.data = worker, num_samples, options, data
        self.batch_size, self.epochs, self.max_steps, self.quiet = batch_size, epochs, max_steps, quiet
        self.stop_every = [steps for steps in stop_every if steps is not None]
        self.step, self.epoch, self.metrics = 0, 0, []
        self.begin_epoch()

    def state_dict(self) -> dict:
        """Return what a checkpoint holds, as plain data."""
        return {"num_samples": self.num_samples, "data": self.data} | {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict) -> None:
        """Continue from what `state_dict` returned.

        Raises UsageError if that is of different data, or in the middle of an epoch of a different length or order.
        """
        # Earlier versions did not save these two.
        before, data = state.get("num_samples", self.num_samples), state.get("data", self.data)
        seed, now = state["options"].get("seed"), self.options.get("seed")
        if state["position"] > 0 and seed != now:
            raise UsageError(f"the epoch began with --seed {seed}; --seed {now} deals its samples in a different order")
        if state["position"] > 0 and before != self.num_samples:
            raise UsageError(f"the epoch began with {before} training samples, but now there are {self.num_samples}")
        if data != self.data:
            is_python = self.options.get("dataset") == "text" and not self.options.get("text_file")
            source = " (without --text-file, the same release of Python)" * is_python
            raise UsageError(
                f"the data have changed since the run was started: resume with the old ones{source}, or begin a new "
                "run with a different --run-name"
            )
        vars(self).update({name: state[name] for name in self.saved})
        if now is not None:  # a program may keep it elsewhere
            self.options = {**self.options, "seed": now}

    @property
    def last_step(self) -> int:
        """The number of the run's last step."""
        steps = self.epochs * math.ceil(self.num_samples / self.batch_size)
        return min(steps, self.max_steps or steps)

    @property
    def finished(self) -> bool:
        """Whether all epochs, or all steps that --max-steps allows, are done."""
        return self.epoch >= self.epochs or self.step >= (self.max_steps or math.inf)

    @property
    def interrupted(self) -> bool:
        """Whether a number of `stop_every` has interrupted the epoch. (--max-steps ends the run.)"""
        return 0 < self.position < self.num_samples and self.step != self.max_steps

    @property
    def epoch_complete(self) -> bool:
        """Whether the last step completed its epoch. `finish_epoch` has then begun the next one."""
        return self.position == 0

    def begin_epoch(self) -> None:
        """Go back to the epoch's first sample, even if the epoch was cut short."""
        self.position, self.seconds, self.loss_sum, self.step_losses = 0, 0.0, 0.0, []

    def start_steps(self) -> list[int]:
        """Start the clock, and return how many samples each of the next steps takes, over all ranks.

        The steps run to the end of the epoch, to the next multiple of a number of `stop_every`, or to `max_steps`,
        whichever comes first. From here on `add_step` collects what `finish_steps` adds up.
        """
        self.planned = global_batch_counts(self.num_samples - self.position, self.batch_size)
        if self.max_steps is not None:
            self.planned = self.planned[: self.max_steps - self.step]
        for every in self.stop_every:
            self.planned = self.planned[: every - self.step % every]
        self.losses, self.counts, self.started = [], [], time.perf_counter()
        self.printed_steps, self.printed_at = 0, self.started
        in_notebook = hasattr(builtins, "__IPYTHON__")
        hidden = self.quiet or self.worker.rank > 0 or not in_notebook
        self.bar = tqdm(desc="steps", total=self.last_step, initial=self.step, disable=hidden, leave=False)
        return self.planned

    @property
    def in_last_step(self) -> bool:
        """Whether the step that is being computed is the last one of those that `start_steps` has planned."""
        return len(self.losses) == len(self.planned) - 1

    def add_step(self, loss: torch.Tensor, count: int) -> None:
        """Record a step. Every few seconds rank 0 shows its progress: a line, or in a notebook a bar.

        loss: this rank's share of the mean over the step's `count` samples. No rank waits here.
        """
        self.losses.append(loss.detach())
        self.counts.append(count)
        self.bar.update()
        prints = self.worker.rank == 0 and not self.quiet and self.bar.disable
        if prints and time.perf_counter() > self.printed_at + LINE_EVERY_S:
            self.print_line()

    def print_line(self) -> None:
        """Print rank 0's own loss since the last line, the speed, and the time left.

        This takes no collective, and one synchronization of a GPU.
        """
        own_loss = torch.stack(self.losses[self.printed_steps :]).mean().item() * self.worker.world_size
        now, step = time.perf_counter(), self.step + len(self.losses)
        rate = sum(self.counts[self.printed_steps :]) / (now - self.printed_at)
        left = timedelta(seconds=round(max(0, self.last_step - step) * self.batch_size / rate))
        self.worker.log(
            f"epoch {self.epoch + 1}/{self.epochs}  step {step} of {self.last_step}  "
            f"loss of rank 0 alone {own_loss:.4f}  {rate:.0f} samples/s  {left} left"
        )
        self.printed_steps, self.printed_at = len(self.losses), now

    def finish_steps(self) -> None:
        """Sum the steps' losses over all ranks, in one all-reduce for all steps. Collective."""
        self.bar.close()
        step_losses = global_sum(torch.stack(self.losses)).tolist()
        self.record_steps(step_losses, self.counts, time.perf_counter() - self.started)

    def record_steps(self, step_losses: list[float], counts: list[int], seconds: float) -> None:
        """Record finished steps: their global mean losses, their samples over all ranks, and their time.

        Raises UsageError, on every rank, if a loss is not finite. The run then ends before the broken weights are
        saved, so its good checkpoints stay.
        """
        for number, loss in enumerate(step_losses, self.step + 1):
            check_finite_number(f"the loss of step {number}", loss)
        for loss, count in zip(step_losses, counts, strict=True):
            self.loss_sum += loss * count
        self.step += len(counts)
        self.position += sum(counts)
        self.seconds += seconds
        self.step_losses = self.step_losses + step_losses

    def finish_epoch(self, measured: dict) -> dict:
        """Return the epoch's line for --metrics-out. An epoch that --max-steps cut short stays the current one.

        Raises UsageError if the validation loss is not finite, because then the last step has broken the weights.
        """
        check_finite_number("val_loss", measured["val_loss"])
        line = {
            "epoch": self.epoch + 1,
            "train_loss": self.loss_sum / self.position,
            **measured,
            "step_losses": self.step_losses,
            "samples_seen": self.position,
            "samples_per_second": self.position / self.seconds,
        }
        self.metrics = [*self.metrics[: self.epoch], line]
        if self.position == self.num_samples:
            self.epoch += 1
            self.begin_epoch()
        return line

    def describe(self, line: dict) -> str:
        """Return an epoch's metrics as a line of text."""
        return (
            f"epoch {line['epoch']}/{self.epochs}  train_loss {line['train_loss']:.4f}  "
            f"val_loss {line['val_loss']:.4f}  val_accuracy {line['val_accuracy']:.3f}  "
            f"{line['samples_per_second']:.0f} samples/s"
        )


def check_finite_number(what: str, value: float) -> None:
    """Raise UsageError if a number that training has produced is not finite."""
    if not math.isfinite(value):
        raise UsageError(f"diverged: {what} is {value} (not saved): start a new run with a smaller --lr")


def write_metrics(path: str | Path | None, lines: list[dict]) -> None:
    """Write one JSON line per epoch to `path`, and replace the file atomically. None: write nothing.

    A symbolic link stays, and the file that it leads to is replaced. A device such as /dev/null gets each line once.
    """
    if path is None:
        return
    path = Path(path).resolve()
    text = [json.dumps(line) + "\n" for line in lines]
    if path.is_char_device():
        path.write_text("".join(line for line in text if (path, line) not in written_to_devices))
        written_to_devices.update((path, line) for line in text)
        return
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(text))
    os.replace(partial, path)


def check_metrics_file(path: str | Path | None) -> None:
    """Raise ValueError if --metrics-out cannot be written to. Its content stays."""
    if path is not None:
        try:
            file = Path(path).resolve()
            if file.exists() and not (file.is_file() or file.is_char_device()):  # opening a pipe would block forever
                raise OSError(errno.EINVAL, "not a file")
            file.parent.mkdir(parents=True, exist_ok=True)
            open(file, "a").close()
        except OSError as error:
            raise ValueError(f"cannot write to --metrics-out: {error.strerror}: {path}") from error
