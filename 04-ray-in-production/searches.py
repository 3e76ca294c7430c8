"""Provide what lesson 4.2 shares: a small task, reports of trials, two ways to try a rule without training, figures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from ray import tune
from ray.tune.schedulers import TrialScheduler
from training import config as configuration
from training import data
from training.trainer import Trainer
from training.tune import with_values

from shared import distributed, plots

CONFIG_FOLDER = Path(__file__).with_name("program") / "config"
SMALL = (
    "dataset.vocab_size=200", "dataset.max_length=12",  # the start of a snippet, in frequent tokens
    "model.embedding_dim=8", "model.hidden_dim=8", "model.bidirectional=false", "model.dropout=0",
    "training.batch_size=128", "training.lr_step_size=1000",  # the learning rate stays as it is
    "training.precision=fp64",
)  # fmt: skip


def load_task(folder: Path, seed: int) -> tuple[configuration.Config, data.Splits]:
    """Return the program's configuration for a very small network, and its snippets, which are kept in `folder`."""
    folders = (f"paths.processed_data_dir={folder}/data", f"paths.model_save_dir={folder}", f"paths.log_dir={folder}")
    config = configuration.load(CONFIG_FOLDER, [*SMALL, *folders, f"training.seed={seed}"])
    return config, data.load(config.dataset, data.prepare(config.dataset, f"{folder}/data", max_workers=1))


def build_trainer(
    config: configuration.Config, splits: data.Splits, values: dict, report: Callable[[dict], None]
) -> Trainer:
    """Return the program's trainer for one process. It calls report(metrics) at the end of each epoch.

    values: what replaces the configuration's training section, such as {"lr": 0.01}.
    """
    alone, no_log = distributed.Worker(), lambda *message, **metrics: None
    trainer = Trainer(with_values(config, values), splits, alone, no_log, lambda state, metrics: report(metrics))
    trainer.join()
    return trainer


def train(config: configuration.Config, splits: data.Splits, lr: float, seed: int, epochs: int) -> list[float]:
    """Train in this process, without Tune, and return the validation accuracy after each epoch."""
    torch.set_num_threads(1)  # as in a trial
    accuracies = []
    values = {"lr": lr, "seed": seed}
    trainer = build_trainer(config, splits, values, lambda metrics: accuracies.append(metrics["val_accuracy"]))
    for _ in range(epochs):
        trainer.train_epoch()
    return accuracies


class Reports(tune.Callback):
    """Collect the reports of each trial."""

    def __init__(self) -> None:
        self.of_trial: dict[str, list[dict]] = {}

    def on_trial_result(self, iteration: int, trials: list, trial: object, result: dict, **info: object) -> None:
        self.of_trial.setdefault(trial.trial_id, []).append(result)

    def in_order(self) -> list[list[dict]]:
        """Return the reports of each trial, in the order in which Tune created the trials."""
        return [self.of_trial[trial_id] for trial_id in sorted(self.of_trial)]


def pause_and_promote(
    curves: Sequence[Sequence[float]], order: Sequence[int], epochs: int, grace_period: int = 1
) -> dict[int, int]:
    """Return the epochs that each trial gets by the rule of ASHA's paper, with one trial at a time and a factor of 2.

    curves: the accuracy of each trial after each epoch. order: the numbers of the trials as they start.
    A trial pauses at each rung. It continues once it is in the better half of all trials that have reached this rung.
    Source: Li et al. 2018, arXiv:1810.05934, algorithm 2.
    """
    rungs = [rung for rung in (grace_period * 2**k for k in range(epochs)) if rung < epochs] + [epochs]
    reached, promoted = [[] for _ in rungs], set()
    waiting, spent = list(order), {}
    while True:
        number, level = next_to_promote(curves, rungs, reached, promoted) or (None, 0)
        if number is None and not waiting:
            return spent
        if number is None:
            number = waiting.pop(0)
        else:
            promoted.add((number, level))
        reached[level].append(number)
        spent[number] = rungs[level]


