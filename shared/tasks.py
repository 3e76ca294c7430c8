"""Define what is trained, images or text, behind one interface: data, model, optimizer, loss and accuracy."""

import argparse
import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from shared import datasets, models
from shared.datasets import Splits
from shared.distributed import Worker, check_same, fail_together, local_first, retry
from shared.errors import UsageError
from shared.paths import local_path
from shared.sampling import global_batch_counts


class Task:
    """What a run trains. A subclass has `name`, `dataset_names`, `model_names`, `load` and `build_model`.

    A sample is a pair of tensors, (inputs, targets). The model maps a batch of inputs to logits: (batch, classes) for
    one answer per sample, (batch, T, classes) for T answers. It accepts a batch of no samples, and uses all its
    parameters in each step. For anything else a subclass overrides `loss` and `metric_sums`.

    Attributes: args, the options; splits, the data; device; precision; dtype, of weights and floating-point inputs.
    """

    name: str  # the kind of data
    differ = "the nodes have read different data"  # what `build` says where checksums differ
    dataset_names: Sequence[str]  # for --dataset
    model_names: Sequence[str]  # for --model, the default first
    own_options: Sequence[str] = ()  # the names of those that `add_options` adds

    def __init__(self, args: argparse.Namespace, splits: Splits, device: torch.device) -> None:
        self.args, self.splits, self.device, self.precision = args, splits, device, args.precision
        self.dtype = torch.float64 if self.precision == "fp64" else torch.float32

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options that only this task has."""

    @classmethod
    def complete_options(cls, options: argparse.Namespace) -> None:
        """Fill in the default model. Raises UsageError for options of a different task."""
        options.model = options.model or cls.model_names[0]
        if options.model not in cls.model_names:
            names = ", ".join(cls.model_names)
            raise UsageError(f"--model {options.model} does not train on --dataset {options.dataset}; use {names}")

    @staticmethod
    def load(args: argparse.Namespace) -> Splits:
        """Return the data that the options ask for. Raises ValueError or OSError if they cannot be used."""
        raise NotImplementedError

    def check_sizes(self, world_size: int) -> None:
        """Raise ValueError if there are fewer training samples than ranks, or too few per batch for the model."""
        if len(self.splits.train) < world_size:
            raise ValueError(f"{len(self.splits.train)} samples cannot be dealt to {world_size} ranks; use fewer ranks")

    def checksum(self) -> int:
        """Return a number by which nodes, and a checkpoint, know the data: that of their lengths and whole numbers.

        These are labels and tokens. Floats are left out, because CPUs may compute them differently in the last digit.
        """
        value = 0
        for part in (self.splits.train, self.splits.val):
            value = zlib.crc32(str(len(part)).encode(), value)
            for tensor in getattr(part, "tensors", ()):
                if not tensor.is_floating_point():
                    value = zlib.crc32(tensor.contiguous().numpy(), value)
        return value

    def build_model(self) -> nn.Module:
        """Return the model with its initial weights, which are the same for the same seed."""
        raise NotImplementedError

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the default optimizer."""
        return torch.optim.Adam(model.parameters(), lr=self.args.lr)

    def to_device(self, batch: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch (inputs, targets) on the device, with floating-point inputs in the weights' type."""
        inputs, targets = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        return inputs.to(self.dtype) if inputs.is_floating_point() else inputs, targets

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of each sample, summed over the batch.

        For text a sample's cross-entropy is the mean over its tokens. Half-precision logits are converted to float32
        first.
        """
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
        return total / targets.shape[1:].numel()

    def metric_sums(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sums over the batch (loss, correct answers, samples), as float64.

        For text a sample counts with the share of its tokens that are correct.
        """
        correct = (logits.argmax(dim=-1) == targets).sum().double() / targets.shape[1:].numel()
        samples = torch.tensor(len(targets), dtype=torch.float64, device=targets.device)
        return torch.stack([self.loss(logits, targets).double(), correct, samples])


class ImageTask(Task):
    """Classify small images."""

    name = "images"
    dataset_names = tuple(datasets.IMAGE_DATASETS)
    model_names = tuple(models.IMAGE_MODELS)

    @staticmethod
    def load(args: argparse.Namespace) -> Splits:
        return datasets.load(args.dataset, args.data_dir)

    def check_sizes(self, world_size: int) -> None:
        super().check_sizes(world_size)
        num_samples, model = len(self.splits.train), self.args.model
        fewest = min(global_batch_counts(num_samples, self.args.batch_size)) // world_size
        if "batchnorm" in model and fewest < 2:  # a single sample has no variance
            raise ValueError(
                f"--model {model} needs two samples per rank in every batch, and {num_samples} samples in batches of "
                f"{self.args.batch_size} over {world_size} ranks leave {fewest}; use a different --batch-size or "
                "--model resnet18"
            )

    def build_model(self) -> nn.Module:
        return models.build(self.args.model, self.splits.image_shape, self.splits.num_classes)


class TextTask(Task):
    """Predict a text's next byte with a GPT."""

    name, differ = "text", "the nodes' texts differ: give --text-file a file that is the same on all of them"
    dataset_names = ("text",)
    model_names = ("gpt",)
    own_options = ("preset", "text_file", "activation_checkpointing")

    def __init__(self, args: argparse.Namespace, splits: Splits, device: torch.device) -> None:
        super().__init__(args, splits, device)
        # Not `config`: cloudpickle would pickle torch.distributed.config for a function that also names `distributed`.
        self.gpt_config = models.GPT_PRESETS[args.preset]

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--preset", choices=tuple(models.GPT_PRESETS),
            help="size of the GPT; nano has 1 M parameters (default: nano)")  # fmt: skip
        parser.add_argument("--text-file", metavar="FILE", type=local_path,
            help="train on 1,280 windows of this text, the same ones each epoch; every node needs the file at this "
            "path (default: Python's standard library)")  # fmt: skip
        parser.add_argument("--activation-checkpointing", action="store_true",
            help="keep only the blocks' inputs, and recompute the rest in the backward pass")  # fmt: skip

    @classmethod
    def complete_options(cls, options: argparse.Namespace) -> None:
        super().complete_options(options)
        options.preset = options.preset or "nano"
        options.qkv_rows = "by head"  # a mark in checkpoints: older ones have them by kind, and are refused

    @staticmethod
    def load(args: argparse.Namespace) -> Splits:
        return datasets.text(models.GPT_PRESETS[args.preset].context, args.text_file)

    def build_model(self) -> nn.Module:
        model = models.GPT(self.gpt_config, self.args.activation_checkpointing)
        models.init_weights(model, self.args.seed)
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.args.lr)


