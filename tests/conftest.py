"""Fixtures of several test files."""

from pathlib import Path

import numpy as np
import pytest
from runs import UNEVEN, train
from sklearn.datasets import load_digits


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write MNIST's own format: two zero bytes, 8 for bytes, the number of dimensions, their sizes, the data."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.fixture(scope="session")
def small_mnist(tmp_path_factory) -> Path:
    """A data folder with 192 digits of 8x8 as MNIST: 176 for training, enough for uneven tails."""
    folder = tmp_path_factory.mktemp("data")
    raw = folder / "MNIST/raw"
    raw.mkdir(parents=True)
    digits = load_digits()
    images, labels = (digits.images * 15.9).astype(np.uint8), digits.target
    for name, part in (("train", slice(0, 192)), ("t10k", slice(192, 224))):
        write_idx(raw / f"{name}-images-idx3-ubyte", images[part])
        write_idx(raw / f"{name}-labels-idx1-ubyte", labels[part])
    return folder


@pytest.fixture(scope="session")
def one_process(small_mnist, tmp_path_factory) -> list[dict]:
    """The metrics that all numbers of processes must have with the options UNEVEN."""
    return train(0, tmp_path_factory.mktemp("one"), *UNEVEN, "--data-dir", small_mnist)
