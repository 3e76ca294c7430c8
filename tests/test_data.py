"""shared.data: the splits, the loaders and how samples are dealt to ranks."""

import gzip
import itertools
import random
import struct
from argparse import Namespace
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from pyarrow import parquet
from small_runs import idx_bytes
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from torchvision.datasets import mnist as torchvision_mnist

import ray_images
from shared import datasets, models, sampling, tasks
from shared.distributed import Worker
from shared.errors import UsageError
from shared.running.progress import Progress

# --- digits and synthetic --------------------------------------------------------------------------------------------


def rows(*sets: TensorDataset) -> list[tuple]:
    """Every sample as (its pixels, its label), sorted: two collections hold the same samples iff these are equal."""
    return sorted((*image.flatten().tolist(), label.item()) for part in sets for image, label in part)


def test_digits_are_split_into_1280_256_261_and_every_image_is_in_exactly_one_part():
    from sklearn.datasets import load_digits

    splits, raw = datasets.digits(), load_digits()
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [1280, 256, 261]
    everything = TensorDataset(datasets.normalize(torch.from_numpy(raw.images), 16), torch.from_numpy(raw.target))
    assert rows(splits.train, splits.val, splits.test) == rows(everything)


def test_digits_are_floats_in_minus_one_to_one_with_labels_0_to_9():
    splits = datasets.load("digits")
    for part in (splits.train, splits.val, splits.test):
        images, labels = part.tensors
        assert images.dtype == torch.float32 and images.shape[1:] == (1, 8, 8)
        assert (images.min(), images.max()) == (-1, 1)
        assert labels.dtype == torch.int64 and set(labels.tolist()) == set(range(10))
    assert splits.image_shape == (1, 8, 8)
    assert splits.classes == tuple("0123456789")


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_loading_again_gives_the_same_and_leaves_the_generators_alone(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = datasets.load(name)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = datasets.load(name)
    for part in ("train", "val", "test"):
        for one, other in zip(getattr(first, part).tensors, getattr(second, part).tensors, strict=True):
            assert torch.equal(one, other)


def test_synthetic_has_the_sizes_asked_for():
    splits = datasets.synthetic(size=50, image_shape=(3, 4, 6), num_classes=4)
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [50, 5, 5]
    assert splits.image_shape == (3, 4, 6)
    assert splits.classes == ("0", "1", "2", "3")
    assert set(splits.train.tensors[1].tolist()) == {0, 1, 2, 3}
    assert not torch.equal(splits.val.tensors[0], splits.test.tensors[0])


def test_an_unknown_data_set_is_refused_with_the_known_names():
    with pytest.raises(
        ValueError, match="unknown data set 'cifar'; use one of digits, mnist, fashion_mnist, synthetic"
    ):
        datasets.load("cifar")


# --- MNIST and Fashion-MNIST -----------------------------------------------------------------------------------------


def write_mnist(data_dir, folder="MNIST", num_train=36, num_test=5):
    """The four files as a user would copy them; returns what is in them. Image i holds only the value 7 * i."""
    raw = data_dir / folder / "raw"
    raw.mkdir(parents=True)
    written = {}
    for prefix, count in (("train", num_train), ("t10k", num_test)):
        images = (7 * torch.arange(count, dtype=torch.uint8)).view(-1, 1, 1).expand(count, 28, 28)
        labels = torch.arange(count, dtype=torch.uint8) % 10
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
        written[prefix] = (images, labels.long())
    return written


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """No test may download, and every one sees what a machine without a network sees."""

    def refuse(url, *args, **kwargs):
        raise URLError("Temporary failure in name resolution")

    monkeypatch.setattr(torchvision_mnist, "download_and_extract_archive", refuse)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_files_in_mnists_own_format_are_read_normalized_and_split(tmp_path, name, folder):
    written = write_mnist(tmp_path, folder)
    splits = datasets.load(name, tmp_path)
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [33, 3, 5]  # a twelfth is validation
    assert splits.image_shape == (1, 28, 28) and len(splits.classes) == 10
    for parts, prefix in (((splits.train, splits.val), "train"), ((splits.test,), "t10k")):
        images, labels = written[prefix]
        assert rows(*parts) == rows(TensorDataset((images.unsqueeze(1) / 255 - 0.5) / 0.5, labels))
    assert splits.train.tensors[0].dtype == torch.float32
    assert rows(datasets.load(name, tmp_path).val) == rows(splits.val)  # the split is a fixed one


def test_the_split_of_60000_is_55000_and_5000(tmp_path, monkeypatch):
    class SixtyThousand:
        classes = tuple("0123456789")

        def __init__(self, root, train, download):
            count = 60_000 if train else 10_000
            self.data, self.targets = torch.zeros(count, 2, 2, dtype=torch.uint8), torch.zeros(count)

    monkeypatch.setattr("torchvision.datasets.MNIST", SixtyThousand)
    splits = datasets.load("mnist", tmp_path)
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [55_000, 5_000, 10_000]


def expect_help(tmp_path, name="mnist", folder="MNIST") -> str:
    """`load` fails with one line that says where the files belong and what needs no download; returns the line."""
    with pytest.raises((ValueError, OSError)) as caught:
        datasets.load(name, tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"cannot get {name} (")
    assert str(tmp_path / folder / "raw") in message
    assert "--dataset digits" in message
    return message


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_without_a_network_the_error_says_what_to_do(tmp_path, name, folder):
    assert "Error downloading train-images-idx3-ubyte.gz" in expect_help(tmp_path, name, folder)


def test_a_data_dir_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "MNIST").write_text("in the way")
    expect_help(tmp_path)


