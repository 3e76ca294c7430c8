"""Images of one's own for Ray Data: what is read, and what is said of anything else."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from ray.data.extensions import ArrowTensorArray
from ray.exceptions import RayTaskError

import ray_images
from shared import datasets

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 4, 5), dtype=np.uint8)
LABELS = [0, 1, 2, 0, 1, 2]


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def write_parquet(folder: Path, images=None, labels=None, parts=("train", "val"), **more) -> str:
    """The same two files in each part; returns the folder."""
    images = [png(image) for image in PIXELS] if images is None else images
    table = pa.table({"image": images, "label": LABELS if labels is None else labels, **more})
    for part in parts:
        (folder / part).mkdir(parents=True, exist_ok=True)
        parquet.write_table(table.slice(0, 4), folder / part / "a.parquet")
        parquet.write_table(table.slice(4), folder / part / "b.parquet")
    return str(folder)


def write_pictures(folder: Path, parts=("train", "val"), images=PIXELS, suffix=".png") -> str:
    """Each part with a folder a label; returns the folder."""
    for part in parts:
        for number, (image, label) in enumerate(zip(images, LABELS, strict=True)):
            path = folder / part / ("ant", "bee", "cow")[label] / f"{number}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(image))
    return str(folder)


def as_batch(folder: Path) -> dict:
    """Parquet files as Ray Data hands them to `map_batches`."""
    table = parquet.read_table(folder)
    columns = {name: table[name].combine_chunks().to_numpy(zero_copy_only=False) for name in table.column_names}
    return {**columns, "path": np.array([f"{folder}/a.parquet"] * len(table))}


COLORED = np.stack([PIXELS, PIXELS // 2, PIXELS // 3], axis=-1)
FLOATS = (PIXELS / 255).astype(np.float32)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        ([png(image) for image in PIXELS], FLOATS[:, None]),
        ([{"bytes": png(image), "path": "a.png"} for image in COLORED], np.moveaxis(COLORED, -1, 1) / 255),
        (ArrowTensorArray.from_numpy(PIXELS), FLOATS[:, None]),
        (ArrowTensorArray.from_numpy(COLORED), np.moveaxis(COLORED, -1, 1) / 255),
        (ArrowTensorArray.from_numpy(np.moveaxis(COLORED, -1, 1).copy()), np.moveaxis(COLORED, -1, 1) / 255),
        (ArrowTensorArray.from_numpy(FLOATS), FLOATS[:, None]),
        (pa.array(PIXELS.tolist(), pa.list_(pa.list_(pa.uint8()))), FLOATS[:, None]),
    ],
    ids=["encoded", "as Hugging Face", "uint8", "colors last", "colors first", "floats", "lists"],
)
def test_parquet_of_one_s_own(images, expected, tmp_path):
    uri = write_parquet(tmp_path, images, id=[f"number {number}" for number in range(6)])
    for place in (uri, f"file://{uri}/"):
        sets = ray_images.inspect_dataset(place)
        assert sets["train"].num_samples == sets["val"].num_samples == 6
        assert sets["train"].image_shape == expected.shape[1:] and sets["train"].classes == ("0", "1", "2")
    batch = sets["train"](as_batch(tmp_path / "train"))
    assert np.abs(batch["image"] - (2 * expected - 1)).max() < 1e-6 and batch["image"].dtype == np.float32
    assert batch["label"].tolist() == LABELS and list(batch) == ["image", "label"]


def test_pictures_in_a_folder_a_label(tmp_path):
    write_pictures(tmp_path)
    for hidden in ("ant/._0.png", "ant/.DS_Store", ".thumbnails/0.png", "_none/0.png"):
        (tmp_path / "train" / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / "train" / hidden).write_bytes(b"nobody asks for it")
    (tmp_path / "val/cow/2.png").unlink()
    sets = ray_images.inspect_dataset(str(tmp_path))
    assert (sets["train"].num_samples, sets["val"].num_samples) == (6, 5)
    assert sets["val"].classes == ("ant", "bee", "cow") and sets["train"].image_shape == (1, 4, 5)
    paths = sorted((tmp_path / "train").glob("[abc]*/[0-9].png"))
    batch = {"bytes": [path.read_bytes() for path in paths], "path": list(map(str, paths))}
    read = sets["train"](batch)
    for image, label, path in zip(read["image"], read["label"], paths, strict=True):
        number = int(path.stem)
        assert np.allclose(image, 2 * FLOATS[number, None] - 1) and label == LABELS[number]
    batch["bytes"][2] = batch["bytes"][2][:60]
    with pytest.raises(ValueError, match=f"cannot use an image of {paths[2]}: image file is truncated"):
        sets["train"](batch)


def test_pictures_brought_to_one_size_and_one_number_of_channels(tmp_path):
    gray_and_colored = [png(image) for image in (*PIXELS[:3], *COLORED[:3, :3])]
    uri = write_parquet(tmp_path, gray_and_colored)
    read = ray_images.inspect_dataset(uri, image_size=8)["train"](as_batch(tmp_path / "train"))
    assert read["image"].shape == (6, 1, 8, 8)  # gray, as the first one
    other_size = ray_images.inspect_dataset(uri)["train"]
    words = r"a.parquet has .*\(1, 3, 5\), but the first image of .*train has \(1, 4, 5\): --image-size resizes"
    with pytest.raises(ValueError, match=words):
        other_size(as_batch(tmp_path / "train"))


def test_a_built_in_data_set_comes_out_as_it_was(tmp_path):
    splits = datasets.digits()
    sets = ray_images.store(splits, str(tmp_path))
    read = sets["val"](as_batch(Path(sets["val"].path)))
    assert np.array_equal(read["image"], splits.val.tensors[0].numpy())
    assert read["label"].tolist() == splits.val.tensors[1].tolist() and read["id"].tolist() == list(range(256))
    assert (sets["train"].num_samples, sets["train"].image_shape, len(sets["train"].classes)) == (1280, (1, 8, 8), 10)


def unreadable(folder: Path) -> str:
    uri = write_parquet(folder)
    (folder / "train/a.parquet").write_bytes(b"half of it")
    return uri


def unreadable_picture(folder: Path) -> str:
    uri = write_pictures(folder)
    (folder / "train/ant/0.png").write_bytes(b"half of it")
    return uri


def csv(folder: Path) -> str:
    for part in ("train", "val"):
        (folder / part).mkdir()
        (folder / part / "labels.csv").write_text("number,label")
    return str(folder)


def with_a_list(folder: Path) -> str:
    uri = write_pictures(folder)
    (folder / "train/classes.txt").write_text("ant, bee, cow")
    return uri


def one_without_pictures(folder: Path) -> str:
    write_pictures(folder, parts=("val",))
    return write_parquet(folder, parts=("train",))


def other_labels(folder: Path) -> str:
    write_parquet(folder, labels=[0, 1, 5, 0, 1, 5])
    return write_parquet(folder, labels=[0, 1, 6, 0, 1, 7], parts=("val",))


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda folder: str(folder / "nowhere"), "cannot read .*nowhere/train .*there must be Parquet files"),
        (lambda folder: "nonsense://bucket/images", "cannot read nonsense://bucket/images/train .*there must be"),
        (csv, "train has labels.csv; there must be Parquet files with the columns image and label, or a folder for"),
        (lambda folder: str((folder / "train").mkdir() or folder), "train has no files; there must be"),
        (lambda folder: write_pictures(folder, parts=("train/more", "val")), "train has more/ant/0.png, .* and 3 more"),
        (with_a_list, "train has classes.txt; there must be"),
        (lambda folder: write_pictures(folder, images=PIXELS.astype(np.uint16) * 256), "more than 8 bits per channel"),
        (lambda folder: "s3://bucket/images?region=here", "takes no options after a [?]; AWS_ENDPOINT_URL names"),
        (unreadable, "cannot use .*train/a.parquet: .*Parquet magic bytes not found"),
        (unreadable_picture, "cannot use the first image of .*0.png: cannot identify image file"),
        (lambda folder: write_parquet(folder, other=LABELS, images=LABELS), "its pixels must be uint8, or floats from"),
        (lambda folder: write_parquet(folder, images=[[0.5] * 20] * 6), r"an array of shape \(20,\) is not an image"),
        (lambda folder: write_parquet(folder, labels=["a", "b"] * 3), "labels are string, but must be whole numbers"),
        (lambda folder: write_parquet(folder, labels=[-1, 0] * 3), "a.parquet: .*whole numbers from 0 .*, not -1"),
        (lambda folder: write_parquet(folder, labels=[0, 1, None] * 2), "a.parquet: .*whole numbers .*, not None"),
        (lambda folder: write_parquet(folder, labels=[0, 100_000] * 3), "a.parquet: .*without large gaps, not 100000"),
        (lambda folder: write_parquet(folder, images=pa.array([], pa.binary()), labels=pa.array([], pa.int64())),
         "no rows"),
        (lambda folder: write_parquet(folder, labels=[0] * 6), "train: only one label: 0"),
        (other_labels, "val has labels that .*train lacks: 6, 7"),
        (one_without_pictures, "one of .*train and .*val has Parquet files, and the other has pictures"),
    ],
)  # fmt: skip
def test_anything_else_is_told(write, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        ray_images.inspect_dataset(write(tmp_path))


def test_a_column_that_is_missing(tmp_path):
    uri = write_parquet(tmp_path)
    parquet.write_table(pa.table({"pixels": [1], "label": [0]}), tmp_path / "train/a.parquet")
    with pytest.raises(ValueError, match="no column image, only pixels, label"):
        ray_images.inspect_dataset(uri)


def test_an_empty_file_and_a_first_picture_of_another_kind(tmp_path):
    """Spark writes the one, and in many data sets some pictures are gray."""
    uri = write_parquet(tmp_path, [png(image) for image in COLORED])
    table = parquet.read_table(tmp_path / "train")
    parquet.write_table(table.slice(0, 0), tmp_path / "train/a-0.parquet")
    gray_first = pa.table({"image": [png(PIXELS[0]), png(COLORED[1])], "label": [0, 1]})
    parquet.write_table(gray_first, tmp_path / "val/a.parquet")
    sets = ray_images.inspect_dataset(uri)
    assert sets["train"].num_samples == 6 and sets["val"].image_shape == (3, 4, 5)
    read = sets["val"](as_batch(tmp_path / "val"))
    assert np.allclose(read["image"][0], 2 * np.stack([FLOATS[0]] * 3) - 1)


def test_a_picture_turned_by_the_camera(tmp_path):
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6  # stored on its side
    Image.fromarray(PIXELS[0]).save(file, "PNG", exif=exif)
    uri = write_parquet(tmp_path, [file.getvalue()] * 6)
    sets = ray_images.inspect_dataset(uri)
    read = sets["train"](as_batch(tmp_path / "train"))
    assert np.allclose(read["image"][0, 0], 2 * np.rot90(FLOATS[0], -1) - 1)


def test_other_images_for_validation(tmp_path):
    write_pictures(tmp_path, parts=("train",))
    write_pictures(tmp_path, parts=("val",), images=PIXELS[:, :3])
    with pytest.raises(ValueError, match=re.escape("are (1, 4, 5) for training and (1, 3, 5) in val")):
        ray_images.inspect_dataset(str(tmp_path))


# --- one file or one image among good ones ---------------------------------------------------------------------------


def damage_page(path: Path, column: str) -> None:
    """Overwrite the data pages of a column. The file's footer stays as it is."""
    group = parquet.ParquetFile(path).metadata.row_group(0)
    (chunk,) = (group.column(each) for each in range(2) if group.column(each).path_in_schema == column)
    content, length = bytearray(path.read_bytes()), chunk.total_compressed_size
    start = chunk.data_page_offset if chunk.dictionary_page_offset is None else chunk.dictionary_page_offset
    content[start : start + length] = b"\xff" * length
    path.write_bytes(content)


