"""Prepare image data sets for Ray Data: inspect them on the driver, and read their rows in Ray Data's tasks.

A built-in data set is written to Parquet. Your own data are at a path or a URI, either as Parquet or as pictures in one
folder per label.
"""

import io
import re
import uuid
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.dataset
import pyarrow.parquet
import ray.data
import ray.train
from PIL import Image, ImageOps
from pyarrow import fs
from ray.data.datasource import PathPartitionFilter  # ray.data registers a type that Ray's own Parquet files may hold
from ray.exceptions import RayTaskError

# Ray Data's task processes import this file, and do not need torch, which takes seconds to import.
if TYPE_CHECKING:
    import torch
    from torch.utils.data import TensorDataset

    from shared.datasets import Splits

HIDDEN = (".", "_")
PICTURES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
WANTED = (
    "there must be Parquet files with the columns image and label, or a folder for each label with pictures in it "
    f"({', '.join(PICTURES)})"
)


@dataclass(frozen=True)
class ImageSet:
    """What Ray Data needs to know about a set of images before it reads them."""

    path: str  # or a URI
    num_samples: int
    image_shape: tuple[int, int, int]  # (channels, height, width)
    classes: tuple[str, ...]  # in the order of their labels
    pictures: bool = False  # picture files, not Parquet
    image_size: int | None = None  # height and width to which encoded pictures are resized
    has_ids: bool = False  # a column that numbers the samples, from 0

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.classes)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert a batch for `map_batches` to columns image, label and, if the set has them, id.

        batch: path and bytes of pictures, or path, image and label of Parquet.
        The images become float32 (rows, channels, height, width) in [-1, 1]. Raises ValueError for an image that cannot
        be read, or whose shape differs from the first one's.
        """
        images = map(self.read, batch["bytes" if self.pictures else "image"], batch["path"])
        number_of = {name: number for number, name in enumerate(self.classes)}
        folders = (PurePosixPath(path).parent.name for path in batch["path"])
        labels = [number_of[folder] for folder in folders] if self.pictures else batch["label"]
        ids = {"id": batch["id"]} if self.has_ids else {}
        normalized = (np.stack(list(images)) - np.float32(0.5)) / np.float32(0.5)  # as in `shared.datasets`
        return {**ids, "image": normalized, "label": np.asarray(labels, dtype=np.int64)}

    def read(self, image: object, path: str) -> np.ndarray:
        """Return one image of the file `path`, decoded by `pixels`."""
        try:
            # The built-in data set `synthetic` is unbounded noise.
            array = pixels(image, self.image_size, like=self.image_shape, bounded=not self.has_ids)
        except Exception as error:  # a damaged file can make Pillow raise anything
            raise ValueError(f"cannot use an image of {path}: {error}") from error
        if array.shape != self.image_shape:
            raise ValueError(
                f"{path} has the shape (channels, height, width) {array.shape}, but the first image of {self.path} "
                f"has {self.image_shape}: --image-size resizes pictures, but not arrays"
            )
        return array

    def explain(self, error: Exception, search: bool = True) -> Exception:
        """Return a one-line error to raise in place of an error of Ray Data's.

        It is a ValueError if the data are to blame, and an OSError if they are out of reach. Ray Data does not name a
        Parquet file that it cannot read.
        search: decode all Parquet files, one by one, to find it.
        """
        if messages := re.findall(r"^ValueError: (.*)$", str(error), re.MULTILINE):  # `__call__` raised it
            return ValueError(messages[-1])
        if isinstance(error, RayTaskError) and search and not self.pictures:
            try:
                if damaged := find_damaged(self.path):
                    remedy = f"delete {self.path}" if self.has_ids else "copy it or write it again"
                    return ValueError(f"{damaged}: {remedy}")
            except OSError as away:
                error = away
        if isinstance(error, (OSError, ValueError)):
            kind = OSError if isinstance(error, OSError) else ValueError
            return kind(f"cannot read {self.path}: {str(getattr(error, 'cause', error)).splitlines()[0]}")
        return error


class EverySample(ray.train.DataConfig):
    """A DataConfig that deals every row. Ray's own drops up to N - 1, so that all N workers get the same number."""

    def configure(self, datasets: dict, world_size: int, worker_handles, worker_node_ids, **kwargs) -> list[dict]:
        shards = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            streams = dataset.streaming_split(world_size, equal=False, locality_hints=worker_node_ids)
            for shard, stream in zip(shards, streams, strict=True):
                shard[name] = stream
        return shards


