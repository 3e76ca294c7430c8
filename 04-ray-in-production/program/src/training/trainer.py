"""The training loop, for a single process and for the ranks of a process group."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared import checkpoint, distributed, tasks
from shared.distributed import Worker
from shared.running.progress import Progress
from shared.sampling import check_divisible, deal_batches, rank_loader
from training import data, model, utils
from training.config import Config


class Folders(NamedTuple):
    """The folders of a run's checkpoints, data and logs. run: a path or a URI."""

    run: str
    data: str
    logs: str


class TextProgress(Progress):
    """A `Progress` that also counts correct predictions during training."""

    saved = (*Progress.saved, "correct")

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self.correct = 0


def train(
    config: Config, folders: Folders, worker: Worker, load_newest: Callable[[], dict | None],
    store: Callable[[dict, dict], None], patience_s: float = 0,
) -> dict:  # fmt: skip
    """Train as configured and return the content of metrics.json. Collective.

    folders: `data` comes from `data.prepare`. load_newest: returns the state to continue from, on every rank. store:
    saves a state with its metrics. patience_s: wait this long for data that are missing. Raises the same UsageError on
    every rank if the settings do not fit.
    """
    with distributed.fail_together():
        tasks.check_precision(config.training.precision, worker.device)
        splits = distributed.retry(lambda: data.load(config.dataset, folders.data), patience_s)
        check_divisible(config.training.batch_size, worker.world_size)
        if len(splits.train) < worker.world_size:
            raise ValueError(f"{len(splits.train)} training rows are too few for {worker.world_size} workers")
        trainer_log = utils.Log(Path(folders.logs), worker)
        trainer = Trainer(config, splits, worker, trainer_log, store)
    if state := load_newest():
        with distributed.fail_together():
            trainer.restore(state)
    del state  # it is as large as model and optimizer
    trainer.join()
    while not trainer.finished():
        trainer.train_epoch()

    # Use the test set once, with the best checkpoint.
    with distributed.fail_together():
        path, best = utils.best_state(folders.run) if worker.rank == 0 else (None, None)
    path, weights, epoch = distributed.from_rank_zero(
        (path, best and best["model"], best and best["progress"]["epoch"])
    )
    trainer.model.load_state_dict(weights)
    test = trainer.evaluate(splits.test)
    result = {
        "run": Path(folders.run).name,
        "config": config.model_dump(mode="json"),
        "checkpoint": path,
        "best_epoch": epoch,
        "test_loss": test["loss"],
        "test_accuracy": test["accuracy"],
        "seconds": sum(line["seconds"] for line in trainer.progress.metrics),
        "epochs": trainer.progress.metrics,
    }
    trainer_log(utils.describe_result(result), trainer.progress.step, test_accuracy=test["accuracy"])
    return result