def footer(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-60] + b"\xff" * 52 + path.read_bytes()[-8:])


def table(images=None, labels=(0, 1), names=("image", "label")) -> Callable[[Path], None]:
    """Write another table into the file."""
    images = [png(image) for image in PIXELS[:2]] if images is None else images
    columns = [pa.array(column) for column in (images, labels, labels)]
    return lambda path: parquet.write_table(pa.Table.from_arrays(columns[: len(names)], names), path)


@pytest.mark.parametrize("part", ["train", "val"])
@pytest.mark.parametrize(("change", "words"), [
    (lambda path: path.write_bytes(b""), "file size is 0 bytes"),
    (lambda path: path.write_bytes(path.read_bytes()[:200]), "Parquet magic bytes not found"),
    (lambda path: path.write_text("label,image\n" * 9), "Parquet magic bytes not found"),
    (footer, "thrift"),
    (lambda path: damage_page(path, "label"), "thrift"),
    (lambda path: parquet.write_table(pa.table({"label": [0, 1]}), path), "no column image, only label"),
    (lambda path: parquet.write_table(pa.table({"image": [b"a"]}), path), "no column label, only image"),
    (table(names=("image", "label", "label")), "more than one column label"),
    (table(labels=["0", "1"]), "the labels are string, but must be whole numbers from 0"),
    (table(labels=[0.0, 1.0]), "the labels are double, but must be whole numbers from 0"),
    (table(labels=[0, None]), "the labels must be whole numbers from 0 .*, not None"),
    (table(labels=[0, -1]), "the labels must be whole numbers from 0 .*, not -1"),
    (table(labels=[0, 1000]), "the labels must be whole numbers from 0 without large gaps, not 1000"),
    (table(["a", "b"]), "the images are string, and those of .*a.parquet are binary"),
    (table([{"bytes": b"a"}] * 2), "the images are struct<bytes: binary>, and those of"),
    (table([[[1, 2]]] * 2), "the images are list<.*: list<.*: int64>>, and those of"),
])  # fmt: skip
def test_one_file_that_cannot_be_used_is_named(part, change, words, tmp_path):
    uri = write_parquet(tmp_path)
    change(tmp_path / part / "b.parquet")
    with pytest.raises(ValueError, match=f"^cannot use {tmp_path}/{part}/b.parquet: .*{words}"):
        ray_images.inspect_dataset(uri)


