"""The training loop, one for a process alone and for the ranks of a group."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared import checkpoint, distributed, options
from shared.distributed import Worker
from shared.progress import Limits, Progress
from shared.sampling import check_divisible, rank_loader
from training import data, model, utils
from training.config import Config


class Folders(NamedTuple):
    """Where a run's checkpoints, its data and its logs are. run: a path or a URI."""

    run: str
    data: str
    logs: str


class TextProgress(Progress):
    """A `Progress` that also counts the right answers while training."""

    saved = (*Progress.saved, "correct")

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self.correct = 0


def train(
    config: Config, folders: Folders, worker: Worker, newest: Callable[[], dict | None],
    store: Callable[[dict, dict], None],
) -> dict:  # fmt: skip
    """Train as configured and return what metrics.json holds. Every rank calls it.

    folders: `data` comes from `data.prepare`. newest: returns the state to continue from, on every rank. store: keeps a
    state, with its metrics. Raises UsageError for what cannot be, the same on every rank.
    """
    with distributed.fail_together():
        options.check_precision(config.training.precision, worker.device)
        splits = data.load(config, folders.data)
        check_divisible(config.training.batch_size, worker.world_size)
        trainer_log = utils.Log(Path(folders.logs), worker)
        trainer = Trainer(config, splits, worker, trainer_log, store)
    if state := newest():
        with distributed.fail_together():
            trainer.restore(state)
    del state  # it is as large as model and optimizer
    trainer.join()
    while not trainer.finished():
        trainer.train_epoch()

    # The test set, once, by the best of the checkpoints.
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
    trainer_log(utils.in_words(result), trainer.progress.step, test_accuracy=test["accuracy"])
    return result


