"""Sets of images for Ray Data, and what there is to know of them before it reads them.

A built-in data set is written to Parquet. One's own lies at a path or a URI: as Parquet, or as pictures in a folder for
each label.
"""

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.dataset
import ray.data  # noqa: F401 - Parquet that Ray has written holds arrays of a type that Ray defines
from PIL import Image
from pyarrow import fs
from ray.exceptions import UserCodeException

# Each process of Ray Data's tasks imports this file: torch, which takes seconds, is not needed there.
if TYPE_CHECKING:
    from shared.data import Splits

PICTURES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
WANTED = (
    "there must be Parquet files with the columns image and label, or a folder for each label with pictures in it "
    f"({', '.join(PICTURES)})"
)


@dataclass(frozen=True)
class ImageSet:
    """A set of images as Ray Data will read it."""

    path: str  # or a URI
    num_samples: int
    image_shape: tuple[int, int, int]  # (channels, height, width)
    classes: tuple[str, ...]  # in the order of their labels
    pictures: bool = False  # files of pictures, not Parquet
    image_size: int | None = None  # what encoded pictures are resized to, in both directions
    has_ids: bool = False  # a column with the number of each sample, from 0

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """For `map_batches`: columns image, float32 (rows, channels, height, width) from 0 to 1, label, id if there.

        Pictures come with the columns bytes and path. Raises ValueError for an image that cannot be read, and for one
        of another shape than the first one's.
        """
        if self.pictures:
            number_of = {name: number for number, name in enumerate(self.classes)}
            labels = [number_of[PurePosixPath(path).parent.name] for path in batch["path"]]
            images = [self.read(*row) for row in zip(batch["bytes"], batch["path"], strict=True)]
        else:
            labels = batch["label"]
            images = [self.read(image, self.path) for image in batch["image"]]
        ids = {"id": batch["id"]} if self.has_ids else {}
        return {**ids, "image": np.stack(images), "label": np.asarray(labels, dtype=np.int64)}

    def read(self, image: object, where: str) -> np.ndarray:
        """One image, by `pixels`."""
        try:
            array = pixels(image, self.image_shape, self.image_size)
        except Exception as error:  # Pillow meets a damaged file with whatever its bytes lead to
            raise ValueError(f"cannot use an image of {where}: {error}") from error
        if array.shape != self.image_shape:
            raise ValueError(
                f"{where} is of (channels, height, width) {array.shape}, and the first image of {self.path} of "
                f"{self.image_shape}: --image-size brings pictures to one size"
            )
        return array


class Stream:
    """A rank's batches, to the end of its stream, or to an image that cannot be used.

    Such a stream breaks on all ranks, but not at the same batch: a rank that raised there would leave the others in
    their next all-reduce. So it ends for this rank as if it were over, and `check` raises when all are through.
    """

    def __init__(self, batches: Iterable[dict]) -> None:
        self.batches, self.broken = iter(batches), None

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> dict:
        try:
            return next(self.batches)
        except UserCodeException as error:  # a function of `map_batches` has raised, in another process
            self.broken = error
            raise StopIteration from None

    def check(self) -> None:
        """Raises ValueError where the stream has broken."""
        if self.broken is not None:
            told = re.findall(r"^ValueError: (.*)$", str(self.broken), re.MULTILINE)
            raise ValueError(told[-1]) if told else self.broken


def write(splits: "Splits", folder: str) -> dict[str, ImageSet]:
    """Write a built-in data set's train and val into `folder`, a path or a URI, unless an earlier call has."""
    from shared.data import write_parquet

    facts = {"image_shape": splits.image_shape, "classes": splits.classes, "has_ids": True}
    parts = {"train": splits.train, "val": splits.val}
    return {name: ImageSet(write_parquet(part, f"{folder}/{name}"), len(part), **facts) for name, part in parts.items()}


def look(uri: str, image_size: int | None = None) -> dict[str, ImageSet]:
    """The data of one's own in `uri`/train and `uri`/val.

    Labels are numbers from 0 in Parquet; of folders they are the names, numbered in the order of the alphabet. An image
    in Parquet is an encoded picture (bytes, or {"bytes": ...}), or an array of uint8, or of floats from 0 to 1, as
    (height, width), (height, width, channels) or (channels, height, width).

    Raises ValueError for anything else, saying what is there and what should be.
    """
    train, val = (look_into(f"{uri.rstrip('/')}/{part}", image_size) for part in ("train", "val"))
    if train.image_shape != val.image_shape:
        raise ValueError(f"the images in {uri} are {train.image_shape} for training and {val.image_shape} in val")
    if train.pictures != val.pictures:
        raise ValueError(f"one of {uri}/train and {uri}/val has Parquet files and the other one pictures")
    if unknown := sorted(set(val.classes) - set(train.classes)):
        raise ValueError(f"{val.path} has labels that {train.path} lacks: {some(unknown)}")
    if len(train.classes) < 2:
        raise ValueError(f"{train.path} has one label only: {train.classes[0]}")
    return {"train": train, "val": replace(val, classes=train.classes)}


