"""The checks of lesson 6.7's exercises accept right answers, and reject the stub and plausible mistakes with help."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

from answers import cell, judge, stub

import checks

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
    "fewer parts than ranks": (ulysses((".tensor_split(size)", ".chunk(size)")), "IndexError"),
})  # fmt: skip
