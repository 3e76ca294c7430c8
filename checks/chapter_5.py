"""The exercise checks of chapter 5: the bug gallery."""

import math
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

from checks.machinery import Wrong, exercise, probe, refuse_stub, reports_of_ranks, run_ranks
from shared import datasets, models, sampling


@exercise("5.1a", "all ranks leave out the same steps, and train as one process does.")
def exercise_5_1a(script: str | Path) -> None:
    """A file with train_epoch(ddp_model, batches, optimizer) -> how many steps all ranks have left out."""
    refuse_stub(script)
    question = "Does every rank take the same decision in each step, and call the same collectives for it?"
    of_ranks = reports_of_ranks("damaged_batches", 2, str(script), question=question)
    for reports in zip(*of_ranks, strict=False):  # a rank stops after the first case that goes wrong
        case = reports[0]["case"]
        named = [f"step{'s'[: len(steps) - 1]} {', '.join(map(str, steps))}" if steps else "none" for steps in case]
        where = f"with damaged batches in {named[0]} of rank 0 and {named[1]} of rank 1 (of steps 0 to 4),"
        left_out = len({*case[0], *case[1]})
        if any(report["ending"] != "returns" for report in reports):
            raise Wrong(f"{where} one rank called a collective that the other never reached. {question}")
        for rank, report in enumerate(reports):
            if report["steps"] != 5 - left_out:
                hint = "If one rank leaves a step out, what must the other do in this step?"
                raise Wrong(f"{where} rank {rank} takes {report['steps']} steps, expected {5 - left_out}. {hint}")
            if math.isnan(report["gap"]):
                raise Wrong(f"{where} the weights of rank {rank} are not finite: a damaged gradient reached them")
            if report["gap"] > 1e-9:
                hint = "Which two gradients were averaged in each step?"
                raise Wrong(f"{where} the weights of rank {rank} are {report['gap']:.1e} from one process's. {hint}")
        for rank, report in enumerate(reports):
            if report["returned"] != left_out:
                raise Wrong(f"{where} rank {rank} returns {report['returned']}, and {left_out} steps were left out")


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


@exercise("5.1b", "all five mistakes are gone: the losses are those of one process, and the checkpoint loads.")
def exercise_5_1b(script: str | Path) -> None:
    """A script that trains on two ranks, prints losses and twice its accuracy, and writes its weights to argv[1]."""
    refuse_stub(script)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights.pt")
        printed = run_ranks(probe("count_saves"), 2, str(script), str(path))
        if printed[1].strip().startswith(("loss", "accuracy")):
            raise Wrong("rank 1 prints too; one rank speaks for all")
        lines = [line.split() for line in printed[0].splitlines() if line.startswith(("loss ", "accuracy "))]
        losses = [float(line[1]) for line in lines if line[0] == "loss"]
        accuracies = [float(line[1]) for line in lines if line[0] == "accuracy"]
        expected, accuracy = one_process()
        if len(losses) != len(expected):
            raise Wrong(
                f"an epoch has {len(losses)} steps, and would have {len(expected)} with a global batch of 64: "
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


SHAPES_5_2A = [[6, 4], [5, 8], [1, 4], [4, 4]]


@exercise("5.2a", "each matrix is orthogonalized whole, on one rank, and every rank gets its rows.")
def exercise_5_2a(script: str | Path) -> None:
    """A file with update(parameters, lr, orthogonalize), which changes each rank's rows of each matrix."""
    refuse_stub(script)
    of_ranks = reports_of_ranks("shared_orthogonalization", 2, str(script))
    for step, reports in enumerate(zip(*of_ranks, strict=True), start=1):
        where = f"in step {step},"
        for rank, report in enumerate(reports):
            if parts := [shape for shape in report["shapes"] if shape not in SHAPES_5_2A]:
                raise Wrong(f"{where} rank {rank} orthogonalizes a matrix of {parts[0]}, which is a part of one")
        for shape, number in zip(SHAPES_5_2A, range(4), strict=True):
            for rank, report in enumerate(reports):
                if not report["gaps"][number] < 1e-9:
                    hint = "Is it the update of the whole matrix? Are they the rows that this rank keeps?"
                    raise Wrong(f"{where} the rows of rank {rank} of the {shape} matrix are not one process's. {hint}")
            times = sum(report["shapes"].count(shape) for report in reports)
            if times != 1:
                hint = "The result is right. Now let one rank do it, and send it to the others."
                raise Wrong(f"{where} the {shape} matrix is orthogonalized {times} times. {hint}")
        counts = [len(report["shapes"]) for report in reports]
        if max(counts) - min(counts) > 1:
            raise Wrong(f"{where} the ranks orthogonalize {counts[0]} and {counts[1]} matrices: share them evenly")


SHAPES_5_2B = [[12, 4], [9, 8], [1, 6], [7, 5]]
FACTORS_5_2B = {
    "nothing": "They have not changed. Change the tensors in `weights` in place.",
    "all": "All of their change is off by the same factor. Which single number is still that of a slice?",
    "columns": "Each column of their change is off by its own factor. Which statistic has one number per column?",
    "rows": "Each row of their change is off by its own factor. Does a row need anything from the other rank?",
    "none": "Which statistics should be equal on both ranks, and which should differ?",
}


@exercise("5.2b", "the ranks add up what belongs to the whole matrix, and no matrix travels.")
def exercise_5_2b(script: str | Path) -> None:
    """A file with update(weights, gradients, lr), which changes this rank's rows as Adafactor does on one process."""
    refuse_stub(script)
    limit = sum(columns + 10 for _, columns in SHAPES_5_2B)
    of_ranks = reports_of_ranks("adafactor_on_slices", 2, str(script))
    for step, reports in enumerate(zip(*of_ranks, strict=True), start=1):
        for number, shape in enumerate(SHAPES_5_2B):
            for rank, report in enumerate(reports):
                matrix = report["matrices"][number]
                where = f"in step {step}, the {matrix['rows']} rows of rank {rank} of the {shape} matrix"
                if math.isnan(matrix["gap"]):
                    raise Wrong(f"{where} are not finite. What is the mean of no rows, and what is their sum?")
                if matrix["gap"] > 1e-9:
                    raise Wrong(f"{where} are not those of one process. {FACTORS_5_2B[matrix['factor']]}")
        for rank, report in enumerate(reports):
            if report["numbers"] > limit:
                hint = "The result is right. Now send sums, not rows."
                raise Wrong(f"rank {rank} passes {report['numbers']} numbers to collectives, at most {limit}. {hint}")
