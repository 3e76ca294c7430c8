"""The exercise checks of lesson 6.7: long sequences."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from checks.machinery import Wrong, exercise, on_ranks
from shared import measure

TOKENS = 12  # in a window of the checks: 2 or 3 ranks cut it in equal parts, and zigzag in halves of those


def contiguous(rank: int, size: int) -> torch.Tensor:
    """Return consecutive positions."""
    return torch.arange(TOKENS).chunk(size)[rank]


def zigzag(rank: int, size: int) -> torch.Tensor:
    """Return a chunk from the front of the window and one from its back."""
    chunks = torch.arange(TOKENS).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def striped(rank: int, size: int) -> torch.Tensor:
    """Return every `size`-th position."""
    return torch.arange(rank, TOKENS, size)


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
# Where documents begin in each window. The first and the second window begin in the middle of a document.
STARTS = [[5], [], [0, 1, 2, 6, 7, 11], [0], [0, 4, 8], [0, 9]]


def packed_window() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return for (window, token): whether a document begins there, its number, and the token's position in it."""
    starts = torch.zeros(len(STARTS), TOKENS, dtype=torch.bool)
    for window, positions in enumerate(STARTS):
        starts[window, positions] = True
    begins = torch.where(starts, torch.arange(TOKENS), 0).cummax(1).values
    return starts, starts.cumsum(1), torch.arange(TOKENS) - begins


def try_packed(answer: Callable) -> dict:
    """Report what an answer returns on this rank, for each layout."""
    rank, size = dist.get_rank(), dist.get_world_size()
    starts, *_ = packed_window()
    return {name: answer(starts[:, layout(rank, size)].clone(), layout) for name, layout in LAYOUTS.items()}


def judge_positions(seen: object, within: torch.Tensor, own: torch.Tensor, others: Iterable, where: str) -> None:
    """Raise Wrong unless `seen` are the positions of the tokens `own` in their documents."""
    if not torch.is_tensor(seen) or seen.shape != within.shape:
        shape = tuple(seen.shape) if torch.is_tensor(seen) else type(seen).__name__
        raise Wrong(f"{where} the positions are {shape}, expected a tensor {tuple(within.shape)}")
    if seen.dtype != torch.int64:
        raise Wrong(f"{where} the positions are {seen.dtype}, and the table of positions takes int64")
    wrong = seen != within
    if not wrong.any():
        return
    window, place = wrong.nonzero()[0].tolist()
    token = int(own[place])
    begin = token - int(within[window, place])
    owner = next(rank for rank, positions in enumerate(others) if begin in positions)
    said = f"token {token} of window {window} gets the position {int(seen[window, place])}"
    raise Wrong(f"{where} {said}. Its document begins at token {begin} of the window, which rank {owner} has")


def judge_masks(seen: object, expected: list[torch.Tensor], own: torch.Tensor, others: list, where: str) -> None:
    """Raise Wrong unless `seen` are the expected masks, each (windows, 1, own tokens, tokens of the source)."""
    if not isinstance(seen, list | tuple) or len(seen) != len(expected):
        raise Wrong(f"{where} expected a list with {len(expected)} masks, one for each source rank")
    for source, (mask, right) in enumerate(zip(seen, expected, strict=True)):
        if not torch.is_tensor(mask) or mask.shape != right.shape or mask.dtype != torch.bool:
            shape = f"{tuple(mask.shape)} of {mask.dtype}" if torch.is_tensor(mask) else type(mask).__name__
            raise Wrong(f"{where} the mask for rank {source} is {shape}, expected {tuple(right.shape)} of torch.bool")
        if (mask == right).all():
            continue
        window, _, row, column = (mask != right).nonzero()[0].tolist()
        query, key = int(own[row]), int(others[source][column])
        pair = f"in window {window}, token {query} {{}} token {key}, which rank {source} has"
        if right[window, 0, row, column]:
            raise Wrong(f"{where} {pair.format('does not see')}. Both are in one document. Who knows that?")
        reason = "That comes later" if key > query else "That is in a different document"
        raise Wrong(f"{where} {pair.format('sees')}. {reason}")


