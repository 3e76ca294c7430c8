"""What all exercise checks share: how an answer is judged, and how a script of ranks is run."""

import contextlib
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared import ranks
from shared.rendezvous import free_port

ABORTED = "terminate called without an active exception"  # see shared.distributed.leave
MISMATCHED = "op.preamble.length <= op.nbytes"  # gloo's words for a message that is longer than expected


class Wrong(Exception):
    """An answer that is not right yet; the message tells the learner what was seen and what was expected."""


def exercise(number: str, praise: str) -> Callable:
    """Make a check of a function that raises Wrong, or the stub's NotImplementedError, for an answer not yet right.

    What it returns for a right answer, if anything, is printed after `praise`.
    """

    def decorate(check: Callable) -> Callable:
        @functools.wraps(check)
        def run(answer, *, strict: bool = False) -> bool:
            try:
                details = check(answer)
            except NotImplementedError:
                problem = "not done yet: replace `raise NotImplementedError` above and run both cells again"
            except Wrong as error:
                problem = f"not right yet: {error}"
            except Exception as error:  # the learner's own code may raise anything
                problem = f"your code raised {type(error).__name__}: {error}"
            else:
                print(f"[OK] Exercise {number}: {praise}" + (f" {details}" if details else ""))
                return True
            if strict:
                raise AssertionError(f"Exercise {number}: {problem}")
            print(f"[  ] Exercise {number}: {problem}")
            return False

        return run

    return decorate


def expect_close(seen: float, expected: float, what: str, tolerance: float = 1e-6, hint: str = "") -> None:
    """Raise Wrong unless `seen` is a number within `tolerance` (relative) of `expected`."""
    try:
        seen = float(seen)
    except (TypeError, ValueError):
        raise Wrong(f"{what} should be a number, and is {seen!r}") from None
    if not math.isclose(seen, expected, rel_tol=tolerance, abs_tol=tolerance):
        shown = [f"{number:,.0f}" if 1e6 <= abs(number) < 1e15 else f"{number:.6g}" for number in (seen, expected)]
        raise Wrong(f"{what} is {shown[0]}, expected {shown[1]}. {hint}".strip())


def refuse_stub(script: str | Path) -> None:
    """Raise NotImplementedError if the script still holds the stub's line: there is no need to start it."""
    if Path(script).is_file() and re.search(r"^ *raise NotImplementedError", Path(script).read_text(), re.MULTILINE):
        raise NotImplementedError


def on_ranks(function: Callable, num_ranks: int, *args: object) -> list:
    """Call shared.ranks.run. Raises NotImplementedError or Wrong for ranks that failed."""
    try:
        return ranks.run(function, num_ranks, *args)
    except ranks.RanksFailed as error:
        if "NotImplementedError" in str(error):
            raise NotImplementedError from None
        said = "; ".join(map(str.strip, str(error).splitlines())).replace(":; ", ": ")
        raise Wrong(f"on {num_ranks} ranks, {said}") from None


def probe(name: str) -> Path:
    """Return the path of a program in checks/probes."""
    return Path(__file__).with_name("probes") / f"{name}.py"


def run_script(path: str | Path, nproc: int, *args: str, timeout: float = 240) -> list[str]:
    """Run a script with `nproc` ranks under torchrun, on CPUs, and return what each rank printed.

    Raises NotImplementedError where the script did, and Wrong with the end of its errors, or for a hang of `timeout`
    seconds.
    """
    refuse_stub(path)
    with tempfile.TemporaryDirectory() as logs:
        # Each rank prints into a file of its own: in a common one their lines would run into each other.
        options = ["--standalone", "--nproc-per-node", str(nproc), "--redirects", "1", "--log-dir", logs]
        expect_success(*run_command(["-m", "torch.distributed.run", *options, str(path), *args], timeout))
        return [log.read_text() for log in sorted(Path(logs).glob("*/attempt_0/*/stdout.log"))]


@dataclass(frozen=True)
class Ended:
    """How a script of several ranks ended: what each rank printed, the first exit code but 0, and all ranks' errors."""

    printed: list[str]
    exit_code: int
    errors: str