class Stream:
    """A rank's batches (images, labels), to the end of its stream or to an image that cannot be used.

    A bad image breaks the stream on all ranks, but not at the same batch. If a rank raised at once, it would leave the
    others in their next all-reduce. So the stream simply ends on this rank, and `check` raises when all ranks are
    through.
    """

    def __init__(self, batches: Iterable[dict], images: ImageSet, device: "torch.device") -> None:
        import torch

        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # no code writes to a batch
        self.batches, self.images, self.error = iter(batches), images, None
        self.seen = torch.zeros(images.num_samples, device=device) if images.has_ids else None  # counts per sample
        self.empty = torch.empty(0, *images.image_shape, device=device), torch.empty(0, dtype=torch.long, device=device)

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> "tuple[torch.Tensor, torch.Tensor]":
        try:
            batch = next(self.batches)
        except (RayTaskError, ValueError) as error:  # from a task: an image or a file cannot be used
            self.error = error
            raise StopIteration from None
        if self.seen is not None:
            self.seen[batch["id"]] += 1
        return batch["image"], batch["label"]

    def check(self) -> None:
        """Raise ValueError if the stream has broken, or OSError if the files are out of reach."""
        if self.error is not None:
            import torch.distributed as dist

            raise self.images.explain(self.error, search=not dist.is_initialized() or dist.get_rank() == 0)


def find(dataset: str, data_dir: str, image_size: int | None) -> "Splits | dict[str, ImageSet]":
    """Return a built-in data set, or the train and val ImageSets of your own data.

    Raises ValueError for data that cannot be used.
    """
    from shared import datasets

    if dataset not in datasets.IMAGE_DATASETS:
        return inspect_dataset(dataset, image_size)
    if image_size:
        raise ValueError("--image-size is for the pictures of --data-uri")
    return datasets.load(dataset, data_dir)


def store(splits: "Splits | dict[str, ImageSet]", folder: str) -> dict[str, ImageSet]:
    """Write a built-in data set's train and val parts to `folder`, a path or a URI, and return their ImageSets.

    Parts that an earlier call has written are reused. Your own data stay where they are.
    """
    if isinstance(splits, dict):
        return splits
    facts = {"image_shape": splits.image_shape, "classes": splits.classes, "has_ids": True}
    parts = {"train": splits.train, "val": splits.val}
    return {name: ImageSet(write_parquet(part, f"{folder}/{name}"), len(part), **facts) for name, part in parts.items()}


def read(images: ImageSet, seed: int, num_blocks: int) -> ray.data.Dataset:
    """Return a stream of these images in [-1, 1], in a different order each epoch.

    num_blocks: the number of blocks of a built-in data set. For your own files Ray chooses the block size.
    """
    shuffle = ray.data.FileShuffleConfig(seed=seed)  # each pass adds its number to the seed
    options = {"shuffle": shuffle, "include_paths": True, "partition_filter": Visible()}
    if images.pictures:
        rows = ray.data.read_binary_files(images.path, **options)
    else:
        columns = ["image", "label", *(["id"] if images.has_ids else [])]
        blocks = num_blocks if images.has_ids else None
        try:
            rows = ray.data.read_parquet(images.path, columns=columns, override_num_blocks=blocks, **options)
        except RayTaskError as error:  # it already reads the beginning of some files
            raise images.explain(error) from error
    # Pictures may be many times larger when decoded, so decode a few at a time and not a whole block.
    return rows.map_batches(images, batch_size=None if images.has_ids else 64)


