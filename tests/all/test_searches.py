"""Chapter 4's searches run: one gets a SIGKILL and goes on, one diverges, and one trains each trial on two workers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from program import SMALL, begin, options, reports, run
from runs import LIMIT, ROOT, has_traceback
from training import config as configuration

SYNTHETIC = ("dataset.kind=synthetic", "model.kind=mlp", "dataset.num_samples=200", "training.batch_size=10")
SEARCH = (*SMALL, "tuning.num_samples=4", "tuning.epochs=[2, 6]", "tuning.lr.lowest=1e-3", "tuning.lr.highest=3e-2")


def finished(folder: Path) -> dict[Path, bytes]:
    """The reports of the trials that are on record as finished in Tune's newest note, and whose files are there."""
    found = {}
    for note in sorted(folder.glob("experiment_state-*.json"))[-1:]:
        try:
            trials = [json.loads(trial) for trial, _ in json.loads(note.read_text())["trial_data"]]
        except json.JSONDecodeError:  # it is being written
            break
        for trial in (trial for trial in trials if trial["status"] == "TERMINATED"):
            for path in folder.glob(f"*{trial['trial_id']}*/result.json"):
                if path.read_text().count("\n") == trial["config"]["epochs"]:
                    found[path] = path.read_bytes()
    return found


def test_a_search_is_killed_and_resumed_and_writes_its_winner(program, on_cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "0.2")
    one_by_one = "tuning.resources_per_trial={CPU: 3}"  # of 4
    searching = [*options(program, "search", *SEARCH, one_by_one), "--out", "best"]
    process, deadline = begin(program, tmp_path, "tune", *searching), time.monotonic() + LIMIT
    folder = tmp_path / "runs/search"
    done = {}
    while not done:
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
        time.sleep(0.05)
        if finished(folder):
            process.send_signal(signal.SIGSTOP)  # Tune writes its note in place: let it not be in the middle of it
            time.sleep(0.1)
            done = finished(folder)
            if not done:
                process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGKILL)
    assert process.wait(LIMIT) == -signal.SIGKILL
    assert 1 <= len(done) < 4

    (tmp_path / "output").unlink()
    said = run(program, tmp_path, "tune", *searching, "--resume")
    assert not has_traceback(said) and len([line for line in said.splitlines() if "  accuracy " in line]) == 4
    assert all(path.read_bytes() == before for path, before in done.items())  # not run again
    found = reports(folder)
    assert len(found) == 4
    assert all([row["epoch"] for row in rows][-1] == rows[-1]["config"]["epochs"] for rows in found.values())

    best = max(rows[-1]["best_accuracy"] for rows in found.values())
    written = configuration.load(tmp_path / "best")
    (chosen,) = [rows[-1] for rows in found.values() if rows[-1]["config"]["lr"] == written.training.lr]
    assert chosen["best_accuracy"] == best and chosen["config"]["epochs"] == written.training.epochs
    assert 1e-3 <= written.training.lr <= 3e-2 and written.training.epochs in (2, 6)
    assert written.model.hidden_dim == 8  # and all that was not searched is as it was

    too_large = [*options(program, "large", *SEARCH, "tuning.resources_per_trial={CPU: 99}"), "--out", "none"]
    (tmp_path / "output").unlink()
    said = run(program, tmp_path, "tune", *too_large, code=2)
    assert "error: tuning.resources_per_trial = {'CPU': 99.0}: more than any node has;" in said
    assert "the cluster has {'CPU': 4.0} in total" in said


def test_a_users_error_ends_a_trial_at_once(program, on_cluster, tmp_path):
    """Tune would try again what raises, and a training that has diverged diverges again."""
    too_fast = ("tuning.num_samples=1", "tuning.lr.lowest=1e30", "tuning.lr.highest=1e31")
    command = [*options(program, "search", *SYNTHETIC, *too_fast), "--out", "best"]
    said = run(program, tmp_path, "tune", *command, code=1)
    assert "tune.py: failed: every trial failed, the first with: diverged: the loss of step " in said
    assert not has_traceback(said) and not list(tmp_path.glob("runs/search/*/error.txt"))
    ((row,),) = reports(tmp_path / "runs/search").values()
    assert "diverged" in row["error"] and not (tmp_path / "best/environment.yaml").exists()


def test_a_trial_of_two_workers(on_cluster, tmp_path):
    """Lesson 4.2 shows the script, and does not run it."""
    changes = (*SMALL, "tuning.num_samples=1", "tuning.epochs=[2]", "cluster.num_workers=2", "cluster.use_gpu=false")
    command = [sys.executable, ROOT / "04-ray-in-production/tune_over_train.py"]
    command += ["--config-dir", ROOT / "04-ray-in-production/program/config"]
    command += [word for change in changes for word in ("--set", change)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    line, best = [line for line in done.stdout.splitlines() if "  accuracy " in line]
    assert line.endswith("the best of 2  2 workers")
    assert best.endswith("best: " + line.removeprefix("[driver] ").removesuffix("  2 workers"))
