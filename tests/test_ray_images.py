"""Images of one's own for Ray Data: what is read, and what is said of anything else."""

import io
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from ray.data.extensions import ArrowTensorArray

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


COLOURED = np.stack([PIXELS, PIXELS // 2, PIXELS // 3], axis=-1)
FLOATS = (PIXELS / 255).astype(np.float32)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        ([png(image) for image in PIXELS], FLOATS[:, None]),
        ([{"bytes": png(image), "path": "a.png"} for image in COLOURED], np.moveaxis(COLOURED, -1, 1) / 255),
        (ArrowTensorArray.from_numpy(PIXELS), FLOATS[:, None]),
        (ArrowTensorArray.from_numpy(COLOURED), np.moveaxis(COLOURED, -1, 1) / 255),
        (ArrowTensorArray.from_numpy(np.moveaxis(COLOURED, -1, 1).copy()), np.moveaxis(COLOURED, -1, 1) / 255),
        (ArrowTensorArray.from_numpy(FLOATS), FLOATS[:, None]),
        (pa.array(PIXELS.tolist(), pa.list_(pa.list_(pa.uint8()))), FLOATS[:, None]),
    ],
    ids=["encoded", "as Hugging Face", "uint8", "colours last", "colours first", "floats", "lists"],
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
    grey_and_coloured = [png(image) for image in (*PIXELS[:3], *COLOURED[:3, :3])]
    uri = write_parquet(tmp_path, grey_and_coloured)
    read = ray_images.inspect_dataset(uri, image_size=8)["train"](as_batch(tmp_path / "train"))
    assert read["image"].shape == (6, 1, 8, 8)  # grey, as the first one
    other_size = ray_images.inspect_dataset(uri)["train"]
    words = r"a.parquet is of .*\(1, 3, 5\), and the first image of .*train of \(1, 4, 5\): --image-size resizes"
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
        (unreadable, "cannot use .*train: .*Parquet magic bytes not found"),
        (unreadable_picture, "cannot use the first image of .*0.png: cannot identify image file"),
        (lambda folder: write_parquet(folder, other=LABELS, images=LABELS), "its pixels must be uint8, or floats from"),
        (lambda folder: write_parquet(folder, images=[[0.5] * 20] * 6), r"an array of shape \(20,\) is not an image"),
        (lambda folder: write_parquet(folder, labels=["a", "b"] * 3), "labels are string, and must be whole numbers"),
        (lambda folder: write_parquet(folder, labels=[-1, 0] * 3), "whole numbers from 0 .* there are (0, -1|-1, 0)"),
        (lambda folder: write_parquet(folder, labels=[0, 1, None] * 2), "whole numbers from 0 .*None"),
        (lambda folder: write_parquet(folder, labels=[0, 100_000] * 3), "without large gaps; there are 0, 100000"),
        (lambda folder: write_parquet(folder, images=pa.array([], pa.binary()), labels=pa.array([], pa.int64())),
         "no rows"),
        (lambda folder: write_parquet(folder, labels=[0] * 6), "train: one label only: 0"),
        (other_labels, "val has labels that .*train lacks: 6, 7"),
        (one_without_pictures, "one of .*train and .*val has Parquet files and the other one pictures"),
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
    """Spark writes the one, and in many data sets some pictures are grey."""
    uri = write_parquet(tmp_path, [png(image) for image in COLOURED])
    table = parquet.read_table(tmp_path / "train")
    parquet.write_table(table.slice(0, 0), tmp_path / "train/a-0.parquet")
    grey_first = pa.table({"image": [png(PIXELS[0]), png(COLOURED[1])], "label": [0, 1]})
    parquet.write_table(grey_first, tmp_path / "val/a.parquet")
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