class Trainer:
    """A model, what trains it, and how far it has come."""

    def __init__(self, config: Config, splits: data.Splits, worker: Worker, log: utils.Log, store: Callable) -> None:
        self.config, self.splits, self.worker, self.log, self.store = config, splits, worker, log, store
        training = config.training
        distributed.seed_everything(training.seed)  # the same weights on every rank
        self.dtype = torch.float64 if training.precision == "fp64" else torch.float32
        self.model = model.build(config.model, splits.num_tokens, splits.num_classes).to(worker.device, self.dtype)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=training.lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, training.lr_step_size, training.lr_gamma)
        self.scaler = torch.amp.GradScaler(worker.device.type, enabled=training.precision == "fp16")
        distributed.seed_everything(training.seed + worker.rank)  # each rank draws dropout of its own
        limits = Limits(training.batch_size, training.epochs, quiet=True)  # it has its own log
        self.progress = TextProgress(limits, worker, len(splits.train), options={})
        self.loader = rank_loader(
            splits.train, training.batch_size // worker.world_size, worker, training.seed, config.dataset.loader_workers
        )

    def restore(self, state: dict) -> None:
        """Continue from a checkpoint. Raises ValueError if it is of another model, or of other data."""
        saved, now = state["config"]["model"], self.config.model.model_dump(mode="json")
        for key, value in now.items():
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
        if state["scaler"]:  # empty where the run was not in fp16 until now
            self.scaler.load_state_dict(state["scaler"])
        self.log(f"continuing after step {self.progress.step}", self.progress.step)

    def join(self) -> None:
        """From here on the gradients of all ranks are averaged."""
        self.ddp_model = self.model
        if self.worker.world_size > 1:
            device_ids = [self.worker.device] if self.worker.device.type == "cuda" else None
            self.ddp_model = DistributedDataParallel(self.model, device_ids, gradient_as_bucket_view=True)
            # As shared.distributed.warm_up_ddp_buckets: a resumed run must add in the same order as one that never
            # stopped. In train mode dropout would draw random numbers. In eval mode cuDNN's GRU and LSTM have no
            # backward pass, but torch's own have one.
            self.ddp_model.eval()
            *inputs, _ = (each.to(self.worker.device) for each in self.splits.train[:0])
            with torch.backends.cudnn.flags(enabled=False):
                self.logits(self.ddp_model, inputs).sum().backward()
            self.ddp_model.zero_grad()

    def finished(self) -> bool:
        """Whether all epochs are done, or none has been better for as many as early stopping waits."""
        accuracies = [line["val_accuracy"] for line in self.progress.metrics]
        patience = self.config.training.early_stopping_patience
        waited = len(accuracies) - 1 - accuracies.index(max(accuracies)) if accuracies else 0
        return len(accuracies) >= self.config.training.epochs or (patience is not None and waited >= patience)

    def train_epoch(self) -> None:
        """Train from where the progress is to the end of its epoch, validate, and save as often as configured."""
        config, progress = self.config, self.progress
        self.ddp_model.train()
        done, taken, began = [], [], time.perf_counter()  # since the last call of log_steps
        for count, batch in progress.batches(self.loader):
            done.append(self.train_step(batch, count))
            taken.append(count)
            step, last = progress.step + len(done), progress.steps_left == 0
            saves = config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0 and not last
            if saves or last or step % config.training.log_every == 0:
                self.log_steps(done, taken, time.perf_counter() - began)
                if saves:
                    self.save(None)
                done, taken, began = [], [], time.perf_counter()
        self.finish_epoch()

    def train_step(self, batch: list[torch.Tensor], count: int) -> torch.Tensor:
        """One optimizer step on this rank's part of `count` samples: its share of the mean loss, its right answers."""
        training = self.config.training
        size = max(1, -(-len(batch[-1]) // training.accumulation_steps))
        starts = range(0, max(1, len(batch[-1])), size)
        totals = torch.zeros(2, dtype=torch.float64, device=self.worker.device)
        self.optimizer.zero_grad()
        for start in starts:
            # Micro-batches add up their gradients here; the last one's backward pass adds those of all ranks.
            alone = start != starts[-1] and self.worker.world_size > 1
            with self.ddp_model.no_sync() if alone else contextlib.nullcontext():
                logits, labels = self.forward(self.ddp_model, [each[start : start + size] for each in batch])
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
        """Logits (batch, classes) in the weights' type, and labels (batch), on the device."""
        *inputs, labels = (each.to(self.worker.device, non_blocking=True) for each in batch)
        return self.logits(network, inputs), labels

    def logits(self, network: nn.Module, inputs: list[torch.Tensor]) -> torch.Tensor:
        """The network's answers. A rank without samples in a step still takes part: it asks for one, and drops it."""
        num_samples = len(inputs[0])
        if num_samples == 0:
            inputs = [each.new_ones(1, *each.shape[1:]) for each in inputs]
        inputs = [each.to(self.dtype) if each.is_floating_point() else each for each in inputs]
        precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.training.precision)
        with torch.autocast(self.worker.device.type, precision, enabled=precision is not None):
            return network(*inputs)[:num_samples].to(self.dtype)

    def log_steps(self, done: list[torch.Tensor], taken: list[int], seconds: float) -> None:
        """Note the steps just done in the progress and in the log. Collective."""
        losses, correct = distributed.global_sum(torch.stack(done)).T
        self.progress.record_steps(losses.tolist(), taken, seconds)
        self.progress.correct += int(correct.sum())
        mean = sum(loss * count for loss, count in zip(losses.tolist(), taken, strict=True)) / sum(taken)
        accuracy, lr = correct.sum().item() / sum(taken), self.scheduler.get_last_lr()[0]
        speed, step, epoch = sum(taken) / seconds, self.progress.step, self.progress.epoch + 1
        self.log(
            f"epoch {epoch}  step {step}  loss {mean:.4f}  accuracy {accuracy:.3f}  lr {lr:.2e}  {speed:.0f} samples/s",
            step, epoch=epoch, loss=mean, accuracy=accuracy, lr=lr, samples_per_second=speed,
        )  # fmt: skip

    def finish_epoch(self) -> None:
        """Validate, add the epoch's line to the metrics, and save it where it is its turn."""
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
        said = f"epoch {line['epoch']}/{self.config.training.epochs}  train_loss {line['train_loss']:.4f}  val_loss "
        said += f"{val['loss']:.4f}  val_accuracy {val['accuracy']:.3f}  {line['seconds']:.1f} s"
        self.log(
            said, line["step"], **{key: value for key, value in line.items() if key not in ("step", "step_losses")}
        )
        if line["epoch"] % self.config.checkpoint.every_epochs == 0 or self.finished():
            self.save(val["accuracy"])

    @torch.no_grad()
    def evaluate(self, dataset: data.TensorDataset) -> dict:
        """Mean loss and accuracy over a whole data set: sums over all ranks, divided once. Collective."""
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.worker.device)
        for batch in rank_loader(dataset, 256, self.worker):
            logits, labels = self.forward(self.model, batch)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            totals += torch.stack([loss.double(), (logits.argmax(dim=1) == labels).sum().double()])
        loss, correct = distributed.global_sum(totals).tolist()
        return {"loss": loss / len(dataset), "accuracy": correct / len(dataset)}

    def save(self, score: float | None) -> None:
        """Keep the whole state. score: the val_accuracy; None inside an epoch, which has none. Collective."""
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
