"""Simulate a ring all-reduce in one process: one tensor holds the chunks of all ranks, and a copy is a message."""

import torch


def ring_step(chunks: torch.Tensor, step: int) -> int:
    """Let every rank send one chunk to its right neighbor. Return the bytes that each rank sends.

    chunks: (ranks, chunks, values per chunk), changed in place. Steps count from 0.
    """
    num_ranks = len(chunks)
    chunk_sent_by = [(rank - step) % num_ranks for rank in range(num_ranks)]
    messages = [chunks[rank, chunk].clone() for rank, chunk in enumerate(chunk_sent_by)]  # all send at the same time
    for rank, (chunk, message) in enumerate(zip(chunk_sent_by, messages, strict=True)):
        neighbor = (rank + 1) % num_ranks
        if step < num_ranks - 1:
            chunks[neighbor, chunk] += message  # first round: add
        else:
            chunks[neighbor, chunk] = message  # second round: replace by the finished sum
    return messages[0].nbytes


def simulate_all_reduce(vectors: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return what each rank holds after a ring all-reduce, and the bytes that each rank has sent.

    vectors: (ranks, length), the tensor of each rank. The length is a multiple of the number of ranks.
    """
    num_ranks, length = vectors.shape
    chunks = vectors.reshape(num_ranks, num_ranks, length // num_ranks).clone()
    bytes_sent = sum(ring_step(chunks, step) for step in range(2 * (num_ranks - 1)))
    return chunks.reshape(num_ranks, length), bytes_sent
