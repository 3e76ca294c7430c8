"""How a check runs a learner's script on several ranks, or many in one launch, and ends what hangs or fails."""

import contextlib
import os
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from answers import assert_rejects

from checks import machinery

SCRIPTS = {
    "right": "import os, sys\nnames = 'RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS'\n"
    "print(*(os.environ[name] for name in names), *sys.argv[1:])",
    "stub": "import os\nif os.environ['RANK'] == '1':\n    raise NotImplementedError",
    "failing": "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('12 samples cannot be dealt')",
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What run_script returned or raised for each of SCRIPTS on two ranks, started together to save time."""
    folder = tmp_path_factory.mktemp("a folder with spaces")

    def launch(name):
        path = folder / f"{name}.py"
        path.write_text(SCRIPTS[name])
        try:
            return machinery.run_script(path, 2, "--flag", "two words")
        except (NotImplementedError, machinery.Wrong) as error:
            return error

    with ThreadPoolExecutor() as pool:
        return dict(zip(SCRIPTS, pool.map(launch, SCRIPTS), strict=True))


def test_run_script_returns_what_each_rank_prints_in_the_order_of_ranks(launched):
    assert launched["right"] == ["0 2 1 --flag two words\n", "1 2 1 --flag two words\n"]


def test_run_script_tells_a_stub_from_a_mistake(launched):
    assert isinstance(launched["stub"], NotImplementedError)
    assert isinstance(launched["failing"], machinery.Wrong)
    assert str(launched["failing"]).startswith("the script failed: ")
    assert "ValueError: 12 samples cannot be dealt" in str(launched["failing"])


GROUP = """
import torch
from torch.distributed.distributed_c10d import _get_default_store
from shared import distributed
worker = distributed.join()
known = _get_default_store().check(["a key"])  # a group of its own finds no addresses of an earlier one
print(known, distributed.global_sum(torch.tensor(worker.rank + {})).item())
_get_default_store().set("a key", "")
distributed.leave()
"""
IN_ONE_LAUNCH = {
    "imports": "import sys\nprint('this' in sys.modules)",
    "right": SCRIPTS["right"],
    "group": GROUP.format(1),
    "stub": SCRIPTS["stub"],
    "partner": SCRIPTS["failing"] + "\nimport time\ntime.sleep(800)\nprint('too late')",
    "exit": "import os, sys\nif os.environ['RANK'] == '0':\n    sys.exit(3)",
    "another group": GROUP.format(10),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How each script of IN_ONE_LAUNCH ended on two ranks that had imported `this`, which nothing else imports."""
    folder = tmp_path_factory.mktemp("another folder with spaces")
    for name, script in IN_ONE_LAUNCH.items():
        (folder / f"{name}.py").write_text(script)
    commands = [[folder / f"{name}.py", "--flag", "two words"] for name in IN_ONE_LAUNCH]
    return dict(zip(IN_ONE_LAUNCH, machinery.run_scripts(commands, 2, ["this"], timeout=600), strict=True))


def test_run_scripts_returns_what_each_rank_prints_in_the_order_of_scripts_and_ranks(ended):
    printed = ["0 2 1 --flag two words\n", "1 2 1 --flag two words\n"]
    assert ended["right"] == machinery.Ended(printed, exit_code=0, errors="")


def test_run_scripts_imports_the_modules_before_the_first_script(ended):
    assert ended["imports"] == machinery.Ended(["True\n", "True\n"], exit_code=0, errors="")


def test_run_scripts_gives_each_script_a_process_group_of_its_own(ended):
    assert ended["group"].printed == ["False 3\n", "False 3\n"]
    assert ended["another group"].printed == ["False 21\n", "False 21\n"]


def test_run_scripts_tells_a_stub_from_a_mistake_and_ends_the_partner_of_a_failed_rank(ended):
    with pytest.raises(NotImplementedError):
        machinery.expect_success(ended["stub"].exit_code, ended["stub"].errors)
    with pytest.raises(machinery.Wrong, match="the script failed: ValueError: 12 samples cannot be dealt"):
        machinery.expect_success(ended["partner"].exit_code, ended["partner"].errors)
    assert ended["partner"].printed == ["", ""]


def test_gloos_words_for_a_message_that_is_too_long_are_explained():
    said = "what():  [enforce fail at pair.cc:464] op.preamble.length <= op.nbytes. 1304 vs 4"
    with pytest.raises(machinery.Wrong, match="the ranks were in different collectives, whose sizes do not match"):
        machinery.expect_success(1, said)


def test_run_scripts_returns_the_exit_code_of_a_script_that_calls_sys_exit(ended):
    assert (ended["exit"].exit_code, ended["exit"].errors) == (3, "")


def test_a_rank_that_aborts_while_it_exits_is_told_to_leave_unless_another_error_came_first():
    aborted = "terminate called without an active exception\ntorch...errors.ChildFailedError: \nSIGABRT\n"
    with pytest.raises(
        machinery.Wrong, match=r"but one rank aborted while it exited\. End it with `distributed\.leave"
    ):
        machinery.expect_success(1, aborted)
    with pytest.raises(machinery.Wrong, match="the script failed: ValueError: 12 samples"):
        machinery.expect_success(1, "ValueError: 12 samples cannot be dealt\n" + aborted)


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """A launcher that, like torchrun, starts a rank in a session of its own and waits; returns a file with its pid."""
    launcher, rank = tmp_path / "launcher", tmp_path / "rank"
    launcher.write_text(f"#!/bin/sh\nsetsid sleep 600 &\necho $! > '{rank}'\nwait\n")
    launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(machinery.sys, "executable", str(launcher))
    return rank


def assert_is_gone(pid: int) -> None:
    deadline = time.monotonic() + 120
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} still runs"
            time.sleep(0.05)


def wait_for_rank(hanging) -> None:
    while not hanging.exists() or not hanging.read_text():
        time.sleep(0.05)


def test_run_script_cuts_a_hang_and_leaves_no_rank_behind(hanging, monkeypatch):
    communicate = subprocess.Popen.communicate

    def once_the_rank_runs(process, timeout):
        wait_for_rank(hanging)
        return communicate(process, timeout=timeout)

    monkeypatch.setattr(machinery.subprocess.Popen, "communicate", once_the_rank_runs)
    with pytest.raises(machinery.Wrong, match=r"still running after 1 s\. Does every rank reach every collective\?"):
        machinery.run_script("hang.py", 1, timeout=1)
    assert_is_gone(int(hanging.read_text()))


def test_an_interrupted_check_leaves_no_rank_behind(hanging, monkeypatch):
    def interrupted(process, timeout):
        wait_for_rank(hanging)
        raise KeyboardInterrupt

    monkeypatch.setattr(machinery.subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        machinery.run_script("hang.py", 1)
    assert_is_gone(int(hanging.read_text()))


def test_a_check_of_a_script_says_what_is_wrong_with_it(hanging, capsys):
    @machinery.exercise("9.9", "fine.")
    def check(script):
        machinery.run_script(script, 1, timeout=0.5)

    assert_rejects(check, os.devnull, "not right yet: it hangs", capsys)
