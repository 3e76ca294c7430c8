"""Continue a run without --resume, on every node, after torchrun has restarted it.

torchrun runs one agent per node. When a process dies on any node, the agents end all processes and start new ones,
which know nothing of the old ones. The store through which the ranks meet is on the node of rank 0 and is lost with it.
So each node keeps a note in the run's folder. The file is named after the agent, which survives, and it holds the step
of the newest checkpoint. A later start of the same script has a different agent and does not find the note.
"""

import glob
import json
import os
import socket
from pathlib import Path

import psutil

from shared import checkpoint
from shared.distributed import Worker, check_same, fail_together, from_rank_zero, gather_objects
from shared.errors import UsageError
from shared.running import runs
from shared.running.lease import start_time


class RestartableRun(runs.Run):
    """A run under torchrun, or in a single process.

    saved_step: the step of its newest checkpoint; -1 if there is none yet.
    """

    saved_step = -1

    @classmethod
    def find(cls, storage_path: str, name: str | None, options: dict | None = None) -> "RestartableRun":
        """Return the run of this name under `storage_path`, or of a new name. Collective.

        It is the same on every rank, and after every restart by torchrun. Raises UsageError, on every rank, if the
        nodes were started with different options.
        """
        if "://" in storage_path:
            raise UsageError(f"--storage-path {storage_path} is a URI, but this script needs a folder")
        folder, note = Path(storage_path).absolute(), None
        with fail_together():
            note = find_note(folder, name)
        check_same(json.dumps(options), "the nodes were started with different options; give all of them the same")
        # Rank 0 may be on a different host than before the restart, so any node's note counts.
        notes = [note for note in gather_objects(note) if note]
        run = cls(folder / (name or from_rank_zero(runs.new_name())), options)
        if notes:
            name, run.saved_step, run.token = max(notes, key=lambda note: note[1])
            run.folder, run.restarted = folder / name, True
        run.token = from_rank_zero(run.token)
        return run

    def check_opening(self, resume: bool) -> None:
        """Raise ValueError as `Run.check_opening` does, or if the checkpoint from before a restart is missing here."""
        newest = next(iter(self.list_newest_first()), None)
        if self.saved_step >= 0 and (not newest or newest < checkpoint.path_for_step(self.folder, self.saved_step)):
            raise ValueError(
                f"the checkpoint after step {self.saved_step} is not in {self.folder} on {socket.gethostname()}, where "
                "rank 0 is now: give all nodes a --storage-path that they share, or --resume with rank 0 where it is"
            )
        super().check_opening(resume)

    def open_or_resume(self, resume: bool, worker: Worker) -> dict | None:
        """Do what `Run.open_or_resume` does, and note on this node that the run is this job's."""
        state = super().open_or_resume(resume, worker)
        if not self.restarted:
            write_note(Path(self.folder), state["progress"]["step"] if state else -1, self.token)
        elif state is None:
            worker.log("restarted before anything was saved: starting from scratch")
        return state

    def save(self, state: dict, worker: Worker) -> None:
        """Save as `Run.save` does, and note the step on each node. Collective."""
        super().save(state, worker)
        with fail_together():
            if worker.local_rank == 0:
                write_note(Path(self.folder), state["progress"]["step"], self.token)


def note_name() -> str | None:
    """Return the name of this job's notes on this node, or None if no agent has started this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    # The agent sets the variable for its processes. There may be a wrapper, such as numactl, in between.
    agent = next(each for each in psutil.Process().parents() if "TORCHELASTIC_RUN_ID" not in each.environ())
    return f".torchrun-{socket.gethostname()}-{agent.pid}-{start_time(agent.pid):.0f}"


def write_note(folder: Path, step: int, token: str) -> None:
    """Note on this node that the run in `folder` is this job's, and its newest step, or -1 if there is none.

    token: the one in the run's lease, which the job keeps over its restarts.
    """
    if (name := note_name()) is not None:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{name}.partial"
        partial.write_text(f"{step} {token}")
        os.replace(partial, folder / name)


def find_note(storage_path: Path, run_name: str | None = None) -> tuple[str, int, str] | None:
    """Return (run name, newest step or -1, token) from this node's note under `storage_path`, or None.

    run_name: of the run that it must belong to, for an agent whose script trains several runs.
    """
    name, folder = note_name(), "*" if run_name is None else glob.escape(run_name)
    found = [] if name is None else list(storage_path.glob(f"{folder}/{name}"))
    if not found:
        return None
    step, token = found[0].read_text().split()
    return found[0].parent.name, int(step), token
