"""How far a run has come: its steps, its metrics, the lines that rank 0 prints, and the metrics file."""

import argparse
import builtins
import json
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from shared.distributed import Worker, global_sum
from shared.errors import UsageError
from shared.sampling import even_batches, global_batch_counts

LINE_EVERY_S = 5
written_to_devices: set[tuple[Path, str]] = set()  # (the device, a line)


class Progress:
    """How far a run has come: what a checkpoint holds besides tensors, and what rank 0 prints.

    step: optimizer steps in all. epoch: the current epoch, from 0. metrics: one dict per epoch. options: those that
    the run was started with. The rest is of the current epoch. position: samples already trained on, over all ranks.
    seconds: how long that took, without what was lost to a kill. loss_sum: the samples' losses added up. step_losses:
    the steps' global mean losses.
    """

    saved = ("step", "epoch", "position", "seconds", "loss_sum", "step_losses", "metrics", "options")

    def __init__(self, args: argparse.Namespace, worker: Worker, num_samples: int, options: dict) -> None:
        """args: batch_size, epochs, max_steps, save_every_steps and quiet. num_samples: per epoch, over all ranks."""
        self.args, self.worker, self.num_samples, self.options = args, worker, num_samples, options
        self.step, self.epoch, self.metrics = 0, 0, []
        self.begin_epoch()

    def state_dict(self) -> dict:
        """What a checkpoint holds, as plain data."""
        return {"num_samples": self.num_samples} | {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict) -> None:
        """Continue from what `state_dict` returned. Raises UsageError if it is in the middle of different data."""
        before = state.get("num_samples", self.num_samples)  # checkpoints of earlier versions have no such number
        seed, now = state["options"].get("seed"), self.options.get("seed")
        if state["position"] > 0 and seed != now:
            raise UsageError(f"the epoch began with --seed {seed}; --seed {now} deals its samples in a different order")
        if state["position"] > 0 and before != self.num_samples:
            raise UsageError(f"the epoch began with {before} training samples, and now there are {self.num_samples}")
        vars(self).update({name: state[name] for name in self.saved})

    @property
    def last_step(self) -> int:
        """The number of the run's last step."""
        steps = self.args.epochs * math.ceil(self.num_samples / self.args.batch_size)
        return min(steps, self.args.max_steps or steps)

    @property
    def finished(self) -> bool:
        """Whether all epochs, or all steps that --max-steps allows, are done."""
        return self.epoch >= self.args.epochs or self.step >= (self.args.max_steps or math.inf)

    @property
    def interrupted(self) -> bool:
        """Whether --save-every-steps has interrupted the epoch."""
        return 0 < self.position < self.num_samples and self.step != self.args.max_steps

    @property
    def epoch_complete(self) -> bool:
        """Whether the epoch of the last step is over: `finish_epoch` has then begun the next one."""
        return self.position == 0

    def begin_epoch(self) -> None:
        """Start from the epoch's first sample, even if it was cut short."""
        self.position, self.seconds, self.loss_sum, self.step_losses = 0, 0.0, 0.0, []

    def start_steps(self) -> None:
        """Start the clock. From here on `add_step` collects what `finish_steps` adds up."""
        self.losses, self.counts, self.started = [], [], time.perf_counter()
        self.printed_steps, self.printed_at = 0, self.started
        in_notebook = hasattr(builtins, "__IPYTHON__")
        hidden = self.args.quiet or self.worker.rank > 0 or not in_notebook
        self.bar = tqdm(desc="steps", total=self.last_step, initial=self.step, disable=hidden, leave=False)

    def batches(self, loader: DataLoader) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """The next steps: (samples over all ranks, this rank's batch). loader: from `sampling.rank_loader`.

        Each epoch has its own order, the same one on all ranks. The steps go to the end of the epoch, to the next
        multiple of --save-every-steps, or to --max-steps, whichever comes first: equally many on every rank.
        """
        loader.sampler.set_epoch(self.epoch)
        loader.sampler.set_position(self.position)
        counts = global_batch_counts(self.num_samples - self.position, self.args.batch_size)
        if self.args.max_steps is not None:
            counts = counts[: self.args.max_steps - self.step]
        if self.args.save_every_steps is not None:
            counts = counts[: self.args.save_every_steps - self.step % self.args.save_every_steps]
        self.start_steps()
        batches = islice(even_batches(loader, len(counts)), len(counts))
        for number, (count, batch) in enumerate(zip(counts, batches, strict=True), start=1):
            self.steps_left = len(counts) - number
            yield count, batch

    def add_step(self, loss: torch.Tensor, count: int) -> None:
        """Note a step, and show every few seconds how far rank 0 is: as a line, in a notebook as a bar.

        loss: this rank's share of the mean over the step's `count` samples. No rank waits here.
        """
        self.losses.append(loss.detach())
        self.counts.append(count)
        self.bar.update()
        prints = self.worker.rank == 0 and not self.args.quiet and self.bar.disable
        if prints and time.perf_counter() > self.printed_at + LINE_EVERY_S:
            self.print_line()

    def print_line(self) -> None:
        """Print rank 0's own loss since the last line, the speed, the time left. No collective, one GPU sync."""
        own_loss = torch.stack(self.losses[self.printed_steps :]).mean().item() * self.worker.world_size
        now, step = time.perf_counter(), self.step + len(self.losses)
        rate = sum(self.counts[self.printed_steps :]) / (now - self.printed_at)
        left = timedelta(seconds=round(max(0, self.last_step - step) * self.args.batch_size / rate))
        self.worker.log(
            f"epoch {self.epoch + 1}/{self.args.epochs}  step {step} of {self.last_step}  "
            f"loss of rank 0 alone {own_loss:.4f}  {rate:.0f} samples/s  {left} left"
        )
        self.printed_steps, self.printed_at = len(self.losses), now

    def finish_steps(self) -> None:
        """Add up the steps' losses over all ranks: one all-reduce for all steps, not one per step. Collective."""
        self.bar.close()
        step_losses = global_sum(torch.stack(self.losses)).tolist()
        self.record_steps(step_losses, self.counts, time.perf_counter() - self.started)

    def record_steps(self, step_losses: list[float], counts: list[int], seconds: float) -> None:
        """Note finished steps: their global mean losses, how many samples each took over all ranks, and their time.

        Raises UsageError, on every rank, if a loss is not finite. The run ends before the broken weights are saved,
        so its good checkpoints stay.
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
        """The epoch's line for --metrics-out. An epoch that --max-steps cut short stays the current one.

        Raises UsageError if the validation loss is not finite, because the last step has broken the weights.
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
        """An epoch's metrics in words."""
        return (
            f"epoch {line['epoch']}/{self.args.epochs}  train_loss {line['train_loss']:.4f}  "
            f"val_loss {line['val_loss']:.4f}  val_accuracy {line['val_accuracy']:.3f}  "
            f"{line['samples_per_second']:.0f} samples/s"
        )


def check_finite_number(what: str, value: float) -> None:
    """Raises UsageError if a number of the training is not finite."""
    if not math.isfinite(value):
        raise UsageError(f"diverged: {what} is {value} (not saved): start a new run with a smaller --lr")


def write_metrics(path: str | Path | None, lines: list[dict]) -> None:
    """Write one JSON line per epoch to `path`, replacing the file at once. None: nothing is written.

    A link stays, and the file that it leads to is replaced. To a device such as /dev/null each line is written once.
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