def write_parquet(dataset: "TensorDataset", folder: str, num_files: int = 8) -> str:
    """Write `dataset` for Ray Data as Parquet files to a new folder in `folder`, and return its path.

    folder: a path or a URI. The columns are id (the sample's number), image (its pixels in [0, 1], flat) and label. A
    checksum of the data is the new folder's name. So a complete earlier write of the same data is reused, and other
    data are not touched.
    """
    images, labels = dataset.tensors
    checksum = zlib.crc32(labels.numpy().tobytes(), zlib.crc32(images.numpy().tobytes(), num_files))
    folder = f"{folder if '://' in folder else Path(folder).absolute()}/{checksum:08x}"
    files, path = fs.FileSystem.from_uri(folder)
    if files.get_file_info(f"{path}/_SUCCESS").is_file:
        return folder
    files.create_dir(path, recursive=True)
    rows_per_file = -(-len(labels) // num_files)
    for number, start in enumerate(range(0, len(labels), rows_per_file)):
        rows = slice(start, start + rows_per_file)
        pixels = (images[rows] * 0.5 + 0.5).flatten(1)
        flat = pa.FixedSizeListArray.from_arrays(pa.array(pixels.flatten().numpy()), pixels.shape[1])
        table = pa.table({"id": np.arange(len(labels))[rows], "image": flat, "label": labels[rows].numpy()})
        partial = f"{path}/.{uuid.uuid4().hex}.partial"  # another run may be writing or reading the same files
        pyarrow.parquet.write_table(table, partial, filesystem=files)
        files.move(partial, f"{path}/part-{number:03d}.parquet")
    files.open_output_stream(f"{path}/_SUCCESS").close()
    return folder


def inspect_dataset(uri: str, image_size: int | None = None) -> dict[str, ImageSet]:
    """Return the ImageSets of your own data in `uri`/train and `uri`/val.

    Labels in Parquet are numbers from 0. Labels of folders are their names, numbered in alphabetical order. An image in
    Parquet is an encoded picture (bytes, or {"bytes": ...}), or an array of uint8 or of floats from 0 to 1. An array is
    (height, width), (height, width, channels) or (channels, height, width). The first training image decides whether
    all encoded images are read in gray or in color.

    Raises ValueError for anything else. The message says what was found and what is expected.
    """
    if "://" in uri and "?" in uri:
        raise ValueError("--data-uri takes no options after a ?; AWS_ENDPOINT_URL names your own S3 store")
    train = inspect_folder(f"{uri}/train", image_size)
    val = inspect_folder(f"{uri}/val", image_size, like=train.image_shape)
    if train.image_shape != val.image_shape:
        raise ValueError(f"the images in {uri} are {train.image_shape} for training and {val.image_shape} in val")
    if train.pictures != val.pictures:
        raise ValueError(f"one of {uri}/train and {uri}/val has Parquet files, and the other has pictures")
    if unknown := sorted(set(val.classes) - set(train.classes)):
        raise ValueError(f"{val.path} has labels that {train.path} lacks: {summarize(unknown)}")
    if len(train.classes) < 2:
        raise ValueError(f"{train.path} has only one label: {train.classes[0]}")
    return {"train": train, "val": replace(val, classes=train.classes)}


def inspect_folder(folder: str, image_size: int | None, like: tuple[int, int, int] | None = None) -> ImageSet:
    """Return the ImageSet of one folder.

    like: the image shape of the other folder.
    """
    try:
        files, root, names = list_files(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {folder} ({str(error).splitlines()[0]}); {WANTED}") from error
    if names and all(name.suffix.lower() == ".parquet" for name in names):
        return inspect_parquet(folder, files, [f"{root}/{name}" for name in names], image_size, like)
    wrong = [name for name in names if name.suffix.lower() not in PICTURES or len(name.parts) != 2]
    if wrong or not names:
        raise ValueError(f"{folder} has {summarize(wrong) or 'no files'}; {WANTED}")
    first = files.open_input_file(f"{root}/{names[0]}").read()
    shape = shape_of(f"{folder}/{names[0]}", first, image_size, like)
    classes = tuple(sorted({name.parts[0] for name in names}))
    return ImageSet(folder, len(names), shape, classes, pictures=True, image_size=image_size)


def list_files(folder: str) -> tuple[fs.FileSystem, str, list[PurePosixPath]]:
    """Return (file system, path in it, files that Ray Data reads) for a path or a URI."""
    files, root = fs.FileSystem.from_uri(folder)
    found = files.get_file_info(fs.FileSelector(root, recursive=True))
    paths = Visible()(each.path for each in found if each.is_file)
    names = sorted(PurePosixPath(path).relative_to(root) for path in paths)
    return files, root, [name for name in names if not name.parts[0].startswith(HIDDEN)]  # as Ray does


def find_damaged(folder: str) -> str | None:
    """Return which Parquet file cannot be decoded, and why, or None.

    The files are read one by one. Raises OSError if one is out of reach.
    """
    files, root, names = list_files(folder)
    for name in names:
        content = files.open_input_file(f"{root}/{name}").readall()
        try:
            pyarrow.parquet.read_table(pa.BufferReader(content), columns=["image", "label"])
        except (OSError, pa.ArrowException) as error:
            return f"{root}/{name} is damaged ({str(error).splitlines()[0]})"
    return None


class Visible(PathPartitionFilter):
    """A filter that leaves out hidden files and hidden label folders, such as a file manager's.

    Both this module and Ray's readers use it.
    """

    def __init__(self) -> None:
        pass

    def __call__(self, paths: Iterable[str]) -> list[str]:
        return list(filter(self.apply, paths))

    def apply(self, path: str) -> bool:
        return not any(part.startswith(HIDDEN) for part in PurePosixPath(path).parts[-2:])


def inspect_parquet(
    folder: str, files: fs.FileSystem, paths: list[str], image_size: int | None, like: tuple[int, int, int] | None
) -> ImageSet:
    """Return the ImageSet of these Parquet files.

    Only the labels and the images of the first row group are read.
    """
    fragments = [pyarrow.dataset.ParquetFileFormat().make_fragment(path, files) for path in paths]
    with ThreadPoolExecutor() as pool:
        counts = list(pool.map(count_labels, fragments, repeat(fragments[0])))
    labels = {label for each in counts for label in each}
    for path, each in zip(paths, counts, strict=True):
        if bad := [label for label in each if label is None or not 0 <= label < 10 * len(labels)]:
            with cannot_use(path):
                raise ValueError(f"the labels must be whole numbers from 0 without large gaps, not {summarize(bad)}")
    with cannot_use(folder):
        if len(labels) < 2:
            raise ValueError(f"only one label: {labels.pop()}" if labels else "no rows")
    fragment = next(fragment for fragment, each in zip(fragments, counts, strict=True) if each)
    with cannot_use(fragment.path):
        image = fragment.split_by_row_group()[0].head(1, columns=["image"], batch_size=1)["image"].chunk(0)
        first = image.to_numpy(zero_copy_only=False)[0]
    shape = shape_of(fragment.path, first, image_size, like)
    classes = tuple(str(number) for number in range(max(labels) + 1))
    return ImageSet(folder, sum(each.total() for each in counts), shape, classes, image_size=image_size)


def count_labels(fragment: pyarrow.dataset.ParquetFileFragment, first: pyarrow.dataset.ParquetFileFragment) -> Counter:
    """Return how often each label occurs in a Parquet file.

    Raises ValueError if the columns differ from those of the first file.
    """

    def image_type(file: pyarrow.dataset.ParquetFileFragment) -> pa.DataType:
        found = file.physical_schema.field("image").type
        return pa.binary() if pa.types.is_large_binary(found) else found

    with cannot_use(fragment.path):
        names = fragment.physical_schema.names
        if missing := {"image", "label"} - set(names):
            raise ValueError(f"no column {' and no '.join(sorted(missing))}, only {summarize(names)}")
        if repeated := [name for name in ("image", "label") if names.count(name) > 1]:
            raise ValueError(f"more than one column {repeated[0]}")
        label_type = fragment.physical_schema.field("label").type
        if not pa.types.is_integer(label_type):
            raise ValueError(f"the labels are {label_type}, but must be whole numbers from 0")
        if image_type(fragment) != image_type(first):
            raise ValueError(
                f"the images are {image_type(fragment)}, and those of {first.path} are {image_type(first)}"
            )
        counts = Counter()
        for batch in fragment.to_batches(columns=["label"], use_threads=False):
            for each in pa.compute.value_counts(batch["label"]).to_pylist():
                counts[each["values"]] += each["counts"]
        return counts


@contextmanager
def cannot_use(path: str) -> Iterator[None]:
    """Raise an error of the block as a ValueError that names `path` and says what is expected there."""
    try:
        yield
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise ValueError(f"cannot use {path}: {str(error).splitlines()[0]}; {WANTED}") from error


def shape_of(
    where: str, image: object, image_size: int | None, like: tuple[int, int, int] | None
) -> tuple[int, int, int]:
    """Return the shape of the first image. Raises ValueError, naming `where`, if it cannot be used."""
    try:
        return pixels(image, image_size, like).shape
    except Exception as error:
        raise ValueError(f"cannot use the first image of {where}: {error}") from error


def pixels(
    image: object, image_size: int | None, like: tuple[int, int, int] | None, bounded: bool = True
) -> np.ndarray:
    """Convert an image, as described in `inspect_dataset`, to float32 (channels, height, width) from 0 to 1.

    like: the shape of the first image, if this is a different one. It gives a picture its number of channels, and a
    flat array its shape. A picture is rotated as its EXIF data say, and its transparency is ignored.
    bounded: refuse floats outside 0 to 1.
    Raises ValueError for anything that is not such an image.
    """
    if isinstance(image, dict):  # as in Hugging Face's data sets
        if image.get("bytes") is None and image.get("path"):
            raise ValueError(f"it is only a path, {image['path']}: write the picture's bytes beside it")
        image = image.get("bytes")
    if image is None:
        raise ValueError("it is missing")
    if isinstance(image, bytes):
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(image)))
        if image.mode.startswith(("I", "F")):
            raise ValueError(f"a picture of mode {image.mode} has more than 8 bits per channel; convert it to 8")
        gray = image.mode in ("1", "L", "LA") if like is None else like[0] == 1
        image = image.convert("L" if gray else "RGB")
        image = np.asarray(image.resize((image_size, image_size)) if image_size else image)
    array = unnested(image)
    in_range = array.dtype.kind == "f" and (not bounded or (array.min() >= 0 and array.max() <= 1))  # false for NaN
    if array.dtype != np.uint8 and not in_range:
        values = f" from {array.min():g} to {array.max():g}" if array.dtype.kind == "f" else ""
        raise ValueError(f"its pixels must be uint8, or floats from 0 to 1, but are {array.dtype}{values}")
    array = array.astype(np.float32) / (255 if array.dtype == np.uint8 else 1)
    if array.ndim == 1 and like is not None and array.size == np.prod(like):
        return array.reshape(like)
    if array.ndim == 2:
        return array[None]
    if array.ndim == 3 and array.shape[-1] in (1, 3):
        return np.moveaxis(array, -1, 0)
    if array.ndim == 3 and array.shape[0] in (1, 3):
        return array
    raise ValueError(f"an array of shape {array.shape} is not an image of one or three channels")


def unnested(value: object) -> np.ndarray:
    """Convert nested lists, as Parquet returns them, to one array.

    Raises ValueError if their lengths differ.
    """
    array = np.asarray(value)
    return np.stack([unnested(each) for each in array]) if array.dtype == object and array.ndim else array


def summarize(names: Iterable[object]) -> str:
    """Return the first three names, and how many more there are."""
    names = list(map(str, names))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
