"""Deal samples to ranks: each to exactly one, in the same global batches for every world size that divides them."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from shared.distributed import Worker


class UnpaddedDistributedSampler(DistributedSampler):
    """torch's DistributedSampler without its padding: every sample goes to exactly one rank.

    Rank r of W gets elements r, r + W, r + 2W ... of the epoch's permutation. So the k-th global batch holds the same
    samples for every W that divides the batch size. DistributedSampler repeats samples until all ranks have the
    same number. Here the ranks may differ by one sample, which `even_batches` handles.

    `set_position(samples)` makes the next iteration start after that many samples of the epoch, over all ranks. This is
    how a run resumes in the middle of an epoch, even at a different world size. The position holds for one iteration.
    """

    def __init__(self, dataset: Dataset, num_replicas: int, rank: int, shuffle: bool = True, seed: int = 0) -> None:
        """num_replicas: the world size. The other arguments are DistributedSampler's."""
        super().__init__(dataset, num_replicas, rank, shuffle=shuffle, seed=seed)
        self.position = 0

    def set_position(self, samples: int) -> None:
        """Start the next iteration after that many samples of the epoch, over all ranks."""
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
    """Return this rank's part of `dataset` in batches of `batch_size`: every sample goes to exactly one rank.

    shuffle_seed: shuffles differently in each epoch and alike on all ranks. None keeps the data set's order.
    loader_processes: the number of processes that prepare this rank's batches. What the data set draws in them from
    `torch`, `numpy` and `random` differs between ranks and epochs of `deal_batches`, and is the same whenever an epoch
    begins again.
    """
    shuffle = shuffle_seed is not None
    sampler = UnpaddedDistributedSampler(dataset, worker.world_size, worker.rank, shuffle, shuffle_seed or 0)
    # Each pass over a loader draws a seed for its worker processes. The loader has a generator of its own, so that
    # dropout does not depend on how often a run is saved or validated.
    return DataLoader(
        dataset, batch_size, sampler=sampler, generator=torch.Generator(), pin_memory=worker.device.type == "cuda",
        num_workers=loader_processes,  # started anew in each epoch, which has its own seed
    )  # fmt: skip


def check_divisible(global_batch_size: int, world_size: int, most: int = 0, readers: str = "ranks") -> None:
    """Raise ValueError if a global batch is not divisible by `world_size`, with the nearest sizes that are.

    most: the world may grow to this size, and the batch must be divisible by every size up to it.
    readers: what shares the batch, in the error's words.
    """
    multiple = math.lcm(*range(world_size, max(world_size, most) + 1))
    if global_batch_size % multiple:
        below = global_batch_size // multiple * multiple
        sizes = [str(size) for size in (below, below + multiple) if size > 0]
        size = f"{world_size} {readers}"
        if most > world_size:
            size = f"every number of {readers} from {world_size} to {most}"
        raise ValueError(f"global batch {global_batch_size} is not divisible by {size}; use {' or '.join(sizes)}")


def local_batch_size(global_batch_size: int, world_size: int) -> int:
    """Return how many samples of a global batch each rank takes.

    Raises ValueError if the batch is not divisible.
    """
    check_divisible(global_batch_size, world_size)
    return global_batch_size // world_size


def global_batch_counts(num_samples: int, global_batch_size: int) -> list[int]:
    """Return how many samples each step of an epoch takes over all ranks; the last may be smaller."""
    full, tail = divmod(num_samples, global_batch_size)
    return [global_batch_size] * full + [tail] * (tail > 0)


def empty_batch(dataset: Dataset) -> list[torch.Tensor]:
    """Return a batch of no samples: tensors of length 0, with the data set's other dimensions and types."""
    return [tensor[:0] for tensor in default_collate([dataset[0]])]


def even_batches(loader: DataLoader, num_batches: int) -> Iterator:
    """Yield the batches of `loader`, then empty ones until there are `num_batches`.

    When the last global batch is smaller than the world size, some ranks have no sample left. They must still take part
    in its all-reduce, or the others wait forever. So they use tensors of length 0, whose gradient is 0. A batch is a
    list of tensors with the samples along dimension 0.
    """
    count = 0
    for count, batch in enumerate(loader, start=1):  # noqa: B007
        yield batch
    if count < num_batches:
        sample = default_collate([loader.dataset[0]])
        for _ in range(num_batches - count):
            yield [tensor[:0] for tensor in sample]


def deal_batches(
    loader: DataLoader, epoch: int, position: int, counts: Sequence[int]
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield (count, this rank's batch) for each step, from `position` of an epoch on.

    Each epoch has its own order, the same on all ranks. Every rank gets equally many batches.
    loader: from `rank_loader`. epoch: from 0. position: how many of its samples were trained on before.
    counts: the samples of each step over all ranks, for as many steps as are to be taken.
    """
    sampler = loader.sampler
    sampler.set_epoch(epoch)
    sampler.set_position(position)
    seed = np.random.SeedSequence([sampler.seed, sampler.rank, epoch, position]).generate_state(1, np.uint64)
    loader.generator.manual_seed(int(seed[0]))
    yield from zip(counts, islice(even_batches(loader, len(counts)), len(counts)), strict=True)
