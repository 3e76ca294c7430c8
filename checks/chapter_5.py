"""The exercise checks of chapter 5: the bug gallery."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from checks.machinery import Wrong, exercise, probe, refuse_stub, run_ranks
from shared import datasets, models, sampling


@exercise("5.1a", "what must be equal is, and what must differ does.")
def exercise_5_1a(suspicious: Callable[[dict, list, list], list[str]]) -> None:
    """suspicious({name: a value of each rank}, equal, different) -> the sorted names of those that are wrong."""
    for gathered, equal, different, why in (
        ({"lr": [0.1, 0.1], "seed": [7, 8]}, ["lr"], ["seed"], "all is well"),
        ({"lr": [0.1, 0.2], "seed": [7, 8]}, ["lr"], ["seed"], "the learning rates differ"),
        ({"sum": [1.0, 1.0, 1.5], "lr": [0.1] * 3}, ["sum", "lr"], [], "the last of three ranks differs"),
        ({"seed": [7, 8, 7]}, [], ["seed"], "ranks 0 and 2 have the same seed: any two count, not only neighbors"),
        ({"ids": [[0, 2], [1], [1]], "n": [2, 1, 1]}, ["n"], ["ids"], "both, sorted by name; a value may be a list"),
        ({"b": [1, 2], "a": [3, 3], "c": [5, 6]}, ["b"], ["a"], "nobody has asked for c"),
    ):
        call = f"suspicious({gathered}, {equal}, {different})"
        wrong = [name for name in equal if any(value != gathered[name][0] for value in gathered[name])]
        wrong += [name for name in different if any(gathered[name].count(value) > 1 for value in gathered[name])]
        seen = suspicious({name: list(values) for name, values in gathered.items()}, list(equal), list(different))
        if not isinstance(seen, list):
            raise Wrong(f"{call} should be a list of names, and is {seen!r}")
        if seen != sorted(wrong):
            raise Wrong(f"{call} is {sorted(wrong)}; you say {seen}. See: {why}.")


def one_process() -> tuple[list[float], float]:
    """What exercise 5.1b computes, in one process: the loss of each batch of 64, and the validation accuracy."""
    splits, losses = datasets.load("digits"), []
    torch.manual_seed(7)
    model = models.MLP(input_dim=64, hidden_dim=64, dropout=0.5).double().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    order = list(sampling.UnpaddedDistributedSampler(splits.train, 1, 0, shuffle=True, seed=7))
    images, labels = splits.train.tensors
    for part in torch.tensor(order).split(64):
        loss = F.cross_entropy(model(images[part].double()), labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    images, labels = splits.val.tensors
    return losses, (model(images.double()).argmax(dim=1) == labels).double().mean().item()


@exercise("5.1b", "five mistakes less: the losses of one process, and a checkpoint that loads.")
def exercise_5_1b(script: str | Path) -> None:
    """A script that trains on two ranks, prints losses and twice its accuracy, and writes its weights to argv[1]."""
    refuse_stub(script)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights.pt")
        printed = run_ranks(probe("count_saves"), 2, str(script), str(path))
        if printed[1].strip().startswith(("loss", "accuracy")):
            raise Wrong("rank 1 prints, too; one rank speaks for all")
        lines = [line.split() for line in printed[0].splitlines() if line.startswith(("loss ", "accuracy "))]
        losses = [float(line[1]) for line in lines if line[0] == "loss"]
        accuracies = [float(line[1]) for line in lines if line[0] == "accuracy"]
        expected, accuracy = one_process()
        if len(losses) != len(expected):
            raise Wrong(
                f"an epoch has {len(losses)} steps, and {len(expected)} with a global batch of 64: "
                "how many samples does a step see, over both ranks?"
            )
        apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        if apart > 1e-9:
            raise Wrong(f"the losses are {apart:.1e} from those of one process; is each the mean over all ranks?")
        if len(accuracies) != 2 or accuracies[0] != accuracies[1]:
            raise Wrong(f"two accuracies should be the same: {accuracies}. What is still switched on?")
        if abs(accuracies[0] - accuracy) > 1e-9:
            raise Wrong(f"the accuracy is {accuracies[0]}, and that of one process {accuracy}")
        saves = [int(text.split("saves ")[1]) for text in printed]
        if saves[1]:
            raise Wrong(f"ranks 0 and 1 call torch.save {saves} times, for one file: what all have, one rank writes")
        if not path.exists():
            raise Wrong("there is no file at sys.argv[1]")
        weights = torch.load(path, weights_only=True)
        if any(name.startswith("module.") for name in weights):
            raise Wrong(f"a bare model does not load the file: its keys begin with {next(iter(weights))!r}")
        models.MLP(input_dim=64, hidden_dim=64).load_state_dict(weights)
