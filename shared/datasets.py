"""Load the workshop's data sets, each in three splits.

An image data set becomes three TensorDatasets of (float32 image in [-1, 1], int64 label), split by a fixed seed. A text
becomes windows of bytes.
"""

import importlib.util
import sysconfig
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

SPLIT_SEED = 0


@dataclass(frozen=True)
class Splits:
    """The training, validation and test sets, and the names of the classes."""

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
    """Rescale images (N, H, W) from 0..largest to float32 (N, 1, H, W) in [-1, 1].

    This is the usual normalization with mean 0.5 and standard deviation 0.5.
    """
    return ((images.to(torch.float32) / largest - 0.5) / 0.5).unsqueeze(1)


def digits() -> Splits:
    """Return scikit-learn's handwritten digits: 1,797 real images of 8x8 pixels with 16 gray levels.

    They are inside the package, so nothing is downloaded. A fixed permutation splits them into 1,280 / 256 / 261.
    Source: E. Alpaydin and C. Kaynak (1998), UCI "Optical Recognition of Handwritten Digits".
    """
    # Read the file of sklearn.datasets.load_digits() directly: importing scikit-learn takes a second on each rank.
    package = Path(importlib.util.find_spec("sklearn").origin).parent
    rows = torch.from_numpy(np.loadtxt(package / "datasets/data/digits.csv.gz", delimiter=","))
    images, labels = normalize(rows[:, :64].reshape(-1, 8, 8), largest=16), rows[:, 64].long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    parts = order.split([1280, 256, 261])
    return Splits(*(TensorDataset(images[part], labels[part]) for part in parts), tuple("0123456789"))


def torchvision_images(name: str, data_dir: str | Path) -> Splits:
    """Return MNIST or Fashion-MNIST from `data_dir`, and download it if it is missing.

    A fixed permutation of the training file gives a twelfth of it, 5,000 of 60,000 images, to validation. The test file
    is the test set. While the files are missing, only one process per node may call this: see
    `distributed.local_first`. Raises OSError if the files are missing and cannot be downloaded, and ValueError if one
    is damaged. The message says what to do.
    """
    from torchvision.datasets import MNIST, FashionMNIST

    cls = {"mnist": MNIST, "fashion_mnist": FashionMNIST}[name]
    try:
        train_file = cls(data_dir, train=True, download=True)
        test_file = cls(data_dir, train=False, download=True)
        for file in (train_file, test_file):
            if len(file.data) != len(file.targets) or file.targets.max() >= len(file.classes):
                raise ValueError("images and labels do not belong together")
    # A damaged file makes torchvision raise any of the last four, depending on its bytes.
    except (OSError, RuntimeError, ValueError, AssertionError, KeyError, TypeError) as error:
        from_torch = isinstance(error, (OSError, RuntimeError))
        reason = str(error).partition("\n")[0] if from_torch else "one of its files is damaged"
        is_missing = isinstance(error, OSError) or "download" in reason
        raise (OSError if is_missing else ValueError)(
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
    """Return random pixels with random labels: nothing to learn, but good for measuring speed.

    `size` training samples, and a tenth as many each for validation and test.
    """
    generator = torch.Generator().manual_seed(42)

    def part(n: int) -> TensorDataset:
        labels = torch.randint(0, num_classes, (n,), generator=generator)
        return TensorDataset(torch.randn(n, *image_shape, generator=generator), labels)

    return Splits(part(size), part(size // 10), part(size // 10), tuple(str(c) for c in range(num_classes)))


IMAGE_DATASETS = {  # each takes the download folder
    "digits": lambda data_dir: digits(),
    "mnist": partial(torchvision_images, "mnist"),
    "fashion_mnist": partial(torchvision_images, "fashion_mnist"),
    "synthetic": lambda data_dir: synthetic(),
}


def load(name: str, data_dir: str | Path = "data") -> Splits:
    """Return the image data set called `name`. Raises ValueError if IMAGE_DATASETS has no such name."""
    if name not in IMAGE_DATASETS:
        raise ValueError(f"unknown data set {name!r}; use one of {', '.join(IMAGE_DATASETS)}")
    return IMAGE_DATASETS[name](data_dir)


def text(context: int, file: str | Path | None = None, num_windows: int = 1280) -> Splits:
    """Return windows of bytes for next-byte prediction: (int64 inputs (context,), int64 targets (context,)).

    The corpus is the source code of Python's standard library, or the text file `file`. Its first 90 % are for
    training, and 5 % each for validation and test. The training set has `num_windows` windows, and the other two have a
    fifth as many each. A fixed seed chooses where the windows start. Raises ValueError if the file is too short, and
    OSError if it cannot be read.
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
