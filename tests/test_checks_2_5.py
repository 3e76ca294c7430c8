"""The check of lesson 2.5: a right port passes, and each plausible wrong one is told what was seen."""

import json
from pathlib import Path

import pytest
from answers import assert_accepts, assert_rejects

from shared import checks
from shared.checks import chapter_2

LOSSES = [2.0, 1.5, 1.25, 1.125]
RIGHT = {"epochs": [0, 1, 2, 2, 3], "crashed": True, "losses": LOSSES, "exit_code": 0, "errors": ""}

# The end of what a driver writes to stderr, shortened. A worker's lines have a prefix, in color.
DRIVER = """\
\x1b[36m(RayTrainWorker pid=3263)\x1b[0m     step_losses[-1].backward()
\x1b[36m(RayTrainWorker pid=3263)\x1b[0m RuntimeError: Connection closed by peer [127.0.0.1]:14241.
Traceback (most recent call last):
  File "ported.py", line 61, in <module>
    TorchTrainer(train, scaling_config=scaling_config, run_config=run_config).fit()
ray.train.WorkerGroupError: Training failed due to worker errors:
"""
KILLED = """\
[Rank 1 Error Snippet]:
A worker health check failed.
Worker info: Worker(
    pid=3292,
  ),
)
The actor died unexpectedly before finishing this task.
	ip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR
"""
DISCONNECTED = """\
[Rank 0 Error Snippet]:
Traceback (most recent call last):
    step_losses[-1].backward()
RuntimeError: [pair.cc:561] Connection closed by peer [127.0.0.1]:14241.
"""
RAISED = """\
[Rank 0 Error Snippet]:
Traceback (most recent call last):
  File "ported.py", line 33, in restore
    return state["loss"]
           ~~~~~^^^^^^^^
KeyError: 'loss'
"""
RELATIVE = """\
Traceback (most recent call last):
    raise value
ray.exceptions.ActorDiedError: The actor died because of an error raised in its creation task
    return pyarrow.fs.FileSystem.from_uri(storage_path)
pyarrow.lib.ArrowInvalid: URI has empty scheme: 'runs/ray'
"""


@pytest.fixture
def port(monkeypatch, tmp_path):
    """port(what its run leaves, where it differs from a right one): a script next to a right ddp.py."""

    def make(**changes):
        left = RIGHT | changes
        script = tmp_path / "ported.py"
        script.write_text("")

        def run_command(words, timeout, **variables):
            assert words[0] == str(script)
            folder = Path(words[1])
            if left["epochs"]:
                (folder / "epochs.txt").write_text("".join(f"{epoch}\n" for epoch in left["epochs"]))
            if left["crashed"]:
                (folder / "crashed").touch()
            if left["losses"]:
                (folder / "metrics.json").write_text(json.dumps({"losses": left["losses"]}))
            return left["exit_code"], left["errors"]

        def run_script(path, nproc, folder):
            assert (path, nproc) == (tmp_path / "ddp.py", 2) and Path(folder, "crashed").exists()
            Path(folder, "metrics.json").write_text(json.dumps({"losses": LOSSES}))

        monkeypatch.setattr(chapter_2, "run_command", run_command)
        monkeypatch.setattr(chapter_2, "run_script", run_script)
        return script

    return make


def test_2_5a_accepts(port, capsys):
    assert_accepts(checks.exercise_2_5a, port(), capsys)


WRONG = {
    "no failure permitted": (
        {"exit_code": 1, "epochs": [0, 1, 2], "losses": None, "errors": DRIVER + KILLED},
        "the run ended when a worker died in epoch 2: how many failures does your RunConfig permit?",
    ),
    "no failure permitted, and both ranks report": (
        {"exit_code": 1, "epochs": [0, 1, 2], "losses": None, "errors": DRIVER + DISCONNECTED + KILLED},
        "the run ended when a worker died in epoch 2: how many failures does your RunConfig permit?",
    ),
    "an error": (
        {"exit_code": 1, "epochs": [], "crashed": False, "losses": None, "errors": "NameError: name 'worker' is ..."},
        "the script failed: NameError: name 'worker'",
    ),
    "an error of Ray": (
        {"exit_code": 1, "epochs": [], "crashed": False, "losses": None, "errors": RELATIVE},
        "the script failed: pyarrow.lib.ArrowInvalid: URI has empty scheme: 'runs/ray'",
    ),
    "an error as it restores": (
        {"exit_code": 1, "epochs": [0, 1, 2], "losses": None, "errors": DRIVER + RAISED},
        "the script failed after the restart: KeyError: 'loss'",
    ),
    "an error in the second attempt": (
        {"exit_code": 1, "epochs": [0, 1, 2, 2], "losses": None, "errors": DRIVER + RAISED},
        "the script failed after the restart: KeyError: 'loss'",
    ),
    "one worker": ({"crashed": False, "epochs": [0, 1, 2, 3]}, "no worker died: are there two"),
    "no checkpoint": ({"epochs": [0, 1, 2, 0, 1, 2, 3]}, "0, 1, 2, 0, 1, 2, 3; expected 0, 1, 2, 2, 3. The second"),
    "the last epoch again": ({"epochs": [0, 1, 2, 1, 2, 3]}, "the first epoch that is not done"),
    "a relative path": ({"losses": None}, "give it an absolute path"),
    "the losses of the second attempt": ({"losses": LOSSES[2:]}, "2 losses, expected 4: keep those of the first"),
    "weights alone": ({"losses": [2.0, 1.5, 1.25, 1.3]}, "the loss of epoch 3 is 1.3, expected 1.125. This epoch"),
    "the whole batch on both": ({"losses": [1.9, 1.4, 1.2, 1.1]}, "the loss of epoch 0 is 1.9, expected 2. Do both"),
}


@pytest.mark.parametrize("what", WRONG)
def test_2_5a_rejects(what, port, capsys):
    changes, because = WRONG[what]
    assert_rejects(checks.exercise_2_5a, port(**changes), because, capsys)


def test_2_5a_asks_a_port_that_hangs_for_reports(port, monkeypatch, capsys):
    script = port()

    def hang(words, timeout, **variables):
        raise chapter_2.Wrong(f"it hangs: still running after {timeout} s. Does every rank reach every collective?")

    monkeypatch.setattr(chapter_2, "run_command", hang)
    assert_rejects(checks.exercise_2_5a, script, "every collective? report() waits for all", capsys)


def test_2_5a_is_not_done_yet(tmp_path, capsys):
    (tmp_path / "ported.py").write_text("raise NotImplementedError  # put ddp.py here instead, and port it\n")
    assert_rejects(checks.exercise_2_5a, tmp_path / "ported.py", "not done yet", capsys)
