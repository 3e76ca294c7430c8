"""How samples are dealt to the ranks: each to exactly one, in the same global batches for every world size."""

import math
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from shared.distributed import Worker


class UnpaddedDistributedSampler(DistributedSampler):
    """torch's DistributedSampler without its padding: every sample goes to exactly one rank.

    Rank r of W gets elements r, r + W, r + 2W ... of the epoch's permutation, so the k-th global batch is the same set
    of samples for every W that divides the batch size. DistributedSampler repeats samples until all ranks have equally
    many; here the ranks differ by at most one sample (see `even_batches`).

    `set_position(samples)` starts the next iteration after that many samples of the whole epoch, over all ranks: how a
    run resumes in the middle of an epoch, even at a different world size. It holds for one iteration.
    """

    def __init__(self, dataset: Dataset, num_replicas: int, rank: int, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=shuffle, seed=seed)
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
    dataset: Dataset, batch_size: int, worker: Worker, shuffle_seed: int | None = None, loader_processes: int = 0
) -> DataLoader:
    """This rank's part of `dataset` in batches of `batch_size`: every sample goes to exactly one rank.

    shuffle_seed: shuffle with it, differently each epoch and alike on all ranks; None: keep the data set's order.
    loader_processes: how many prepare this rank's batches.
    """
    shuffle = shuffle_seed is not None
    sampler = UnpaddedDistributedSampler(dataset, worker.world_size, worker.rank, shuffle, shuffle_seed or 0)
    # Each pass over a loader draws a seed, for worker processes. From the generator that dropout uses, it would make
    # dropout depend on how often a run is saved or validated.
    return DataLoader(
        dataset, batch_size, sampler=sampler, generator=torch.Generator(), pin_memory=worker.device.type == "cuda",
        num_workers=loader_processes, persistent_workers=loader_processes > 0,
    )  # fmt: skip


def check_divisible(global_batch_size: int, world_size: int, most: int = 0) -> None:
    """Raises ValueError when a global batch does not divide by `world_size`, naming the nearest sizes that do.

    most: the world may grow to this size, and the batch must divide by all sizes on the way.
    """
    multiple = math.lcm(*range(world_size, max(world_size, most) + 1))
    if global_batch_size % multiple:
        below = global_batch_size // multiple * multiple
        sizes = [str(size) for size in (below, below + multiple) if size > 0]
        ranks = f"every number of ranks from {world_size} to {most}" if most > world_size else f"{world_size} ranks"
        raise ValueError(f"global batch {global_batch_size} is not divisible by {ranks}; use {' or '.join(sizes)}")


def local_batch_size(global_batch_size: int, world_size: int) -> int:
    """How many samples of a global batch each rank takes. Raises ValueError when it does not divide."""
    check_divisible(global_batch_size, world_size)
    return global_batch_size // world_size


def global_batch_counts(num_samples: int, global_batch_size: int) -> list[int]:
    """How many samples each step of an epoch takes over all ranks; the last one may be smaller."""
    full, tail = divmod(num_samples, global_batch_size)
    return [global_batch_size] * full + [tail] * (tail > 0)


def empty_batch(dataset: Dataset) -> list[torch.Tensor]:
    """A batch of no samples: tensors of length 0, with the shapes and types of the data set's."""
    return [tensor[:0] for tensor in default_collate([dataset[0]])]


def even_batches(loader: DataLoader, num_batches: int) -> Iterator:
    """The batches of `loader`, then empty ones until there are `num_batches`.

    Where the last global batch is smaller than the world size, some ranks have no sample left. They must still take
    part in its all-reduce, or the others wait forever: they do so with tensors of length 0, whose gradient is 0.
    A batch is a list of tensors with the samples along dimension 0.
    """
    count = 0
    for count, batch in enumerate(loader, start=1):  # noqa: B007
        yield batch
    if count < num_batches:
        sample = default_collate([loader.dataset[0]])
        for _ in range(num_batches - count):
            yield [tensor[:0] for tensor in sample]
