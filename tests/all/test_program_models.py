"""Chapter 4's program trains its other models."""

import pytest
from program import SMALL, here


@pytest.mark.parametrize("changes", [
    ("model.cell=lstm", "model.n_layers=2"),
    ("model.bidirectional=true", "training.precision=bf16"),
    ("model.kind=cnn",),
    ("dataset.kind=synthetic", "model.kind=mlp", "dataset.num_samples=3000", "model.hidden_dim=64"),
])  # fmt: skip
def test_the_other_models_learn(changes, tmp_path):
    """How much depends on the snippets, which are another Python's elsewhere."""
    outcome = here(tmp_path, *SMALL, *changes, "training.lr=0.03", "training.epochs=5")
    first, last = outcome["epochs"][0], outcome["epochs"][-1]
    assert last["train_loss"] < 0.95 * first["train_loss"]
    assert last["train_accuracy"] > first["train_accuracy"] + 0.05