def look_into(folder: str, image_size: int | None) -> ImageSet:
    """The set in one folder."""
    try:
        files, path = fs.FileSystem.from_uri(folder)
        found = files.get_file_info(fs.FileSelector(path, recursive=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {folder} ({str(error).splitlines()[0]}); {WANTED}") from error
    names = [PurePosixPath(each.path).relative_to(path) for each in found if each.is_file]
    names = sorted(name for name in names if not name.name.startswith((".", "_")))  # nor does Ray Data read those
    kinds = {name.suffix.lower() for name in names}
    if kinds == {".parquet"}:
        return look_into_parquet(folder, files, [f"{path}/{name}" for name in names], image_size)
    if kinds and kinds <= set(PICTURES) and {len(name.parts) for name in names} == {2}:
        shape = shape_of(f"{folder}/{names[0]}", files.open_input_file(f"{path}/{names[0]}").read(), image_size)
        classes = tuple(sorted({name.parts[0] for name in names}))
        return ImageSet(folder, len(names), shape, classes, pictures=True, image_size=image_size)
    raise ValueError(f"{folder} has {some(names) or 'no files'}; {WANTED}")


def look_into_parquet(folder: str, files: fs.FileSystem, paths: list[str], image_size: int | None) -> ImageSet:
    """The set in these Parquet files. Only the column of labels and one image are read."""
    try:
        table = pyarrow.dataset.dataset(paths, filesystem=files, format="parquet")
        if missing := {"image", "label"} - set(table.schema.names):
            raise ValueError(f"no column {' and no '.join(sorted(missing))}, only {some(table.schema.names)}")
        if not pa.types.is_integer(table.schema.field("label").type):
            raise ValueError(f"the labels are {table.schema.field('label').type}, and must be whole numbers from 0")
        rows = sum(fragment.count_rows() for fragment in table.get_fragments())
        batches = [pa.compute.min_max(batch["label"]) for batch in table.to_batches(columns=["label"]) if len(batch)]
        ends = [(limits["min"].as_py(), limits["max"].as_py()) for limits in batches]
        if rows == 0 or any(None in each for each in ends) or min(each[0] for each in ends) < 0:
            raise ValueError("no rows" if rows == 0 else "the labels must be whole numbers from 0")
        first = table.head(1, columns=["image"])["image"].chunk(0).to_numpy(zero_copy_only=False)[0]
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise ValueError(f"cannot use {folder}: {str(error).splitlines()[0]}; {WANTED}") from error
    classes = tuple(str(number) for number in range(max(each[1] for each in ends) + 1))
    return ImageSet(folder, rows, shape_of(folder, first, image_size), classes, image_size=image_size)


def shape_of(where: str, image: object, image_size: int | None) -> tuple[int, int, int]:
    """The shape of the first image."""
    try:
        return pixels(image, None, image_size).shape
    except Exception as error:
        raise ValueError(f"cannot use the first image of {where}: {error}") from error


def pixels(image: object, shape: tuple[int, int, int] | None, image_size: int | None) -> np.ndarray:
    """An image as `look` describes it -> float32 (channels, height, width) from 0 to 1.

    shape: of the first one, where this is another: a picture is brought to its number of channels, flat numbers to it.
    """
    if isinstance(image, dict):  # as Hugging Face's data sets have them
        image = image["bytes"]
    if isinstance(image, bytes):
        image = Image.open(io.BytesIO(image))
        grey = image.mode in ("1", "L", "I", "F") if shape is None else shape[0] == 1
        image = image.convert("L" if grey else "RGB")
        image = np.asarray(image.resize((image_size, image_size)) if image_size else image)
    array = unnested(image)
    # The range is looked at once: a data set of noise, which is one of ours, has no bounds.
    good = array.dtype == np.uint8 or (array.dtype.kind == "f" and (shape or (array.min() >= 0 and array.max() <= 1)))
    if not good:
        raise ValueError(f"its pixels must be uint8, or floats from 0 to 1, and are {array.dtype}")
    array = array.astype(np.float32) / (255 if array.dtype == np.uint8 else 1)
    if array.ndim == 1 and shape is not None and array.size == np.prod(shape):
        return array.reshape(shape)
    if array.ndim == 2:
        return array[None]
    if array.ndim == 3 and array.shape[-1] in (1, 3):
        return np.moveaxis(array, -1, 0)
    if array.ndim == 3 and array.shape[0] in (1, 3):
        return array
    raise ValueError(f"an array of shape {array.shape} is no image of one or three channels")


def unnested(value: object) -> np.ndarray:
    """Lists in lists, as Parquet gives them, as one array. Raises ValueError where they are not equally long."""
    array = np.asarray(value)
    return np.stack([unnested(each) for each in array]) if array.dtype == object and array.ndim else array


def some(names: Iterable[object]) -> str:
    """The first three of them."""
    names = list(map(str, names))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
