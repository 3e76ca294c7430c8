"""The checks of lesson 6.7's exercises accept right answers, and reject the stub and plausible mistakes with help."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import cell, judge, stub

import checks
from shared import ranks

SOLUTION = Path(__file__).parent.parent / "06-beyond-data-parallel/solutions/07_long_sequences.ipynb"


def answer(name: str, cells: str, *changes: tuple[str, str]) -> Callable:
    """Return the solution called `name`, which `cells` hold, with changes, each (old, new)."""
    names = {"__name__": "lesson_6_7"}  # no module: its functions travel to the ranks as those of a notebook do
    text = "\n".join(cell(SOLUTION, identity) for identity in ("imports", *cells.split()))
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    exec(text, names)
    return names[name]


# --- 6.7a: documents in one window -----------------------------------------------------------------------------------

packed = functools.partial(answer, "packed", "exercise-a-solution")
ORDER = "[:, torch.cat(places).argsort()]"
OWN_ONLY = (
    ("    dist.all_gather(gathered, starts.contiguous())\n", "    gathered[rank] = starts\n"),
    ("torch.empty_like", "torch.zeros_like"),
)
ELSEWHERE = re.compile(r"Its document begins at token \d+ of the window, which rank \d has")
test_6_7a = judge(checks.exercise_6_7a, [packed()], {
    "stub": (stub, "not done yet"),
    "own starts only": (packed(*OWN_ONLY), ELSEWHERE),
    "in the order of ranks": (packed((ORDER, "")), re.compile("with the zigzag layout .* gets the position")),
    "sees what comes later": (packed((" & (own[:, None] >= theirs)", "")), "That comes later"),
    "sees other documents": (packed(("same & (own", "torch.ones_like(same) & (own")), "in a different document"),
    "positions of the window": (packed(("positions[:, own], masks", "own.expand(len(starts), -1), masks")),
                                "Its document begins at token"),
    "no own documents": (packed(("documents[:, own, None] ==", "documents[:, places[0], None] ==")),
                         re.compile("does not see|That is in a different document")),
    "one mask": (packed(("own], masks", "own], masks[rank]")), "one for each source rank"),
})  # fmt: skip


# --- 6.7b: Ulysses for any number of heads ---------------------------------------------------------------------------

ulysses = functools.partial(answer, "uneven_ulysses", "exchange exercise-b-solution")
PADDED = (
    ("    by_heads = torch.stack([q, k, v])",
     "    missing = -q.shape[1] % size\n    q, k, v = (F.pad(each, (0, 0, 0, 0, 0, missing)) for each in (q, k, v))\n"
     "    wanted, heads = q.shape[1] - missing, [q.shape[1] // size] * size\n    number = heads[rank]\n"
     "    by_heads = torch.stack([q, k, v])"),
    (".movedim(0, 1)", ".movedim(0, 1)[:, :wanted]"),
)  # fmt: skip
MIXED_UP = (".unflatten(0, (size, number))", ".unflatten(0, (number, size)).transpose(0, 1)")
KEPT = ("ExchangeParts.apply(gradient, *ctx.sizes)", "gradient.new_zeros(sum(ctx.sizes[1]), *gradient.shape[1:])")
# On every rank, otherwise the first error varies.
EVERY_RANK_SEES_IT = ("heads[rank], q", "[heads[each] for each in range(size)][rank], q")
test_6_7b = judge(checks.exercise_6_7b, [ulysses()], {
    "stub": (stub, "not done yet"),
    "padded": (ulysses(*PADDED), "With even shares"),
    "one rank has all heads": (ulysses((".tensor_split(size)]", ".tensor_split([q.shape[1]] * (size - 1))]")),
                               "With even shares"),
    "not causal": (ulysses((", is_causal=True", "")), "which tokens may a query see?"),
    "ranks and heads mixed up": (ulysses(MIXED_UP), "returns a wrong result for head"),
    "without autograd": (ulysses(("ExchangeParts.apply(by_heads", "ExchangeParts.apply(by_heads.detach()")),
                         "gets no gradient for q"),
    "gradients not exchanged": (ulysses(KEPT), "gets a wrong gradient for q"),
    "fewer parts than ranks": (ulysses((".tensor_split(size)", ".chunk(size)"), EVERY_RANK_SEES_IT), "IndexError"),
})  # fmt: skip


# --- the lesson's ring takes the masks of 6.7a -----------------------------------------------------------------------

LESSON = SOLUTION.parents[1] / SOLUTION.name


def attention_on_ranks(packed: Callable, names: dict, drawn: torch.Tensor, starts: torch.Tensor) -> tuple:
    """Return this rank's part of attention by the lesson's ring, and the gradients of its queries, keys and values."""
    own = names["zigzag"](dist.get_rank(), dist.get_world_size())
    _, masks = packed(starts[:, own], names["zigzag"])
    inputs = [tensor[:, :, own].clone().requires_grad_() for tensor in drawn]
    out = names["ring_attention"](*inputs, masks)
    out.sin().sum().backward()
    return own, out.detach(), [tensor.grad for tensor in inputs]


def test_the_ring_computes_with_documents_as_one_process_does():
    names = {"__name__": "lesson_6_7"}
    exec(cell(LESSON, "imports"), names)
    names["CONTEXT"] = 16
    cells = "scores attend merge layout exchange tiles ring-forward tile-gradients ring-backward ring ring-attention"
    for identity in (*cells.split(), "zigzag"):
        exec(cell(LESSON, identity), names)
    drawn = torch.randn(3, 2, 2, 16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    starts = torch.zeros(2, 16, dtype=torch.bool)
    starts[0, [3, 9, 10]] = True
    documents = starts.cumsum(1)
    whole = [tensor.clone().requires_grad_() for tensor in drawn]
    mask = (documents[:, :, None] == documents[:, None, :]) & torch.ones(16, 16).tril().bool()
    expected = F.scaled_dot_product_attention(*whole, mask.unsqueeze(1))
    expected.sin().sum().backward()
    for own, out, gradients in ranks.run(attention_on_ranks, 4, packed(), names, drawn, starts):
        assert torch.allclose(out, expected[:, :, own], atol=1e-12)
        for gradient, tensor in zip(gradients, whole, strict=True):
            assert torch.allclose(gradient, tensor.grad[:, :, own], atol=1e-12)