def run_scripts(
    commands: Sequence[Sequence[str | Path]], nproc: int, modules: Sequence[str] = (), *, own_stores: bool = False,
    cwd: str | Path | None = None, timeout: float = 900, **variables: str,
) -> list[Ended]:  # fmt: skip
    """Run several scripts with `nproc` ranks, one after the other, in a single launch of torchrun on CPUs.

    Each script runs in forks of ranks that have imported torch and `modules`, so only the first one waits for imports.
    commands: for each script its path and arguments. Scripts share torchrun's store, in which `distributed.join` gives
    each start its own name. own_stores: give each script its own store, which a bare `init_process_group` and Ray's
    local mode need. variables: of the environment, in addition. Raises Wrong for a hang of `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, f"{number:03}") for number in range(len(commands))]
        for each, command in zip(folders, commands, strict=True):
            each.mkdir()
            words, port = [str(word) for word in command], free_port() if own_stores else None
            (each / "command.json").write_text(json.dumps({"words": words, "port": port}))
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), probe("many_scripts")]
        exit_code, errors = run_command([*map(str, words), folder, *modules], timeout, cwd, **variables)
        if exit_code:
            raise RuntimeError(f"the launch of {len(commands)} scripts failed: {errors}")

        def read(each: Path, name: str) -> list[str]:
            return [(each / f"{rank}.{name}").read_text() for rank in range(nproc)]

        codes = [[int(code) for code in read(each, "code")] for each in folders]
        return [
            Ended(read(each, "out"), next(filter(None, code), 0), "".join(read(each, "err")))
            for each, code in zip(folders, codes, strict=True)
        ]


EVERY_COLLECTIVE = "Did every rank call every collective, as often as the others? Is there one inside an `if`?"


def run_ranks(script: str | Path, nproc: int, *args: str, question: str = EVERY_COLLECTIVE) -> list[str]:
    """Call run_script, and ask `question` if one rank called a collective that another never reached."""
    try:
        return run_script(script, nproc, *args)
    except Wrong as error:
        if re.search("[Cc]onnection|[Tt]imed out|timeout|[Bb]roken pipe|it hangs", str(error)):
            said = str(error).partition(". ")[0]  # what follows is PyTorch's advice on crashed workers, misleading here
            reason = "one rank called a collective that another rank never reached"
            raise Wrong(f"{reason}. {question} (What it said: {said})") from None
        raise


def reports_of_ranks(name: str, nproc: int, *args: str, question: str = EVERY_COLLECTIVE) -> list:
    """Run a probe under torchrun as FOLDER ARGS..., and return what each rank wrote to FOLDER/RANK.json.

    Raises NotImplementedError and Wrong as run_ranks does.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(probe(name), nproc, folder, *args, question=question)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(nproc)]


def run_train_epoch(script: str | Path, *calls: Sequence, timeout: float = 240) -> list[list[dict]]:
    """Call a learner's train_epoch several times on two ranks. Return each rank's report of each call.

    calls: how many rows the batches of each rank have, and what else the probe uneven_inputs.py takes. Raises
    NotImplementedError and Wrong as run_script does.
    """
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, str(number)) for number in range(len(calls))]
        commands = []
        for each, (sizes, *options) in zip(folders, calls, strict=True):
            each.mkdir()
            commands.append([probe("uneven_inputs"), each, script, json.dumps(sizes), *options])
        for ended in run_scripts(commands, 2, timeout=timeout):
            expect_success(ended.exit_code, ended.errors)
        return [[json.loads((each / f"{rank}.json").read_text()) for rank in range(2)] for each in folders]


def expect_answers(seen: object, names: str, answers: Iterable[str]) -> None:
    """Raise Wrong unless `seen` is a dict that has one of `answers` for each of the one-letter `names`."""
    if not isinstance(seen, dict) or set(seen) != set(names):
        raise Wrong(f"return a dict with the keys {', '.join(names[:-1])} and {names[-1]}; yours is {seen!r}")
    answers = list(answers)
    for name in names:
        if seen[name] not in answers:
            choices = ", ".join(map(repr, answers))
            raise Wrong(f"for {name} you say {seen[name]!r}, which is not one of {choices}")


def run_command(
    words: list[str], timeout: float = 240, cwd: str | Path | None = None, **variables: str
) -> tuple[int, str]:
    """Run Python with `words` on CPUs, and return its exit code and what it wrote to stderr. Raises Wrong for a hang.

    cwd: the folder to run it in. variables: of the environment, in addition.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd
    )
    try:
        errors = process.communicate(timeout=timeout)[1]
    except BaseException as error:  # Ctrl-C too must leave nothing running
        # torchrun gives each rank a session of its own, so we look for its children rather than kill its group.
        for one in (*psutil.Process(process.pid).children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise Wrong(f"it hangs: still running after {timeout:.0f} s. Does every rank reach every collective?") from None
    return process.returncode, errors


def expect_success(exit_code: int, errors: str) -> None:
    """Raise NotImplementedError or Wrong for a script that has failed, by what its ranks have written to stderr."""
    if "NotImplementedError" in errors:
        raise NotImplementedError
    if exit_code != 0:
        lines = [line for line in errors.splitlines() if re.search(r"\w*(Error|Exception)\b.*: ", line)]
        if ABORTED in errors and all("ChildFailedError" in line for line in lines):
            leave = "End it with `distributed.leave()`."
            raise Wrong(f"the script did its work, but one rank aborted while it exited. {leave}")
        if MISMATCHED in errors:
            question = "Does every rank call the same collectives, equally often?"
            raise Wrong(f"the ranks were in different collectives, whose sizes do not match. {question}")
        raise Wrong(f"the script failed: {lines[0].strip() if lines else errors.strip()[-300:]}")
