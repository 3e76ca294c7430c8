"""The run of train_ddp.py that tests kill: its options, and what it must be equal to in the end."""

from pathlib import Path

from runs import assert_bit_for_bit, assert_same_state

EPOCHS, STEPS = 5, 44  # steps an epoch; the MLP's are short, and a kill must fall among them


def options_for_kills(small_mnist: Path) -> tuple:
    """Of an MLP, whose dropout also draws random numbers; a ResNet's rank is killed in lesson 1.4."""
    return (
        "--dataset", "mnist", "--data-dir", small_mnist, "--batch-size", 176 // STEPS, "--epochs", EPOCHS,
        "--model", "mlp", "--run-name", "run",
    )  # fmt: skip


def saved_after(epochs: int) -> str:
    return f"checkpoint-{STEPS * epochs:08d}.pt"


def assert_equal_runs(folder: Path, metrics: list[dict], reference: tuple[Path, list[dict]]) -> None:
    assert_bit_for_bit(metrics, reference[1])
    last = "run/" + saved_after(EPOCHS)
    assert_same_state(folder / last, reference[0] / last)
