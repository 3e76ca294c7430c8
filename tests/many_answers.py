"""Several scripts for the same ranks, one after the other: each in a fork of a rank that has imported torch already.

torchrun ... many_answers.py FOLDER [MODULE...]

imports the modules, runs, for each N, FOLDER/N/command.json, a list of words that begins with a script, and writes what
each rank's fork says to FOLDER/N/RANK.err, and its exit code to FOLDER/N/RANK.code. Where one fails the others are
ended, as torchrun would.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

from shared import distributed, measure, models  # noqa: F401


def run(folder: Path) -> None:
    """The script of `folder`, in this process, until its end."""
    errors = os.open(folder / f"{os.environ['RANK']}.err", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    sys.argv = json.loads((folder / "command.json").read_text())
    os.environ["TORCHELASTIC_RESTART_COUNT"] = folder.name  # keys of its own in the store that all of them share
    if (folder / "port").exists():  # Ray's local mode needs a store of its own
        os.environ.update(MASTER_PORT=(folder / "port").read_text(), TORCHELASTIC_USE_AGENT_STORE="False")
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


for name in sys.argv[2:]:
    importlib.import_module(name)
for folder in sorted(Path(sys.argv[1]).iterdir()):
    if (pid := os.fork()) == 0:
        run(folder)
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if any(path.read_text() not in ("", "0") for path in folder.glob("*.code")):
            time.sleep(2)  # what it says about the loss of its partner
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    (folder / f"{os.environ['RANK']}.code").write_text(str(os.waitstatus_to_exitcode(ended[1])))
