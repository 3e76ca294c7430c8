"""The exercise checks of chapter 3's lessons on fine-tuning: 3.6, 3.7 and 3.8."""

import math
from collections.abc import Callable
from pathlib import Path

from shared.checks.machinery import Wrong, exercise, refuse_stub, reports_of_ranks

# --- Lesson 3.6: from a pretrained folder into shards, and back ------------------------------------------------------

# Runs under torchrun: calls the learner's train_step on a sharded model, and compares its update with that of one
# process. With SGD and a learning rate of 1, the update is the gradient.
ACCUMULATE = """
import json, runpy, sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from shared import distributed

CASES = {  # answer tokens of each pass, rank by rank
    "equal": [[6, 6], [6, 6], [6, 6]],
    "ranks": [[2, 2], [4, 4], [9, 9]],
    "passes": [[1, 9], [1, 9], [1, 9]],
    "mixed": [[1, 3], [8, 2], [5, 9]],
    "empty pass": [[0, 6], [5, 4], [7, 2]],
    "empty rank": [[5, 4], [0, 0], [7, 2]],
}
folder, script = sys.argv[1:]
worker = distributed.join(timeout_s=60)
train_step = runpy.run_path(script)["train_step"]

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).double()

def make(count, generator):
    tokens, targets = torch.randint(16, (2, 2, 6), generator=generator)
    targets.view(-1)[torch.randperm(12, generator=generator)[count:]] = -100
    return tokens, targets

report = {}
for name, counts in CASES.items():
    generator = torch.Generator().manual_seed(1)
    passes = [[make(count, generator) for count in of_rank] for of_rank in counts]
    plain, model = build(), build()
    fully_shard(model)
    total = sum(map(sum, counts))
    expected = sum(
        F.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum") / total
        for of_rank in passes for tokens, targets in of_rank
    )
    gradient = torch.cat([part.flatten() for part in torch.autograd.grad(expected, list(plain.parameters()))])
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    returned = train_step(model, optimizer, passes[worker.rank])
    after = torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()])
    update = torch.cat([parameter.detach().flatten() for parameter in plain.parameters()]) - after
    if isinstance(returned, torch.Tensor) and returned.numel() == 1:
        returned = returned.item()
    report[name] = {
        "returned": returned if isinstance(returned, int | float) else repr(returned),
        "expected": expected.item(),
        "error": ((update - gradient).norm() / gradient.norm()).item(),
        "factor": (update @ gradient / (gradient @ gradient)).item(),
    }
with open(f"{folder}/{worker.rank}.json", "w") as file:
    json.dump(report, file)
distributed.leave()
"""
WHAT_DIFFERS = {
    "equal": "every pass of every rank has 6 answer tokens",
    "ranks": "the passes of a rank have equally many answer tokens, but those of another rank more or fewer",
    "passes": "every rank has one pass with 1 answer token and one with 9",
    "mixed": "passes and ranks all have different numbers of answer tokens",
    "empty pass": "rank 0's first pass has no answer token",
    "empty rank": "rank 1 has no answer token",
}


def judge_train_step(reports: list[dict[str, dict]]) -> None:
    """Raise Wrong for the first case in which a rank's update or loss is not that of one process."""
    for case, where in WHAT_DIFFERS.items():
        for rank, report in enumerate(reports):
            seen = report[case]
            error, factor, returned, expected = (seen[key] for key in ("error", "factor", "returned", "expected"))
            if math.isnan(error):
                raise Wrong(f"{where}: the weights are nan. What is the mean of no tokens?")
            if abs(factor) < 1e-9:
                raise Wrong(f"{where}: the weights did not change. Do you call backward() and optimizer.step()?")
            if error > 1e-9:
                if abs(error - abs(factor - 1)) < 1e-6:  # the right direction
                    hint = f"The gradient is {factor:.3g} times as long as it should be. Who divides by what?"
                else:
                    hint = "Which number has each pass of each rank to divide its sum by?"
                raise Wrong(f"{where}: the gradient is off by {error:.1%}. {hint}")
            if not isinstance(returned, int | float):
                raise Wrong(f"train_step returns {returned}: return the mean loss of the step, a number")
            if not math.isclose(returned, expected, rel_tol=1e-5):
                others = len({round(each[case]["returned"], 9) for each in reports}) > 1
                hint = "The ranks return different numbers." if others else "Every rank returns this."
                raise Wrong(
                    f"{where}: the gradient is right, but rank {rank} returns {returned:.6f}, and the mean over all "
                    f"answer tokens is {expected:.6f}. {hint}"
                )


@exercise("3.6a", "every answer token counts once, in whichever pass and on whichever rank it is.")
def exercise_3_6a(script: str | Path) -> None:
    """A file with train_step(model, optimizer, passes), for a sharded model on three ranks."""
    refuse_stub(script)
    question = "Does each rank call the model and backward() in every pass, and every collective, equally often?"
    judge_train_step(reports_of_ranks(ACCUMULATE, 3, str(script), question=question))


@exercise("3.6b", "the assistant learns its own words, and where each of its turns ends.")
def exercise_3_6b(make_targets: Callable[[list[int]], list[int]]) -> None:
    """make_targets(tokens) -> for each token but the last: the next one if the assistant writes it, otherwise -100."""
    user, assistant, system, end, no = 0, 1, 2, 3, -100
    short = [user, 10, 11, end, assistant, 20, 21, end]
    for what, tokens, expected, hint in (
        ("one question and one answer", short, [no, no, no, no, 20, 21, end],
         "An entry belongs to a token, and holds the next one. Which token comes before the answer's first word?"),
        ("an answer that was cut off", short[:7], [no, no, no, no, 20, 21], "There is no END to learn here."),
        ("two answers", [*short, user, 12, end, assistant, 22, end],
         [no, no, no, no, 20, 21, end, no, no, no, no, 22, end], "Both answers count, and no END of the user."),
        ("a conversation that ends with the user", [*short, user, 12, 13, end],
         [no, no, no, no, 20, 21, end, no, no, no, no], "Nothing of the last turn counts."),
        ("a system message first", [system, 30, 31, end, *short], [no] * 8 + [20, 21, end],
         "The assistant writes neither the system's words nor the user's."),
        ("no answer", [user, 10, 11, end], [no, no, no], "Without an answer, nothing counts."),
        ("an empty answer", [user, 10, end, assistant, end], [no, no, no, end],
         "The assistant ends its turn at once, and that is worth learning."),
        ("a request for an answer at the end", [user, 10, end, assistant], [no, no, no],
         "The template writes the role's token, not the assistant."),
    ):  # fmt: skip
        seen = make_targets(list(tokens))
        seen = seen.tolist() if hasattr(seen, "tolist") else seen
        if not isinstance(seen, list | tuple) or len(seen) != len(expected):
            length = len(seen) if isinstance(seen, list | tuple) else repr(seen)
            raise Wrong(
                f"for {len(tokens)} tokens return a list of {len(expected)} targets, one for each token but the last; "
                f"yours: {length}"
            )
        if list(seen) != expected:
            raise Wrong(f"{what}: for tokens {tokens} you return {list(seen)}, expected {expected}. {hint}")
