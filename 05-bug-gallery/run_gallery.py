"""Run exhibits of a gallery, and write what the ranks report to FOLDER/results.json.

    torchrun --standalone --nproc-per-node 2 run_gallery.py gallery FOLDER                    all that end
    torchrun --standalone --nproc-per-node 2 run_gallery.py gallery FOLDER exhibit_09_before  one of those that hang

Exhibit 11 needs three ranks. In a launch that hangs, FOLDER/NAME/report-RANK.json has what a rank has reported before.

Two exhibits hold races, which normally go wrong only now and then. Here `STAGE` fixes the order of events, so that they
go wrong each time. Exhibits that hang also leave FOLDER/NAME-RANK.json: the collectives of the rank, and the calls that
its main thread was in when it was last seen.
"""

import importlib
import io
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from collective_log import CollectiveLog

from shared import distributed
from shared.distributed import Worker

TIMEOUT = timedelta(seconds=float(os.environ.get("TIMEOUT_S", 5)))  # of those that hang
HANG = ("exhibit_09_before", "exhibit_09_variant", "exhibit_10_before", "exhibit_11_before")
ON_THREE_RANKS = ("exhibit_11_fixed", "exhibit_11_variant")
LOGGED = (*HANG, "exhibit_09_fixed")


@contextmanager
def slow_network(worker: Worker, gallery) -> Iterator[None]:
    """Let rank 1 come when rank 0 has written half of the file, and rank 0 write the rest when rank 1 has left."""
    download_at_once = gallery.download

    def download(path: Path) -> None:
        download_at_once(path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        distributed.wait_for_all()  # rank 1 may come
        distributed.wait_for_all()  # rank 1 has been there
        path.write_bytes(content)

    if worker.rank == 1:
        distributed.wait_for_all()
    try:
        with mock.patch.object(gallery, "download", download):
            yield
    finally:
        if worker.rank == 1:
            distributed.wait_for_all()


@contextmanager
def slow_disk(worker: Worker, gallery) -> Iterator[None]:
    """Let the ranks open their files together and write in turns: each its first half, then each its second half."""
    save_at_once = torch.save

    def save(state: dict, path: Path) -> None:
        content = io.BytesIO()
        save_at_once(state, content)
        half = len(content.getvalue()) // 2
        with open(path, "wb") as file:
            distributed.wait_for_all()
            for part in (content.getvalue()[:half], content.getvalue()[half:]):
                for rank in range(worker.world_size):
                    if rank == worker.rank:
                        file.write(part)
                        file.flush()
                    distributed.wait_for_all()

    with mock.patch.object(torch, "save", save):
        yield


STAGE = {"exhibit_02_before": slow_network, "exhibit_07_before": slow_disk, "exhibit_07_fixed": slow_disk}


@contextmanager
def watched(worker: Worker, gallery, place: Path) -> Iterator[None]:
    """Log the collectives of this rank, and write down twice a second which calls its main thread is in.

    faulthandler.dump_traceback_later would need one line. But it reads the stack while the thread may be changing it,
    which now and then ends the process. The thread here holds the lock that the main thread runs by.
    """
    log, done, main_thread = CollectiveLog(), threading.Event(), threading.main_thread().ident

    def note() -> None:
        while not done.wait(0.5):
            frame = sys._current_frames()[main_thread]
            calls = [(Path(at.filename).name, at.lineno, at.name) for at in reversed(traceback.extract_stack(frame))]
            if any(file == "gallery.py" for file, *_ in calls):  # not while the process is ending
                write(place, {"collectives": log.events, "calls": calls})

    dist.barrier()
    dist.set_timeout(TIMEOUT)  # only now: until here the ranks may take longer to meet
    threading.Thread(target=note, daemon=True).start()
    try:
        with log.installed(gallery):
            yield
        write(place, {"collectives": log.events, "calls": []})
    finally:
        done.set()


def write(path: Path, content: object) -> None:
    part = path.with_suffix(f".{threading.get_ident()}.part")
    part.write_text(json.dumps(content))
    part.replace(path)


def run(exhibit: Callable, worker: Worker, folder: Path, stage: AbstractContextManager) -> list[dict]:
    """Run an exhibit on every rank, and return what each reports. A model is reported as the list of its weights."""
    distributed.seed_everything(7)
    distributed.wait_for_all()
    try:
        with stage:
            report = exhibit(worker, folder)
    except Exception as error:
        if exhibit.__name__ in HANG:
            raise
        report = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    for name, value in report.items():
        if isinstance(value, torch.nn.Module):
            report[name] = torch.nn.utils.parameters_to_vector(value.parameters()).tolist()
    write(folder / f"report-{worker.rank}.json", report)  # another rank may hang
    distributed.wait_for_all()
    return distributed.gather_objects(report)


def main() -> None:
    module, root, *names = sys.argv[1:]
    gallery, root, worker = importlib.import_module(module), Path(root), distributed.join(timeout_s=120)
    results = {}
    default = [name for name in vars(gallery) if name.startswith("exhibit_") and name not in (*HANG, *ON_THREE_RANKS)]
    for name in names or default:
        exhibit, folder, stage = getattr(gallery, name), root / name, nullcontext()
        folder.mkdir(exist_ok=True)
        if name in STAGE:
            stage = STAGE[name](worker, gallery)
        elif name in LOGGED:
            stage = watched(worker, gallery, root / f"{name}-{worker.rank}.json")
        results[name] = run(exhibit, worker, folder, stage)
        if STAGE.get(name) is slow_network:
            results[f"{name}, again"] = run(exhibit, worker, folder, nullcontext())  # the file is there now
    if worker.rank == 0:
        write(root / "results.json", results)
    distributed.leave()


if __name__ == "__main__":
    main()
