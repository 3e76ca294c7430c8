"""For tests and lessons: their order, and what they have cost: CPU and wall seconds, and the most expensive files."""

import contextlib
import os
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import jupyter_client
import psutil
import pytest
from traitlets import default

from shared.doctor import OPTIONAL_LESSONS

STARTED = time.time()
collect_ignore_glob = ["*/yours-*.ipynb"]  # what `make reset` has put aside
LONG = ("test_train", "test_program", "test_finetune", "test_checks_chapter_3", "test_small_runs")
# Ray prestarts one worker per CPU. Ray Train's workers need their own environment and never use them, so this changes
# nothing but the CPU time: three to four percent of the suite's. (A reader's Ray prestarts them.)
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
os.environ.setdefault("RAY_enable_worker_prestart", "0")
costs = defaultdict(lambda: [0.0, 0.0])  # of a file: wall and CPU seconds


class KernelManager(jupyter_client.AsyncKernelManager):
    """Notebooks and their kernels meet at files, not at ports: another test may take a port before the kernel does."""

    @default("transport")
    def _files(self) -> str:
        return "ipc"

    @default("ip")
    def _how_their_names_begin(self) -> str:
        self.folder = tempfile.TemporaryDirectory(prefix="kernel-", ignore_cleanup_errors=True)
        return f"{self.folder.name}/socket"


jupyter_client.AsyncKernelManager = KernelManager  # which nbclient, and so nbmake, asks for


@dataclass
class Spent:
    """CPU seconds of a process: its own, and those of its children that it waited for, or that were seen to end."""

    parent: psutil.Process | None
    own: float = 0.0
    waited_for: float = 0.0
    ended: float = 0.0

    def in_all(self) -> float:
        return self.own + max(self.waited_for, self.ended)


class Watch(threading.Thread):
    """Adds up the CPU time of this process and of all below it, those that nobody waits for included, as Ray's.

    A process is read once a second until it has ended. What it spent after the last look, and one that lived for less,
    counts only if its parent waited for it.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.me = psutil.Process()
        self.spent, self.orphans, self.total = {self.me: Spent(None)}, 0.0, 0.0

    def look(self) -> None:
        tracked = {process.pid: process for process in self.spent}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process not in self.spent and (parent := tracked.get(process.ppid())):
                    self.spent[process] = Spent(parent)
                    tracked[process.pid] = process
        for process, spent in self.spent.items():
            with contextlib.suppress(psutil.Error):
                user, system, children_user, children_system, *_ = process.cpu_times()
                spent.own, spent.waited_for = user + system, children_user + children_system
        gone = [process for process in self.spent if not process.is_running()]
        for process in reversed(gone):  # children come after their parents
            spent = self.spent.pop(process)
            if spent.parent in self.spent:
                self.spent[spent.parent].ended += spent.in_all()
            else:  # its parent ended first
                self.orphans += spent.in_all()
        self.total = self.orphans + sum(spent.in_all() for spent in self.spent.values())

    def run(self) -> None:
        while True:
            with contextlib.suppress(KeyError):  # a test has taken psutil away
                self.look()
            time.sleep(1)


watch = Watch()
seen = 0.0


def is_long(path: Path) -> bool:
    return path.name.startswith(LONG) or path.parent.name == "all"


def pytest_collection_modifyitems(items):
    """Long files come first, so that none of them is still running alone at the end. Optional lessons are skipped."""
    for item in items:
        package = OPTIONAL_LESSONS.get(item.path.name)
        if package and find_spec(package) is None:
            item.add_marker(pytest.mark.skip(reason=f"{item.path.name} needs the optional package {package}"))
    items.sort(key=lambda item: (not is_long(item.path), item.path.suffix != ".ipynb"))


def pytest_sessionstart():
    watch.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Note in a test's report the CPU seconds since the report before."""
    global seen
    report = yield
    before, seen = seen, watch.total
    report.user_properties.append(("cpu_s", seen - before))
    return report


def pytest_runtest_logreport(report):
    """Add a report to its file's costs."""
    cost = costs[report.nodeid.partition("::")[0]]
    cost[0] += report.duration
    cost[1] += dict(report.user_properties).get("cpu_s", 0)


def pytest_terminal_summary(terminalreporter, config):
    """Print the table."""
    if not costs:
        return
    rows = sorted(((cpu, wall, file) for file, (wall, cpu) in costs.items()), reverse=True)
    terminalreporter.section("seconds: CPU, children included, and wall")
    shown = rows if config.option.verbose > 0 else rows[:10]
    for cpu, wall, what in [(watch.total, time.time() - STARTED, "in all"), *shown]:
        terminalreporter.write_line(f"{cpu:7.0f} {wall:7.0f}  {what}")