def next_to_promote(
    curves: Sequence[Sequence[float]], rungs: Sequence[int], reached: Sequence[Sequence[int]],
    promoted: set[tuple[int, int]],
) -> tuple[int, int] | None:  # fmt: skip
    """Return a paused trial and the level to which it continues, the highest first; None if no trial may continue."""
    for level in range(len(rungs) - 1, 0, -1):
        below = reached[level - 1]
        best = sorted(below, key=lambda number: -curves[number][rungs[level - 1] - 1])[: len(below) // 2]
        for number in best:
            if (number, level) not in promoted:
                return number, level
    return None


def ask_scheduler(scheduler: TrialScheduler, curves: Sequence[Sequence[float]], order: Sequence[int]) -> dict[int, int]:
    """Return the epochs that each trial gets from a scheduler of Tune, with one trial at a time and without training.

    curves: the accuracy of each trial after each epoch. order: the numbers of the trials as they start.
    """
    scheduler.set_search_properties("accuracy", "max")
    spent = {}
    for number in order:
        trial = SimpleNamespace(trial_id=number)
        scheduler.on_trial_add(None, trial)
        for epoch, accuracy in enumerate(curves[number], 1):
            spent[number] = epoch
            decision = scheduler.on_trial_result(None, trial, {"epoch": epoch, "accuracy": accuracy})
            assert decision in (TrialScheduler.CONTINUE, TrialScheduler.STOP), decision  # never TrialScheduler.PAUSE
            if decision == TrialScheduler.STOP:
                break
    return spent


def draw_epochs(
    searches: Mapping[str, Sequence[Sequence[dict]]], rungs: Sequence[int], epochs: int, rates: Sequence[float],
    best: int, accuracy: float,
) -> None:  # fmt: skip
    """Draw each search under its title: a row per trial, in the order in which they ran, and a line per rung.

    searches: the reports of the trials of each search, with `lr`. rates: the learning rate of each trial by its number.
    best: the number of the best trial, which reaches `accuracy`. If a search stops it, its missing epochs are hatched.
    """
    size = (5.2 * len(searches), 0.9 + 0.34 * len(rates))
    _, grid = plots.plt.subplots(1, len(searches), figsize=size, layout="constrained", squeeze=False)
    for axes, (title, trials) in zip(grid[0], searches.items(), strict=True):
        axes.set_title(f"{title}: {sum(map(len, trials))} epochs", loc="left", fontsize=11)
        numbers = [rates.index(rows[0]["lr"]) for rows in trials]
        for place, (number, rows) in enumerate(zip(numbers, trials, strict=True)):
            stopped = len(rows) < epochs
            color = plots.COLORS[5 if stopped else 0]
            if number == best:
                color = plots.COLORS[4 if stopped else 2]
            pieces = [(epoch, 1) for epoch in range(len(rows))]
            axes.broken_barh(pieces, (place - 0.32, 0.64), color=color, edgecolor="white")
            if number == best and stopped:
                rest = {"left": len(rows), "color": "none", "edgecolor": color, "hatch": "//", "alpha": 0.5}
                axes.barh(place, epochs - len(rows), 0.64, **rest)
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
                label = {"ha": "center", "va": "center", "fontsize": 9, "color": color, "bbox": box}
                axes.text((epochs + len(rows)) / 2, place, f"stopped ({accuracy:.2f} in section 1)", **label)
            elif not stopped:
                reached = max(row["accuracy"] for row in rows)
                axes.text(epochs + 0.15, place, f"{reached:.2f}", va="center", fontsize=9, color=color)
        for rung in rungs:
            axes.axvline(rung, color="black", linestyle=":", linewidth=1)
        axes.set_yticks(range(len(numbers)), [f"trial {number}, lr {rates[number]:.4f}" for number in numbers])
        axes.set_xticks([0, *rungs, epochs])
        axes.set(xlabel="epochs; dotted: rungs", xlim=(0, epochs * 1.1))
        axes.spines[["top", "right"]].set_visible(False)
        axes.invert_yaxis()


def draw_totals(totals: Sequence[int], kept: Sequence[bool], trials: int, epochs: int) -> None:
    """Draw a histogram of the orders' epochs: at the bottom the orders that keep the best trial, on top the others."""
    axes = plots.new_axes("Ray's ASHA, a thousand orders of the same trials", "epochs in total", "orders")
    parts = [np.array(totals)[np.array(kept) == is_kept] for is_kept in (True, False)]
    labels = ["the winner trains to its end", "the winner is stopped"]
    bins, colors = range(trials, trials * epochs + 2, 2), [plots.COLORS[2], plots.COLORS[4]]
    axes.hist(parts, bins=bins, stacked=True, color=colors, edgecolor="white", label=labels)
    axes.legend(frameon=False)
