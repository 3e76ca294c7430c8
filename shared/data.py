"""The data sets of the workshop, and how they are dealt to the ranks.

Every image data set comes as three TensorDatasets of (float32 image in [-1, 1], int64 label), split by a fixed seed.
"""

import importlib.util
import math
import sysconfig
import uuid
import zlib
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, default_collate

from shared.distributed import Worker

IMAGE_DATASETS = ("digits", "mnist", "fashion_mnist", "synthetic")
SPLIT_SEED = 0


@dataclass(frozen=True)
class Splits:
    """Train, validation and test set, and the names of the classes."""

    train: TensorDataset
    val: TensorDataset
    test: TensorDataset
    classes: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.classes)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one image."""
        return tuple(self.train.tensors[0].shape[1:])


def normalize(images: torch.Tensor, largest: float) -> torch.Tensor:
    """Images (N, H, W) with values 0..largest -> float32 (N, 1, H, W) in [-1, 1]: mean 0.5 and deviation 0.5."""
    return ((images.to(torch.float32) / largest - 0.5) / 0.5).unsqueeze(1)


def digits() -> Splits:
    """scikit-learn's handwritten digits: 1,797 real images of 8x8, 16 grey levels, inside the package (no download).

    Split into 1,280 / 256 / 261 by a fixed permutation. Source: E. Alpaydin and C. Kaynak (1998), UCI "Optical
    Recognition of Handwritten Digits".
    """
    # The file that sklearn.datasets.load_digits() reads: importing scikit-learn would take each rank a second.
    package = Path(importlib.util.find_spec("sklearn").origin).parent
    rows = torch.from_numpy(np.loadtxt(package / "datasets/data/digits.csv.gz", delimiter=","))
    images, labels = normalize(rows[:, :64].reshape(-1, 8, 8), largest=16), rows[:, 64].long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    parts = order.split([1280, 256, 261])
    return Splits(*(TensorDataset(images[part], labels[part]) for part in parts), tuple("0123456789"))


def torchvision_images(name: str, data_dir: str | Path) -> Splits:
    """MNIST or Fashion-MNIST from `data_dir`, downloaded into it when missing.

    The first twelfth of a fixed permutation of the training file is the validation set (5,000 of 60,000); the test file
    is the test set. Only one process a node may call this while the files are missing (`distributed.local_first`).
    Raises ValueError, saying what to do, where the files are neither there nor to be had, or are damaged.
    """
    from torchvision.datasets import MNIST, FashionMNIST

    cls = {"mnist": MNIST, "fashion_mnist": FashionMNIST}[name]
    try:
        train_file = cls(data_dir, train=True, download=True)
        test_file = cls(data_dir, train=False, download=True)
        for file in (train_file, test_file):
            if len(file.data) != len(file.targets) or file.targets.max() >= len(file.classes):
                raise ValueError("images and labels do not belong together")
    # torchvision meets a damaged file with whichever of the last four its bytes lead to.
    except (OSError, RuntimeError, ValueError, AssertionError, KeyError, TypeError) as error:
        from_torch = isinstance(error, (OSError, RuntimeError))
        reason = str(error).partition("\n")[0] if from_torch else "one of its files is damaged"
        raise ValueError(
            f"cannot get {name} ({reason}). Without a network, copy its four files "
            f"(train-images-idx3-ubyte and so on) to {Path(data_dir).absolute() / cls.__name__ / 'raw'}, "
            "or use --dataset digits, which needs no download"
        ) from error
    images, labels = normalize(train_file.data, largest=255), train_file.targets.long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    val, train = order.split([len(order) // 12, len(order) - len(order) // 12])
    test = TensorDataset(normalize(test_file.data, largest=255), test_file.targets.long())
    return Splits(
        TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val]), test,
        tuple(str(c) for c in train_file.classes),
    )  # fmt: skip


def synthetic(size: int = 10_000, image_shape: tuple[int, int, int] = (1, 28, 28), num_classes: int = 10) -> Splits:
    """Random pixels with random labels, made in memory: nothing to learn, good for measuring speed.

    `size` training samples, and a tenth of that for validation and for test.
    """
    generator = torch.Generator().manual_seed(42)

    def part(n: int) -> TensorDataset:
        labels = torch.randint(0, num_classes, (n,), generator=generator)
        return TensorDataset(torch.randn(n, *image_shape, generator=generator), labels)

    return Splits(part(size), part(size // 10), part(size // 10), tuple(str(c) for c in range(num_classes)))


def load(name: str, data_dir: str | Path = "data") -> Splits:
    """The image data set called `name`. Raises ValueError for a name that is not in IMAGE_DATASETS."""
    if name == "digits":
        return digits()
    if name in ("mnist", "fashion_mnist"):
        return torchvision_images(name, data_dir)
    if name == "synthetic":
        return synthetic()
    raise ValueError(f"unknown data set {name!r}; use one of {', '.join(IMAGE_DATASETS)}")


def text(context: int, file: str | Path | None = None, num_windows: int = 1280) -> Splits:
    """Windows of bytes to predict the next byte: three sets of (int64 inputs (context,), int64 targets (context,)).

    The corpus is the source of Python's own standard library (no download), or the text file `file`; its first 90 %
    are for training, 5 % each for validation and test. An epoch is `num_windows` windows, and a fifth of that for each
    of the others, at places drawn by a fixed seed. Raises ValueError for a file that is too short, OSError for none.
    """
    if file is None:
        folder = Path(sysconfig.get_path("stdlib"))
        corpus = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    else:
        corpus = Path(file).read_bytes()
    tokens = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
    if len(tokens) < 40 * (context + 1):
        raise ValueError(f"{file} has {len(tokens)} bytes; a context of {context} needs {40 * (context + 1)} or more")
    ends = [round(len(tokens) * share) for share in (0.9, 0.95, 1)]
    generator, sets = torch.Generator().manual_seed(SPLIT_SEED), []
    counts = (num_windows, num_windows // 5, num_windows // 5)
    for part, count in zip(tokens.tensor_split(ends[:2]), counts, strict=True):
        starts = torch.randint(len(part) - context, (count, 1), generator=generator)
        windows = part[starts + torch.arange(context + 1)].long()
        sets.append(TensorDataset(windows[:, :-1], windows[:, 1:]))
    return Splits(*sets, tuple(map(str, range(256))))


def write_parquet(dataset: TensorDataset, folder: str, num_files: int = 8) -> str:
    """Write `dataset` for Ray Data as Parquet files into a folder of `folder`, a path or a URI; returns its path.

    Columns: id (the sample's number), image (its pixels in [0, 1], flat), label. The new folder is named by a check sum
    of the data: what a complete earlier call has written of the same data stays, and of other data is not touched.
    """
    import pyarrow as pa
    from pyarrow import fs, parquet

    images, labels = dataset.tensors
    checksum = zlib.crc32(labels.numpy().tobytes(), zlib.crc32(images.numpy().tobytes(), num_files))
    folder = f"{folder if '://' in folder else Path(folder).absolute()}/{checksum:08x}"
    files, path = fs.FileSystem.from_uri(folder)
    if files.get_file_info(f"{path}/_SUCCESS").is_file:
        return folder
    files.create_dir(path, recursive=True)
    for number, ids in enumerate(torch.arange(len(labels)).chunk(num_files)):
        pixels = (images[ids] * 0.5 + 0.5).flatten(1)
        flat = pa.FixedSizeListArray.from_arrays(pa.array(pixels.flatten().numpy()), pixels.shape[1])
        table = pa.table({"id": ids.numpy(), "image": flat, "label": labels[ids].numpy()})
        partial = f"{path}/.{uuid.uuid4().hex}.partial"  # another run may be writing, or reading, the same files
        parquet.write_table(table, partial, filesystem=files)
        files.move(partial, f"{path}/part-{number:03d}.parquet")
    files.open_output_stream(f"{path}/_SUCCESS").close()
    return folder


class UnpaddedDistributedSampler(DistributedSampler):
    """torch's DistributedSampler without its padding: every sample goes to exactly one rank.

    Rank r of W gets elements r, r + W, r + 2W ... of the epoch's permutation, so the k-th global batch is the same set
    of samples for every W that divides the batch size. DistributedSampler repeats samples until all ranks have equally
    many; here the ranks differ by at most one (see `even_batches`).

    `set_position(samples)` starts the next iteration after that many samples of the whole epoch, over all ranks: how a
    run resumes in the middle of an epoch, also at another world size. It holds for one iteration.
    """

    def __init__(self, dataset: Dataset, num_replicas: int, rank: int, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=shuffle, seed=seed)
        if len(dataset) < num_replicas:
            raise ValueError(f"{len(dataset)} samples cannot be dealt to {num_replicas} ranks; use fewer ranks")
        self.position = 0

    def set_position(self, samples: int) -> None:
        self.position = samples

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(self.dataset), generator=generator).tolist()
        else:
            order = list(range(len(self.dataset)))
        remaining, self.position = order[self.position :], 0
        return iter(remaining[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return math.ceil((len(self.dataset) - self.position - self.rank) / self.num_replicas)


def rank_loader(
    dataset: Dataset, batch_size: int, worker: Worker, shuffle_seed: int | None = None, num_workers: int = 0
) -> DataLoader:
    """A rank's part of `dataset` in batches of `batch_size`: every sample goes to exactly one rank.

    shuffle_seed: in another order each epoch, the same one on all ranks; without it in the data set's own.
    num_workers: processes that prepare its batches.
    """
    shuffle = shuffle_seed is not None
    sampler = UnpaddedDistributedSampler(dataset, worker.world_size, worker.rank, shuffle, shuffle_seed or 0)
    # Each pass over a loader draws a seed, for worker processes. From the generator that dropout uses, it would make
    # dropout depend on how often a run is saved or validated.
    return DataLoader(
        dataset, batch_size, sampler=sampler, generator=torch.Generator(), pin_memory=worker.device.type == "cuda",
        num_workers=num_workers, persistent_workers=num_workers > 0,
    )  # fmt: skip


def local_batch_size(global_batch_size: int, world_size: int, most: int = 0) -> int:
    """What each of `world_size` ranks takes of a global batch. Raises ValueError when it does not divide.

    most: the world may grow to this size, and the batch must divide by all sizes on the way.
    """
    multiple = math.lcm(*range(world_size, max(world_size, most) + 1))
    if global_batch_size % multiple:
        below = global_batch_size // multiple * multiple
        sizes = [str(size) for size in (below, below + multiple) if size > 0]
        ranks = f"every number of ranks from {world_size} to {most}" if most > world_size else f"{world_size} ranks"
        raise ValueError(f"global batch {global_batch_size} is not divisible by {ranks}; use {' or '.join(sizes)}")
    return global_batch_size // world_size


def global_batch_counts(num_samples: int, global_batch_size: int) -> list[int]:
    """How many samples each step of an epoch takes over all ranks; the last one may be smaller."""
    full, tail = divmod(num_samples, global_batch_size)
    return [global_batch_size] * full + [tail] * (tail > 0)


def check_batch_norm(model_name: str, num_samples: int, global_batch_size: int, world_size: int) -> None:
    """Raises ValueError when a rank would get fewer than two samples of some batch, where BatchNorm has no variance."""
    fewest = min(global_batch_counts(num_samples, global_batch_size)) // world_size
    if "batchnorm" in model_name and fewest < 2:
        raise ValueError(
            f"--model {model_name} needs two samples a rank in every batch, and {num_samples} samples in batches of "
            f"{global_batch_size} over {world_size} ranks leaves {fewest}; use another --batch-size or --model resnet18"
        )


def even_batches(loader: DataLoader, num_batches: int) -> Iterator:
    """The batches of `loader`, then empty ones until there are `num_batches`.

    Where the last global batch is smaller than the world size, some ranks have no sample left. They must still take
    part in its all-reduce, or the others wait for ever: they do so with tensors of length 0, whose gradient is 0.
    A batch is a list of tensors with the samples along dimension 0.
    """
    count = 0
    for count, batch in enumerate(loader, start=1):  # noqa: B007
        yield batch
    if count < num_batches:
        sample = default_collate([loader.dataset[0]])
        for _ in range(num_batches - count):
            yield [tensor[:0] for tensor in sample]


def epoch_batches(loader: DataLoader, args: Namespace, progress: dict) -> tuple[list[int], Iterator]:
    """The next part of the epoch that `progress` is in: (samples a step over all ranks, this rank's batches).

    loader: from `rank_loader`. Each epoch has an order of its own, the same one on all ranks. A part goes to the
    epoch's end, to the next multiple of `args.save_every_steps`, or to `args.max_steps`, whichever comes first. There
    are as many batches as counts, on every rank.
    """
    loader.sampler.set_epoch(progress["epoch"])
    loader.sampler.set_position(progress["position"])
    counts = global_batch_counts(len(loader.dataset) - progress["position"], args.batch_size)
    if args.max_steps is not None:
        counts = counts[: args.max_steps - progress["step"]]
    if args.save_every_steps is not None:
        counts = counts[: args.save_every_steps - progress["step"] % args.save_every_steps]
    return counts, islice(even_batches(loader, len(counts)), len(counts))
