"""The check of lesson 2.5: a right port passes, and each plausible wrong one is told what was seen."""

import json
from pathlib import Path

import pytest
from answers import assert_accepts, assert_rejects

from shared import checks
from shared.checks import chapter_2

LOSSES = [2.0, 1.5, 1.25, 1.125]
RIGHT = {"epochs": [0, 1, 2, 2, 3], "crashed": True, "losses": LOSSES, "exit_code": 0, "errors": ""}


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
        {"exit_code": 1, "epochs": [0, 1, 2], "losses": None, "errors": "WorkerGroupError: a worker died"},
        "a worker died in epoch 2, and the run ended: how many failures does your RunConfig permit?",
    ),
    "an error": (
        {"exit_code": 1, "epochs": [], "crashed": False, "losses": None, "errors": "NameError: name 'worker' is ..."},
        "the script failed: NameError: name 'worker'",
    ),
    "an error after the restart": (
        {"exit_code": 1, "epochs": [0, 1, 2, 2], "losses": None, "errors": "KeyError: 'losses'"},
        "the script failed: KeyError: 'losses'",
    ),
    "one worker": ({"crashed": False, "epochs": [0, 1, 2, 3]}, "no worker died: are there two"),
    "no checkpoint": ({"epochs": [0, 1, 2, 0, 1, 2, 3]}, "0, 1, 2, 0, 1, 2, 3; expected 0, 1, 2, 2, 3. The second"),
    "the last epoch again": ({"epochs": [0, 1, 2, 1, 2, 3]}, "the first epoch that is not done"),
    "a relative path": ({"losses": None}, "give it an absolute path"),
    "the losses of the second attempt": ({"losses": LOSSES[2:]}, "2 losses, expected 4"),
    "weights alone": ({"losses": [2.0, 1.5, 1.25, 1.3]}, "the loss of epoch 3 is 1.3, expected 1.125. It is after"),
    "the whole batch on both": ({"losses": [1.9, 1.4, 1.2, 1.1]}, "the loss of epoch 0 is 1.9, expected 2. Do both"),
}


@pytest.mark.parametrize("what", WRONG)
def test_2_5a_rejects(what, port, capsys):
    changes, because = WRONG[what]
    assert_rejects(checks.exercise_2_5a, port(**changes), because, capsys)


def test_2_5a_is_not_done_yet(tmp_path, capsys):
    (tmp_path / "ported.py").write_text("raise NotImplementedError  # put ddp.py here instead, and port it\n")
    assert_rejects(checks.exercise_2_5a, tmp_path / "ported.py", "not done yet", capsys)
