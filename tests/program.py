"""Chapter 4's program as the tests run it: from a copy that is installed elsewhere, on small settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

from runs import LIMIT, ROOT

PROGRAM = ROOT / "04-ray-in-production/program"
# 2,560 snippets for training in batches of 60: the last one has 40.
SMALL = (
    "dataset.vocab_size=200", "dataset.max_length=12", "model.embedding_dim=8", "model.hidden_dim=8",
    "training.batch_size=60", "training.epochs=3", "training.lr=0.01",
)  # fmt: skip
EXACT = (*SMALL, "training.precision=fp64", "model.dropout=0")


def begin(program: Path, folder: Path, module: str, *args: object) -> subprocess.Popen:
    """Start one of the program's modules in `folder`; its output goes into the file `output` there."""
    environment = {**os.environ, "PYTHONPATH": str(program.parent / "site"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"training.{module}", *map(str, args)]
    with open(folder / "output", "a") as output:
        return subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)


def run(program: Path, folder: Path, module: str, *args: object, code: int = 0) -> str:
    """Run one of the program's modules to its end; what is in `output` then."""
    process = begin(program, folder, module, *args)
    assert process.wait(LIMIT) == code, (folder / "output").read_text()
    return (folder / "output").read_text()


def options(program: Path, name: str, *changes: str) -> list[str]:
    return [
        "--config-dir",
        str(program / "config"),
        "--run-name",
        name,
        *(word for change in changes for word in ("--set", change)),
    ]


def result(folder: Path, name: str) -> dict:
    return json.loads((folder / "logs" / name / "metrics.json").read_text())


def losses(outcome: dict) -> list[float]:
    return [loss for line in outcome["epochs"] for loss in line["step_losses"]]


def reports(folder: Path) -> dict[Path, list[dict]]:
    """Each trial's reports of a search, by their file."""
    return {path: [json.loads(line) for line in path.open()] for path in folder.glob("*/result.json")}


def here(folder: Path, *changes: str, state: dict | None = None) -> dict:
    """Train in this process."""
    from training import config as configuration
    from training import data, trainer, utils

    from shared.distributed import Worker
    from shared.running.runs import Run

    config = configuration.load(PROGRAM / "config", [f"paths.processed_data_dir={folder}/data", *changes])
    run_folder = folder / "runs/here"
    run_folder.mkdir(parents=True, exist_ok=True)
    data_folder = data.prepare(config.dataset, config.paths.processed_data_dir, max_workers=2)
    folders = trainer.Folders(str(run_folder), data_folder, str(folder / "logs/here"))
    store = utils.store_in(Run(run_folder), config.checkpoint.keep_best)
    return trainer.train(config, folders, Worker(), lambda: state, store)
