"""For tests and lessons: their order, and what they have cost: wall and CPU minutes, and the ten slowest files."""

import os
import tempfile
import threading
import time
from collections import defaultdict

import jupyter_client
import psutil
import pytest
from traitlets import default

STARTED = time.time()
collect_ignore_glob = ["*/yours-*.ipynb"]  # what `make reset` has put aside
LONG = ("test_train", "test_program", "test_elastic", "test_troubleshooting", "test_autoscale", "test_small_runs")
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


class Watch(threading.Thread):
    """Adds up the CPU time of this process and of all below it, also of those that nobody waits for, as Ray's.

    It looks twice a second: what a process uses after the last look, and one that lives for less, is not seen.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.me, self.alive, self.total = psutil.Process(), {}, 0.0

    def run(self) -> None:
        while True:
            for process in (self.me, *self.me.children(recursive=True)):
                self.alive.setdefault(process, 0.0)
            for process, before in list(self.alive.items()):  # also those that have lost their parent
                try:
                    times = process.cpu_times()
                    self.alive[process] = times.user + times.system
                    self.total += self.alive[process] - before
                except psutil.Error:
                    del self.alive[process]
            time.sleep(0.5)


watch = Watch()
seen = 0.0


def pytest_collection_modifyitems(items):
    """The long files come first, so that none of them is still running alone at the end."""
    items.sort(key=lambda item: (not item.path.name.startswith(LONG), item.path.suffix != ".ipynb"))


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
    rows = [((time.time() - STARTED, watch.total), "in all")]
    slowest_first = sorted(costs.items(), key=lambda item: item[1], reverse=True)
    rows += [(cost, file) for file, cost in slowest_first[: None if config.option.verbose > 0 else 10]]
    terminalreporter.section("minutes")
    terminalreporter.write_line("   wall     CPU")
    for (wall, cpu), what in rows:
        terminalreporter.write_line(f"{wall / 60:7.1f} {cpu / 60:7.1f}  {what}")
