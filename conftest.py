"""What a run of tests and lessons has cost, at its end: wall and CPU minutes, and the ten slowest files."""

import os
import time
from collections import defaultdict

import pytest

STARTED = time.time()
seen = cpu_s = sum(os.times()[:4])  # user and system seconds, of this process and of all that it has waited for
costs = defaultdict(lambda: [0.0, 0.0])  # of a file: wall and CPU seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Note in a test's report the CPU seconds since the report before, in the process that runs the tests."""
    global seen
    report = yield
    before, seen = seen, sum(os.times()[:4])
    report.user_properties.append(("cpu_s", seen - before))
    return report


def pytest_runtest_logreport(report):
    """Add a report to its file's costs."""
    cost = costs[report.nodeid.partition("::")[0]]
    cost[0] += report.duration
    cost[1] += dict(report.user_properties).get("cpu_s", 0)


def pytest_sessionfinish(session):
    """A process of pytest-xdist tells the first one what it has used in all."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu_s"] = sum(os.times()[:4])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Add what a process of pytest-xdist has used."""
    global cpu_s
    cpu_s += getattr(node, "workeroutput", {}).get("cpu_s", 0)


def pytest_terminal_summary(terminalreporter, config):
    """Print the table."""
    if hasattr(config, "workerinput") or not costs:
        return
    total = cpu_s if config.getoption("numprocesses", None) else sum(os.times()[:4])
    rows = [((time.time() - STARTED, total), "in all")]
    slowest_first = sorted(costs.items(), key=lambda item: item[1], reverse=True)
    rows += [(cost, file) for file, cost in slowest_first[: None if config.option.verbose > 0 else 10]]
    terminalreporter.section("minutes")
    terminalreporter.write_line("   wall     CPU")
    for (wall, cpu), what in rows:
        terminalreporter.write_line(f"{wall / 60:7.1f} {cpu / 60:7.1f}  {what}")
