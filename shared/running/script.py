"""Start and end a training script: one line for a mistake, a clean end on Ctrl-C, SIGTERM and SIGHUP."""

import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from shared.distributed import Worker, rank_from_environment
from shared.errors import RunFailed, UsageError
from shared.running import lease

STOPPING = threading.Event()  # a signal has come, and a thread is ending this process


def stop_on_signals(worker: Worker, hint: Callable[[], str], clean_up: Callable[[], None] = lambda: None) -> None:
    """End this process within seconds of Ctrl-C, SIGTERM or a closed terminal, with exit code 128 + signal.

    Rank 0 first says what `hint` returns, such as `Run.resume_hint`. Then `clean_up` is called. Neither can keep the
    process from ending: storage that does not answer, a closed standard output or an error gets a few seconds each.

    A thread handles the signal, because Python runs signal handlers in the main thread only, and that may be waiting in
    a collective for a rank that has gone. The thread receives every signal that has a handler, including the SIGCHLD of
    a DataLoader's workers. Under `nohup`, which ignores SIGHUP, a closed terminal ends nothing.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    stops = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        stops.add(signal.SIGHUP)
    for number in stops:
        signal.signal(number, lambda *_: STOPPING.set())

    def say(name: str, pool: ThreadPoolExecutor) -> None:
        said = pool.submit(hint).result(timeout=6)
        pool.submit(worker.log, f"stopped by {name}: {said}").result(timeout=5)

    def wait() -> None:
        while (number := os.read(read_end, 1)[0]) not in stops:
            pass
        STOPPING.set()
        try:
            pool = ThreadPoolExecutor()
            if worker.rank == 0:
                with contextlib.suppress(Exception):
                    say(signal.Signals(number).name, pool)
                with contextlib.suppress(Exception):
                    pool.submit(lease.release).result(timeout=5)
            pool.submit(clean_up).result(timeout=5)
        finally:
            os._exit(128 + number)

    threading.Thread(target=wait, daemon=True).start()


def refuse_detail() -> None:
    """Raise UsageError: torch 2.15 reads a setting of nccl in gloo's group, and the process ends by SIGSEGV."""
    raise UsageError("TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DistributedDataParallel on CPUs in torch 2.15: use INFO")


def run_main(main: Callable[[], None], describe: Callable[[Exception], str] = str) -> None:
    """Run a script, and end it with one line from rank 0 if it raises a UsageError or a RunFailed.

    The exit code is 2 for a UsageError and 1 for a RunFailed.
    describe: returns the message of such an error, for a program whose options have other names. If rank 0 has no such
    error and the ranks have not met yet, the first process of a node that has one prints it.
    """
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL" and not torch.cuda.is_available():
        main = refuse_detail
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In a file or a pipe lines would wait in a buffer, those of Ray's workers too, and a kill would lose them.
        sys.stdout.reconfigure(line_buffering=True)
    try:
        try:
            main()
        finally:
            lease.release()  # now a different process may continue the run
    except Exception as error:
        reported = isinstance(error, (UsageError, RunFailed))
        if not reported:
            # A stopped rank breaks the others' collectives a moment before their own signal arrives.
            STOPPING.wait(timeout=1)
        if STOPPING.is_set():
            time.sleep(60)  # until the thread ends this process: the error is a consequence of the stop
        if not reported:
            raise
        rank, met = rank_from_environment(), dist.is_initialized()
        if rank != 0:
            # Wait to be ended: torchrun does it when the first process exits, and that is to be rank 0, once it has
            # printed. The ranks cannot agree on it, because they may not have met, and rank 0 may have no error at all.
            time.sleep(30)
        if rank == 0 or (not met and os.environ.get("LOCAL_RANK") == "0"):
            print(f"{Path(sys.argv[0]).name}: {error.kind}: {describe(error)}", file=sys.stderr, flush=True)
        if sys.stdout is not None:  # as with >&-
            sys.stdout.flush()
        # With a process group, skip the teardown of Python's modules, which may abort the process.
        (os._exit if met else sys.exit)(error.exit_code)