class Trainer:
    """A model with its optimizer, scheduler, data loader and progress."""

    def __init__(self, config: Config, splits: data.Splits, worker: Worker, log: utils.Log, store: Callable) -> None:
        self.config, self.splits, self.worker, self.log, self.store = config, splits, worker, log, store
        training = config.training
        distributed.seed_everything(training.seed)  # the same weights on every rank
        self.dtype = torch.float64 if training.precision == "fp64" else torch.float32
        self.model = model.build(config.model, splits.num_tokens, splits.num_classes).to(worker.device, self.dtype)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=training.lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, training.lr_step_size, training.lr_gamma)
        self.scaler = torch.amp.GradScaler(worker.device.type, enabled=training.precision == "fp16")
        distributed.seed_everything(training.seed + worker.rank)  # each rank draws its own dropout masks
        self.progress = TextProgress(
            worker, len(splits.train), options={}, batch_size=training.batch_size, epochs=training.epochs,
            quiet=True,  # the trainer writes its own log
        )  # fmt: skip
        self.loader = rank_loader(
            splits.train, training.batch_size // worker.world_size, worker, training.seed, config.dataset.loader_workers
        )

    def restore(self, state: dict) -> None:
        """Continue from a checkpoint. Raises ValueError if it belongs to a different model or to different data."""
        saved, current = state["config"]["model"], self.config.model.model_dump(mode="json")
        for key, value in current.items():
            if saved.get(key) != value:
                raise ValueError(f"the run was started with model.{key} = {saved.get(key)}, and now it is {value}")
        data.check_same(state, self.splits)
        before, after = state["config"]["training"], self.config.training.model_dump(mode="json")
        for key in after:
            if before.get(key) != after[key] and key not in ("epochs", "log_every", "early_stopping_patience"):
                kept = ", which stays: it is restored" if key in ("lr", "lr_step_size", "lr_gamma") else ""
                self.log(
                    f"note: training.{key} was {before.get(key)}{kept}; now {after[key]}", state["progress"]["step"]
                )
        progress = checkpoint.restore(state, self.model, self.optimizer, self.scheduler, self.worker)
        self.progress.load_state_dict(progress)
        if state["scaler"]:  # empty if the run has not used fp16 so far
            self.scaler.load_state_dict(state["scaler"])
        self.log(f"continuing after step {self.progress.step}", self.progress.step)

    def join(self) -> None:
        """Wrap the model in DDP if there are several ranks. From here on the ranks average their gradients."""
        self.ddp_model = self.model
        if self.worker.world_size > 1:
            device_ids = [self.worker.device] if self.worker.device.type == "cuda" else None
            self.ddp_model = DistributedDataParallel(self.model, device_ids, gradient_as_bucket_view=True)
            *inputs, _ = (tensor.to(self.worker.device) for tensor in self.splits.train[:0])
            distributed.warm_up_ddp_buckets(self.ddp_model, lambda: self.logits(self.ddp_model, inputs).sum())

    def finished(self) -> bool:
        """Return whether all epochs are done or early stopping ends the training."""
        accuracies = [line["val_accuracy"] for line in self.progress.metrics]
        patience = self.config.training.early_stopping_patience
        waited = len(accuracies) - 1 - accuracies.index(max(accuracies)) if accuracies else 0
        return len(accuracies) >= self.config.training.epochs or (patience is not None and waited >= patience)

    def train_epoch(self) -> None:
        """Train to the end of the current epoch, validate, and save as often as configured."""
        config, progress = self.config, self.progress
        self.ddp_model.train()
        totals, counts, started = [], [], time.perf_counter()  # since the last call of log_steps
        planned = progress.start_steps()
        last_step = progress.step + len(planned)
        for count, batch in deal_batches(self.loader, progress.epoch, progress.position, planned):
            totals.append(self.train_step(batch, count))
            counts.append(count)
            step = progress.step + len(totals)
            is_last = step == last_step
            save_now = config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0 and not is_last
            if save_now or is_last or step % config.training.log_every == 0:
                self.log_steps(totals, counts, time.perf_counter() - started)
                if save_now:
                    self.save(None)
                totals, counts, started = [], [], time.perf_counter()
        self.finish_epoch()

    def train_step(self, batch: list[torch.Tensor], count: int) -> torch.Tensor:
        """Take one optimizer step on this rank's part of `count` samples.

        Returns this rank's share of the mean loss and its number of correct predictions.
        """
        training = self.config.training
        size = max(1, -(-len(batch[-1]) // training.accumulation_steps))
        starts = range(0, max(1, len(batch[-1])), size)
        totals = torch.zeros(2, dtype=torch.float64, device=self.worker.device)
        self.optimizer.zero_grad()
        for start in starts:
            # Micro-batches accumulate their gradients on this rank; only the last backward pass communicates.
            skip_sync = start != starts[-1] and self.worker.world_size > 1
            with self.ddp_model.no_sync() if skip_sync else contextlib.nullcontext():
                logits, labels = self.forward(self.ddp_model, [tensor[start : start + size] for tensor in batch])
                loss = F.cross_entropy(logits, labels, reduction="sum") / count
                # DDP divides by the world size, so we multiply by it.
                self.scaler.scale(loss * self.worker.world_size).backward()
            correct = (logits.argmax(dim=1) == labels).sum()
            totals += torch.stack([loss.detach().double(), correct.double()])
        if training.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), training.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return totals

    def forward(self, network: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits (batch, classes) in the weights' dtype and labels (batch), both on the device."""
        *inputs, labels = (tensor.to(self.worker.device, non_blocking=True) for tensor in batch)
        return self.logits(network, inputs), labels

    def logits(self, network: nn.Module, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Return the network's logits. A rank with an empty batch computes one made-up sample and drops its logits."""
        num_samples = len(inputs[0])
        if num_samples == 0:
            inputs = [tensor.new_ones(1, *tensor.shape[1:]) for tensor in inputs]
        inputs = [tensor.to(self.dtype) if tensor.is_floating_point() else tensor for tensor in inputs]
        with utils.autocast(self.config.training.precision, self.worker.device):
            return network(*inputs)[:num_samples].to(self.dtype)

    def log_steps(self, totals: list[torch.Tensor], counts: list[int], seconds: float) -> None:
        """Record the latest steps in the progress and in the log. Collective.

        totals: what `train_step` returned for each step. counts: each step's samples over all ranks.
        """
        losses, correct = distributed.global_sum(torch.stack(totals)).T
        self.progress.record_steps(losses.tolist(), counts, seconds)
        self.progress.correct += int(correct.sum())
        mean = sum(loss * count for loss, count in zip(losses.tolist(), counts, strict=True)) / sum(counts)
        accuracy, lr = correct.sum().item() / sum(counts), self.scheduler.get_last_lr()[0]
        speed, step, epoch = sum(counts) / seconds, self.progress.step, self.progress.epoch + 1
        self.log(
            f"epoch {epoch}  step {step}  loss {mean:.4f}  accuracy {accuracy:.3f}  lr {lr:.2e}  {speed:.0f} samples/s",
            step, epoch=epoch, loss=mean, accuracy=accuracy, lr=lr, samples_per_second=speed,
        )  # fmt: skip

    def finish_epoch(self) -> None:
        """Validate, add the epoch's line to the metrics, and save a checkpoint if one is due."""
        progress, val = self.progress, self.evaluate(self.splits.val)
        line = progress.finish_epoch({
            "step": progress.step,
            "train_accuracy": progress.correct / progress.position,
            "val_loss": val["loss"],
            "val_accuracy": val["accuracy"],
            "lr": self.scheduler.get_last_lr()[0],
            "seconds": progress.seconds,
            "world_size": self.worker.world_size,
        })  # fmt: skip
        self.scheduler.step()
        message = f"epoch {line['epoch']}/{self.config.training.epochs}  train_loss {line['train_loss']:.4f}  val_loss "
        message += f"{val['loss']:.4f}  val_accuracy {val['accuracy']:.3f}  {line['seconds']:.1f} s"
        self.log(
            message, line["step"], **{key: value for key, value in line.items() if key not in ("step", "step_losses")}
        )
        if line["epoch"] % self.config.checkpoint.every_epochs == 0 or self.finished():
            self.save(val["accuracy"])

    @torch.no_grad()
    def evaluate(self, dataset: data.TensorDataset) -> dict:
        """Return mean loss and accuracy over a data set, from sums over all ranks. Collective."""
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.worker.device)
        for batch in rank_loader(dataset, 256, self.worker):
            logits, labels = self.forward(self.model, batch)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            totals += torch.stack([loss.double(), (logits.argmax(dim=1) == labels).sum().double()])
        loss, correct = distributed.global_sum(totals).tolist()
        return {"loss": loss / len(dataset), "accuracy": correct / len(dataset)}

    def save(self, score: float | None) -> None:
        """Save a checkpoint. score: the val_accuracy, or None in the middle of an epoch. Collective.

        Raises UsageError on every rank if weights are not finite.
        """
        with distributed.fail_together():
            checkpoint.check_finite(self.model.state_dict())
        state = {
            **checkpoint.training_state(self.model, self.optimizer, self.scheduler, self.progress.state_dict()),
            "scaler": self.scaler.state_dict(),
            "config": self.config.model_dump(mode="json"),
            "data": self.splits.name,
            "vocabulary": self.splits.vocabulary,
            "score": score,
        }
        metrics = {"epoch": self.progress.epoch, "step": self.progress.step}
        self.store(state, metrics if score is None else {**metrics, "val_accuracy": score})