DAMAGE = {
    "empty": lambda good: b"",
    "cut in the header": lambda good: good[:10],
    "cut in the data": lambda good: good[:-1],
    "too long": lambda good: good + b"\0",
    "another type of numbers": lambda good: good[:2] + b"\x0d" + good[3:],
    "a type that does not exist": lambda good: good[:2] + b"\x0a" + good[3:],
    "a web page instead": lambda good: b"<!DOCTYPE html><html>not found</html>",
    "still compressed": gzip.compress,
    "one sample fewer": lambda good: good[:4] + struct.pack(">I", 35) + good[8 : -(len(good) // 36)],
}


@pytest.mark.parametrize("file", ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_clear_error(tmp_path, file, damage):
    write_mnist(tmp_path)
    path = tmp_path / "MNIST" / "raw" / file
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    expect_help(tmp_path)


def test_a_label_that_no_class_has_is_a_clear_error(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(torch.full((5,), 200).byte()))
    expect_help(tmp_path)


# --- the sampler -----------------------------------------------------------------------------------------------------


def samplers(num_samples: int, world_size: int, epoch: int = 0, shuffle: bool = True, seed: int = 3) -> list:
    """One sampler a rank."""
    dataset = TensorDataset(torch.arange(num_samples))
    dealt = []
    for rank in range(world_size):
        sampler = sampling.UnpaddedDistributedSampler(dataset, world_size, rank, shuffle=shuffle, seed=seed)
        sampler.set_epoch(epoch)
        dealt.append(sampler)
    return dealt


def global_batches(shards: list[list[int]], local_batch_size: int) -> list[set[int]]:
    """The samples that all ranks together take at each step."""
    num_steps = max(-(-len(shard) // local_batch_size) for shard in shards)
    cuts = [slice(step * local_batch_size, (step + 1) * local_batch_size) for step in range(num_steps)]
    return [set().union(*(shard[cut] for shard in shards)) for cut in cuts]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_goes_to_exactly_one_rank(world_size, shuffle):
    for num_samples in (*range(world_size, 40), 261, 1280, 1437):
        ranks = samplers(num_samples, world_size, shuffle=shuffle)
        shards = [list(sampler) for sampler in ranks]
        assert sorted(itertools.chain(*shards)) == list(range(num_samples))
        assert [len(shard) for shard in shards] == [len(sampler) for sampler in ranks]
        assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_where_nothing_needs_padding_it_deals_as_torch_does(world_size):
    dataset = TensorDataset(torch.arange(64))
    for epoch in range(3):
        for rank, sampler in enumerate(samplers(64, world_size, epoch)):
            torchs = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=3)
            torchs.set_epoch(epoch)
            assert list(sampler) == list(torchs)


@pytest.mark.parametrize("num_samples", [16, 17, 19, 64, 67, 261])
@pytest.mark.parametrize("epoch", [0, 1])
def test_the_kth_global_batch_is_the_same_set_at_every_world_size(num_samples, epoch):
    by_one = global_batches([list(sampler) for sampler in samplers(num_samples, 1, epoch)], 8)
    assert [len(batch) for batch in by_one] == sampling.global_batch_counts(num_samples, 8)
    for world_size in (2, 4, 8):
        shards = [list(sampler) for sampler in samplers(num_samples, world_size, epoch)]
        assert global_batches(shards, 8 // world_size) == by_one  # the uneven last one too


def test_another_epoch_or_seed_is_another_order_and_the_same_ones_repeat_it():
    def order(**how):
        return list(samplers(50, 1, **how)[0])

    assert order(epoch=1) == order(epoch=1)
    assert order(epoch=1) != order(epoch=0)
    assert order(seed=4) != order(seed=3)
    assert order(shuffle=False) == list(range(50))


@pytest.mark.parametrize("num_samples", [16, 37, 64])
@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_run_resumes_in_the_middle_of_an_epoch_at_any_world_size(num_samples, before, after):
    whole = global_batches([list(sampler) for sampler in samplers(num_samples, before, epoch=2)], 8 // before)
    for steps_taken in range(len(whole) + 1):
        position = sum(map(len, whole[:steps_taken]))
        ranks = samplers(num_samples, after, epoch=2)
        for sampler in ranks:
            sampler.set_position(position)
        lengths = [len(sampler) for sampler in ranks]
        shards = [list(sampler) for sampler in ranks]
        assert lengths == [len(shard) for shard in shards]
        assert global_batches(shards, 8 // after) == whole[steps_taken:]
        assert sum(lengths) == num_samples - position


def test_an_epoch_in_parts_has_the_same_batches_and_draws_no_random_numbers():
    """Each part ends at a multiple of --save-every-steps, at --max-steps, or where the epoch does."""
    dataset = TensorDataset(torch.arange(22))
    loader = sampling.rank_loader(dataset, 2, Worker(rank=1, world_size=2), shuffle_seed=3)

    def progress_at(step: int, epoch: int, **limits: object) -> Progress:
        progress = Progress(Worker(), 22, {}, batch_size=4, epochs=9, quiet=True, **limits)
        progress.load_state_dict({**progress.state_dict(), "step": step, "epoch": epoch})
        return progress

    torch.manual_seed(1)
    before = torch.get_rng_state()

    def part(progress: Progress) -> tuple[list[int], list[list[int]]]:
        counts, batches, last = [], [], []
        for count, (numbers,) in sampling.deal_batches(
            loader, progress.epoch, progress.position, progress.start_steps()
        ):
            counts.append(count), batches.append(numbers.tolist()), last.append(progress.in_last_step)
            progress.add_step(torch.tensor(1.0), count)
        assert last == [False] * (len(counts) - 1) + [True]
        return counts, batches

    counts, whole = part(progress_at(7, 1))
    assert counts == [4, 4, 4, 4, 4, 2] and len(whole) == 6
    progress, lengths, parts = progress_at(7, 1, stop_every=[4, None], max_steps=20), [], []
    while progress.position < 22:
        counts, batches = part(progress)
        parts += batches
        lengths.append(len(counts))
        progress.record_steps([1.0] * len(counts), counts, 1.0)
    assert (parts, lengths) == (whole, [1, 4, 1])  # steps 8, 9 to 12, 13
    assert part(progress_at(13, 2, max_steps=15))[0] == [4, 4]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_position_holds_for_one_iteration():
    (sampler,) = samplers(10, 1, shuffle=False)
    sampler.set_position(7)
    assert len(sampler) == 3 and list(sampler) == [7, 8, 9]
    assert len(sampler) == 10 and list(sampler) == list(range(10))


def test_fewer_samples_than_ranks_leave_some_ranks_without_one():
    """A small validation set. Training data that are too few are refused (`tasks.Task.check_sizes`)."""
    samplers = [
        sampling.UnpaddedDistributedSampler(TensorDataset(torch.arange(3)), 5, rank, False) for rank in range(5)
    ]
    assert [list(sampler) for sampler in samplers] == [[0], [1], [2], [], []]
    assert [len(sampler) for sampler in samplers] == [1, 1, 1, 0, 0]


# --- batches ---------------------------------------------------------------------------------------------------------


def batches_of_all_ranks(num_samples: int, world_size: int, batch_size: int, position: int = 0) -> list[list]:
    """Each rank's batches of (images, labels), as a training script makes them."""
    dataset = TensorDataset(torch.randn(num_samples, 1, 4, 4), torch.arange(num_samples))
    num_steps = len(sampling.global_batch_counts(num_samples - position, batch_size))
    dealt = []
    for rank in range(world_size):
        sampler = sampling.UnpaddedDistributedSampler(dataset, world_size, rank)
        sampler.set_position(position)
        loader = DataLoader(dataset, sampling.local_batch_size(batch_size, world_size), sampler=sampler)
        dealt.append(list(sampling.even_batches(loader, num_steps)))
    return dealt


@pytest.mark.parametrize(("num_samples", "world_size", "batch_size"), [
    (16, 4, 8), (17, 4, 8), (18, 4, 8), (19, 4, 8), (20, 4, 8), (9, 4, 4), (5, 4, 64), (7, 2, 2), (7, 1, 3),
])  # fmt: skip
def test_every_rank_takes_as_many_batches_and_no_sample_is_lost(num_samples, world_size, batch_size):
    dealt = batches_of_all_ranks(num_samples, world_size, batch_size)
    counts = sampling.global_batch_counts(num_samples, batch_size)
    assert [len(batches) for batches in dealt] == [len(counts)] * world_size
    for step, count in enumerate(counts):
        assert sum(len(batches[step][1]) for batches in dealt) == count
    assert sorted(label for batches in dealt for _, labels in batches for label in labels.tolist()) == list(
        range(num_samples)
    )


def test_a_rank_without_any_batch_gets_empty_ones_that_a_model_takes():
    # 16 of 17 samples are done: one is left, for rank 0, and the other three have an empty loader.
    for rank, batches in enumerate(batches_of_all_ranks(17, 4, 8, position=16)):
        ((images, labels),) = batches
        assert images.shape == (1 if rank == 0 else 0, 1, 4, 4) and images.dtype == torch.float32
        assert labels.shape == images.shape[:1] and labels.dtype == torch.int64


def test_an_empty_batch_has_a_gradient_of_zero():
    model = models.resnet18()
    F.cross_entropy(model(torch.empty(0, 1, 8, 8)), torch.empty(0, dtype=torch.int64), reduction="sum").backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


@pytest.mark.parametrize(("global_batch_size", "world_size"), [(64, 1), (64, 2), (64, 4), (6, 3), (4, 4)])
def test_a_global_batch_is_divided(global_batch_size, world_size):
    assert sampling.local_batch_size(global_batch_size, world_size) * world_size == global_batch_size


@pytest.mark.parametrize(("global_batch_size", "world_size", "advice"), [
    (130, 4, "use 128 or 132"), (65, 2, "use 64 or 66"), (2, 4, "use 4"), (9, 8, "use 8 or 16"),
])  # fmt: skip
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(global_batch_size, world_size, advice):
    with pytest.raises(ValueError) as caught:
        sampling.local_batch_size(global_batch_size, world_size)
    assert str(caught.value) == f"global batch {global_batch_size} is not divisible by {world_size} ranks; {advice}"


def test_a_batch_for_a_world_that_grows_divides_by_all_sizes():
    sampling.check_divisible(64, 1, most=2), sampling.check_divisible(60, 2, most=6)
    with pytest.raises(ValueError, match=r"64 is not divisible by every number of ranks from 1 to 3; use 60 or 66$"):
        sampling.check_divisible(64, 1, most=3)
    with pytest.raises(ValueError, match=r"ranks from 2 to 16; use 720720$"):
        sampling.check_divisible(64, 2, most=16)


def test_global_batch_counts_add_up_to_the_samples():
    assert sampling.global_batch_counts(1280, 64) == [64] * 20
    assert sampling.global_batch_counts(130, 64) == [64, 64, 2]
    assert sampling.global_batch_counts(5, 64) == [5]
    assert sampling.global_batch_counts(0, 64) == []
    for num_samples in range(1, 60):
        for batch_size in range(1, 20):
            counts = sampling.global_batch_counts(num_samples, batch_size)
            assert sum(counts) == num_samples
            assert set(counts[:-1]) <= {batch_size} and 1 <= counts[-1] <= batch_size


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "world_size"), [(1280, 64, 4), (1280, 64, 32), (65, 64, 1), (67, 64, 2)]
)
def test_batch_norm_is_refused_exactly_where_a_rank_would_get_a_single_sample(num_samples, batch_size, world_size):
    fewest = min(
        len(labels) for batches in batches_of_all_ranks(num_samples, world_size, batch_size) for _, labels in batches
    )

    def check(model: str) -> None:
        args = Namespace(model=model, batch_size=batch_size, precision="fp32")
        splits = datasets.Splits(*[TensorDataset(torch.zeros(num_samples))] * 3, classes=("0", "1"))
        tasks.ImageTask(args, splits, torch.device("cpu")).check_sizes(world_size)

    check("resnet18")  # GroupNorm takes anything
    if fewest >= 2:
        check("resnet18-batchnorm")
    else:
        with pytest.raises(ValueError, match=f"leave {fewest}; use a different --batch-size or --model resnet18"):
            check("resnet18-batchnorm")


class OnDisk(Dataset):
    """Samples that are read one by one, as images too large for memory are."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.full((2, 3), float(number)), number % 2


class OwnTask(tasks.ImageTask):
    dataset_names = ("own",)

    @staticmethod
    def load(args: Namespace) -> datasets.Splits:
        return datasets.Splits(OnDisk(), OnDisk(), OnDisk(), classes=("even", "odd"))


def test_a_task_of_ones_own_may_read_its_samples_one_by_one():
    args = Namespace(dataset="own", model="mlp", batch_size=4, precision="fp64")
    task = tasks.build((OwnTask,), args, Worker())
    inputs, targets = task.to_device(sampling.empty_batch(task.splits.train))
    assert inputs.shape == (0, 2, 3) and inputs.dtype == torch.float64 and targets.shape == (0,)
    loader = sampling.rank_loader(task.splits.train, 4, Worker(), shuffle_seed=0)
    batches = sampling.deal_batches(loader, 0, 0, counts=[4, 4, 2])
    seen = [number for _, (images, _) in batches for number in images[:, 0, 0].tolist()]
    assert sorted(seen) == list(range(10))


def test_training_data_that_are_too_few_for_the_ranks_are_refused():
    args = Namespace(dataset="own", model="mlp", batch_size=12, precision="fp32")
    with pytest.raises(UsageError, match="10 samples cannot be dealt to 12 ranks; use fewer ranks"):
        tasks.build((OwnTask,), args, Worker(world_size=12))


def test_the_checksum_of_a_text_tells_apart_files_that_differ_only_at_their_end(tmp_path):
    text = bytes(range(256)) * 200
    checksums = []
    for end in (b"", bytes(4000)):  # over 5 % of the file: of the validation and the test windows
        path = tmp_path / "text.txt"
        path.write_bytes(text[: len(text) - len(end)] + end)
        args = Namespace(preset="nano", text_file=path, precision="fp32")
        checksums.append(tasks.TextTask(args, tasks.TextTask.load(args), torch.device("cpu")).checksum())
    assert checksums[0] != checksums[1]


def test_the_checksum_of_images_is_that_of_their_labels_and_their_number():
    """The pixels are floats, which CPUs may compute differently in the last digit."""

    def checksum(labels: list[int], pixel: float, dataset: object = None) -> int:
        part = dataset or TensorDataset(torch.full((len(labels), 1, 2, 2), pixel), torch.tensor(labels))
        splits = datasets.Splits(part, part, part, ("a", "b"))
        return tasks.ImageTask(Namespace(precision="fp32"), splits, torch.device("cpu")).checksum()

    first = checksum([0, 1, 0], 0.5)
    assert first == checksum([0, 1, 0], 0.50001) != 0
    assert len({first, checksum([0, 0, 1], 0.5), checksum([0, 1, 0, 1], 0.5)}) == 3
    assert checksum([], 0, range(3)) != checksum([], 0, range(4))  # a data set of your own, without tensors


# --- Parquet for Ray Data --------------------------------------------------------------------------------------------


def rows_of(folder: str) -> tuple[list[int], torch.Tensor, list[int]]:
    tables = [parquet.read_table(path) for path in sorted(Path(folder).glob("*.parquet"))]
    columns = pa.concat_tables(tables).to_pydict()
    return columns["id"], torch.tensor(columns["image"]), columns["label"]


@pytest.mark.parametrize("as_uri", [False, True])
def test_parquet_holds_every_sample_once(as_uri, tmp_path):
    dataset = datasets.digits().val
    place = f"file://{tmp_path}/val" if as_uri else str(tmp_path / "val")
    folder = ray_images.write_parquet(dataset, place, num_files=3)
    ids, images, labels = rows_of(folder.removeprefix("file://"))
    assert ids == list(range(256)) and labels == dataset.tensors[1].tolist()
    assert torch.equal((images - 0.5) / 0.5, dataset.tensors[0].flatten(1))
    assert len(list(Path(folder.removeprefix("file://")).glob("*.parquet"))) == 3


def test_parquet_is_written_once_and_other_data_elsewhere(tmp_path):
    images, labels = datasets.digits().val.tensors
    folder = ray_images.write_parquet(TensorDataset(images, labels), str(tmp_path))
    written = {path: path.stat().st_mtime_ns for path in Path(folder).iterdir()}
    assert ray_images.write_parquet(TensorDataset(images, labels), str(tmp_path)) == folder
    others = [
        ray_images.write_parquet(TensorDataset(images[:-1], labels[:-1]), str(tmp_path)),
        ray_images.write_parquet(TensorDataset(images + 1e-3, labels), str(tmp_path)),
        ray_images.write_parquet(TensorDataset(images, labels.flip(0)), str(tmp_path)),
    ]
    assert len({folder, *others}) == 4
    assert {path: path.stat().st_mtime_ns for path in Path(folder).iterdir()} == written


def test_parquet_that_was_not_finished_is_written_again(tmp_path):
    folder = Path(ray_images.write_parquet(datasets.digits().val, str(tmp_path)))
    (folder / "_SUCCESS").unlink()
    (folder / "part-000.parquet").write_bytes(b"half of it")
    assert ray_images.write_parquet(datasets.digits().val, str(tmp_path)) == str(folder)
    assert rows_of(str(folder))[0] == list(range(256))


class Draws(Dataset):
    """Six samples, each what it draws from the three generators in common use."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()]),)


def test_what_a_data_set_draws_in_a_loaders_processes():
    """It differs between ranks, epochs and seeds, and an epoch draws the same in a run that begins with it."""

    def drawn(rank: int, epochs: list[int], seed: int = 7) -> list[list]:
        loader = sampling.rank_loader(Draws(), 1, Worker(rank, rank, 2), shuffle_seed=seed, loader_processes=1)
        return [[each.tolist() for _, (each,) in sampling.deal_batches(loader, epoch, 0, [2] * 3)] for epoch in epochs]

    first, second = drawn(0, [0, 1])
    assert drawn(0, [1]) == [second] and drawn(0, [0]) == [first]
    epochs = [first, second, *drawn(1, [0]), *drawn(0, [0], seed=8)]
    for column in range(3):
        numbers = [each[0][column] for epoch in epochs for each in epoch]
        assert len(set(numbers)) == len(numbers) == 12