def task_for(dataset: str, tasks: Sequence[type[Task]]) -> type[Task]:
    """Return the task of `tasks` that the data set belongs to.

    Your own data set has a name that no task lists, and belongs to the first task.
    """
    return next((task for task in tasks if dataset in task.dataset_names), tasks[0])


def build(
    tasks: Sequence[type[Task]], args: argparse.Namespace, worker: Worker, max_world_size: int = 0,
    patience_s: float = 0,
) -> Task:  # fmt: skip
    """Return the task of `tasks` that the options ask for, with its data, the same on every rank. Collective.

    The first process of each node downloads missing files.
    max_world_size: the world may grow to this size.
    patience_s: seconds to wait for missing files.
    Raises UsageError, on every rank, if the data cannot be used or differ between the ranks.
    """
    task_class = task_for(args.dataset, tasks)
    with fail_together(), local_first(worker):
        splits = retry(lambda: task_class.load(args), patience_s)
    with fail_together():
        task = task_class(args, splits, worker.device)
        task.check_sizes(max(worker.world_size, max_world_size))
    check_same(task.checksum(), task.differ)
    return task


def check_precision(precision: str, device: torch.device) -> None:
    """Raise ValueError if the device cannot compute in this precision.

    fp16 needs a GPU. bf16 on a GPU needs bf16 units, because it would be emulated without them.
    """
    if precision == "fp16" and device.type == "cpu":
        raise ValueError("--precision fp16 needs a GPU; on a CPU use fp32 or bf16")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(f"{torch.cuda.get_device_name(device)} has no bf16 units; use --precision fp32")