def test_files_whose_types_differ_in_width_are_one_set(tmp_path):
    uri = write_parquet(tmp_path)
    table(pa.array([png(PIXELS[0])] * 2, pa.large_binary()), pa.array([0, 1], pa.int8()))(tmp_path / "train/b.parquet")
    assert ray_images.inspect_dataset(uri)["train"].num_samples == 6


def encoded(mode: str, size: tuple[int, int] = (5, 4), kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    colors = Image.fromarray(COLORED[0]).resize(size)
    picture = Image.fromarray(np.full((4, 5), 40_000, np.uint16)) if mode == "I;16" else colors.convert(mode)
    picture.save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("others", ["L", "RGB"])
@pytest.mark.parametrize("image", [
    encoded("1"), encoded("L"), encoded("LA"), encoded("P"), encoded("RGB"), encoded("RGBA"),
    encoded("CMYK", kind="JPEG"), encoded("CMYK", kind="TIFF"),
])  # fmt: skip
def test_a_picture_of_another_mode_gets_the_channels_of_the_first(image, others, tmp_path):
    uri = write_parquet(tmp_path, [*[encoded(others)] * 5, image])
    read = ray_images.inspect_dataset(uri)["train"](as_batch(tmp_path / "train"))
    assert read["image"].shape == (6, {"L": 1, "RGB": 3}[others], 4, 5) and np.abs(read["image"]).max() <= 1


@pytest.mark.parametrize(("image", "words"), [
    (b"no picture", "cannot use an image of PATH: cannot identify image file"),
    (b"", "cannot use an image of PATH: cannot identify image file"),
    (encoded("RGB")[:80], "cannot use an image of PATH: "),
    (None, "cannot use an image of PATH: it is missing"),
    (encoded("I;16"), "cannot use an image of PATH: a picture of mode I;16 has more than 8 bits per channel"),
    (encoded("L", size=(6, 4)), r"PATH has .* \(1, 4, 6\), but the first image of"),
])  # fmt: skip
@pytest.mark.parametrize("as_struct", [False, True])
def test_one_image_that_cannot_be_used_names_its_file(image, words, as_struct, tmp_path):
    images = [*[encoded("L")] * 5, image]
    uri = write_parquet(tmp_path, [{"bytes": each} for each in images] if as_struct else images)
    images = ray_images.inspect_dataset(uri)["train"]
    with pytest.raises(ValueError, match="^" + words.replace("PATH", f"{tmp_path}/train/a.parquet")):
        images(as_batch(tmp_path / "train"))


def test_a_picture_that_is_only_a_path_is_named(tmp_path):
    rows = [*[{"bytes": encoded("L"), "path": None}] * 5, {"bytes": None, "path": "a/cat.png"}]
    images = ray_images.inspect_dataset(write_parquet(tmp_path, rows))["train"]
    with pytest.raises(ValueError, match=r"it is only a path, a/cat.png: write the picture's bytes beside it"):
        images(as_batch(tmp_path / "train"))


@pytest.mark.parametrize("value", [255.0, -0.1, float("nan"), float("inf")])
def test_one_array_that_is_out_of_range_names_its_file(value, tmp_path):
    """It would train a worse model, or one of NaN."""
    floats = FLOATS.copy()
    floats[5, 0, 0] = value
    images = ray_images.inspect_dataset(write_parquet(tmp_path, ArrowTensorArray.from_numpy(floats)))["train"]
    with pytest.raises(
        ValueError, match=r"^cannot use an image of .*a.parquet: its pixels must be uint8, or floats from"
    ):
        images(as_batch(tmp_path / "train"))


def broken_stream(images: ray_images.ImageSet, cause: Exception) -> ray_images.Stream:
    """A stream whose second batch Ray Data could not read."""

    def batches():
        yield {"image": torch.zeros(2, 1, 4, 5), "label": torch.tensor([0, 1])}
        raise RayTaskError("ReadParquet", f"Traceback\n{type(cause).__name__}: {cause}", cause).as_instanceof_cause()

    return ray_images.Stream(batches(), images, torch.device("cpu"))


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize(
    "cause", [OSError("Couldn't read\na page"), pa.ArrowInvalid("corrupt"), pa.ArrowTypeError("x")]
)
def test_a_damaged_page_ends_the_stream_and_names_its_file(cause, scheme, tmp_path):
    """A rank that raised in the middle of an epoch would leave the others in their next all-reduce."""
    images = ray_images.inspect_dataset(scheme + write_parquet(tmp_path))["train"]
    damage_page(tmp_path / "train/b.parquet", "image")
    stream = broken_stream(images, cause)
    assert len(list(stream)) == 1
    with pytest.raises(ValueError, match=rf"^{tmp_path}/train/b.parquet is damaged \(.*\): copy it or write it again$"):
        stream.check()


def test_storage_that_is_away_is_no_damaged_file(tmp_path):
    """Ray Train tries such a run again."""
    images = ray_images.inspect_dataset(write_parquet(tmp_path))["train"]
    stream = broken_stream(images, OSError("Connection reset\nby peer"))
    assert len(list(stream)) == 1
    with pytest.raises(OSError, match=r"^cannot read .*train: Connection reset$"):
        stream.check()