@exercise("6.7a", "every token sees its own document and nothing else, on every layout.")
def exercise_6_7a(answer: Callable) -> None:
    """A function packed(starts, layout) -> positions in the documents, and a mask for each source rank."""
    _, documents, within = packed_window()
    for size in (2, 3):
        reports = on_ranks(try_packed, size, answer)
        for name, layout in LAYOUTS.items():
            others = [layout(source, size) for source in range(size)]
            for rank, own in enumerate(others):
                where = f"with the {name} layout on {size} ranks, on rank {rank},"
                try:
                    positions, masks = reports[rank][name]
                except (TypeError, ValueError):
                    raise Wrong(f"{where} expected two results, the positions and a list of masks") from None
                judge_positions(positions, within[:, own], own, others, where)
                expected = [
                    ((own[:, None] >= theirs) & (documents[:, own, None] == documents[:, None, theirs])).unsqueeze(1)
                    for theirs in others
                ]
                judge_masks(masks, expected, own, others, where)


def queries_keys_values(heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of the window (3, batch, heads, tokens, 4), and a gradient of the result."""
    generator = torch.Generator().manual_seed(heads)
    drawn = torch.randn(4, 2, heads, TOKENS, 4, dtype=torch.float64, generator=generator)
    return drawn[:3], drawn[3]


def try_ulysses(answer: Callable, all_heads: list[int]) -> dict:
    """Report this rank's result, gradients and bytes, for each number of heads."""
    found, own = {}, contiguous(dist.get_rank(), dist.get_world_size())
    for heads in all_heads:
        drawn, upstream = queries_keys_values(heads)
        inputs = [tensor[:, :, own].clone().requires_grad_() for tensor in drawn]
        with measure.Traffic() as traffic:
            result = answer(*inputs)
            if result.shape == inputs[0].shape and result.requires_grad:
                (result * upstream[:, :, own]).sum().backward()
        gradients = [tensor.grad for tensor in inputs]
        found[heads] = {"out": result.detach(), "gradients": gradients, "sent": sum(traffic.sent.values())}
    return found


def fewest_bytes(heads: int, size: int) -> int:
    """Return what the rank with most to send sends in a step, if heads are dealt evenly and nothing is padded."""
    of_head = 2 * (TOKENS // size) * 4 * 8  # one of q, k, v, out: batch x own tokens x head_dim x bytes
    numbers = [len(part) for part in torch.arange(heads).tensor_split(size)]
    # Four tensors go one way in the forward pass and the other way in the backward pass: out to each rank's heads, or
    # from them to all tokens.
    return max(4 * of_head * (heads - number + number * (size - 1)) for number in numbers)


@exercise("6.7b", "any number of heads on any number of ranks, and no padding is sent.")
def exercise_6_7b(answer: Callable) -> None:
    """A function uneven_ulysses(q, k, v) -> the causal attention of this rank's tokens."""
    for size, all_heads in ((2, [4, 5]), (3, [7, 2])):
        reports = on_ranks(try_ulysses, size, answer, all_heads)
        for heads in all_heads:
            drawn, upstream = queries_keys_values(heads)
            inputs = [tensor.clone().requires_grad_() for tensor in drawn]
            expected = F.scaled_dot_product_attention(*inputs, is_causal=True)
            (expected * upstream).sum().backward()
            for rank, report in enumerate(reports):
                own, report = contiguous(rank, size), report[heads]
                where = f"with {heads} heads on {size} ranks, rank {rank}"
                gradients = [tensor.grad[:, :, own] for tensor in inputs]
                judge_ulysses(report, expected[:, :, own], gradients, fewest_bytes(heads, size), where)


def judge_ulysses(report: dict, expected: torch.Tensor, gradients: list, limit: int, where: str) -> None:
    """Raise Wrong unless a rank's result and gradients are the expected ones, and it sends no more than `limit`."""
    if report["out"].shape != expected.shape:
        raise Wrong(f"{where} returns the shape {tuple(report['out'].shape)}, expected {tuple(expected.shape)}")
    wrong = [head for head in range(expected.shape[1]) if (report["out"] - expected)[:, head].abs().max() > 1e-9]
    if wrong:
        raise Wrong(
            f"{where} returns a wrong result for head {wrong[0]} ({len(wrong)} of {expected.shape[1]} heads). "
            "Whose heads and whose tokens lie where after each exchange, and which tokens may a query see?"
        )
    for name, gradient, right in zip("qkv", report["gradients"], gradients, strict=True):
        if gradient is None:
            raise Wrong(f"{where} gets no gradient for {name}. Does autograd know what an exchange does?")
        if not torch.allclose(gradient, right, atol=1e-9):
            raise Wrong(f"{where} gets a wrong gradient for {name}. Which way do gradients go through an exchange?")
    if report["sent"] > limit + 1:
        raise Wrong(f"{where} sends {report['sent']:,} bytes in a step. With even shares, {limit:,} are enough")
