"""Run several scripts on the same ranks, one after the other, each in a fork of a rank that has imported torch already.

torchrun ... many_scripts.py FOLDER [MODULE...]

imports the modules and runs, for each folder FOLDER/N, the words in FOLDER/N/command.json, of which the first is a
script. Each rank's fork writes what it prints to FOLDER/N/RANK.out, its errors to FOLDER/N/RANK.err, and its exit code
to FOLDER/N/RANK.code. Where one rank fails, the others are ended two seconds later, as torchrun would end them.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from shared import distributed, measure, models  # noqa: F401  (imported once, for all scripts)


def run(folder: Path) -> None:
    """Run the script of `folder` in this process, until its end."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{os.environ['RANK']}.{name}", os.O_WRONLY | os.O_CREAT), number)
    command = json.loads((folder / "command.json").read_text())
    sys.argv = command["words"]
    if command["port"]:  # a store of its own
        os.environ.update(MASTER_PORT=str(command["port"]), TORCHELASTIC_USE_AGENT_STORE="False")
    code = 1
    # This makes a new thread pool. Otherwise the threads of FSDP2's first backward pass, which ask for it at once, may
    # find none ("Invalid thread pool!", torch 2.15).
    torch.set_num_threads(torch.get_num_threads())
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each fork's garbage collector looks through, and copies, all that was imported
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        if (pid := os.fork()) == 0:
            run(folder)
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if any(path.read_text() not in ("", "0") for path in folder.glob("*.code")):
                time.sleep(2)  # it may have something to say about the loss of its partner
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        (folder / f"{os.environ['RANK']}.code").write_text(str(os.waitstatus_to_exitcode(ended[1])))
