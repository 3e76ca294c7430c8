"""How the tests of the exercises' checks (test_checks_CHAPTER_LESSON.py) say that an answer passes or is rejected."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from runs import ROOT, TORCHRUN

from shared.checks import machinery


def stub(*arguments):
    raise NotImplementedError


def assert_accepts(check: Callable, answer, capsys) -> None:
    """Both in a lesson and in the solutions."""
    assert check(answer) is True
    assert check(answer, strict=True) is True
    assert all(line.startswith("[OK] Exercise ") for line in capsys.readouterr().out.splitlines())


def assert_rejects(check: Callable, answer, because: str, capsys) -> None:
    """In a lesson by one line that contains `because`, in the solutions by an AssertionError with the same words."""
    assert check(answer) is False
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("[  ] Exercise ") and because in line
    with pytest.raises(AssertionError) as caught:
        check(answer, strict=True)
    assert line == f"[  ] {caught.value}"


def launch_together(
    folder: Path, program: str, scripts: Mapping[str, str], nproc: int, *outputs: str, modules: Sequence[str] = (),
    cwd: Path | None = None,
) -> dict[str, Path]:  # fmt: skip
    """Run a check's program on several answers in one launch of `nproc` ranks, to save time.

    scripts: the answers' sources by name. For each, the program is called as WROTE SCRIPT WROTE/OUTPUT..., after the
    ranks have imported `modules`. Returns WROTE, what the ranks wrote, by the answer's name.
    """
    found = {}
    for number, (name, source) in enumerate(scripts.items()):
        wrote = found[name] = folder / f"{number:02}"
        wrote.mkdir(parents=True)
        (wrote / "call.py").write_text(program)
        (wrote / "answer.py").write_text(source)
        command = [wrote / "call.py", wrote, wrote / "answer.py", *(wrote / output for output in outputs)]
        (wrote / "command.json").write_text(json.dumps([str(word) for word in command]))
    command = [*TORCHRUN, "--nproc-per-node", str(nproc), ROOT / "tests/many_answers.py", folder, *modules]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, timeout=900, env=environment, cwd=cwd)
    return found


def replay(monkeypatch, program: str, nproc: int, wrote: Path) -> None:
    """Let the next check find what `launch_together` has run already, in place of a launch of its own."""

    def run_script(path, ranks, into, script, *outputs):
        assert (Path(path).read_text(), ranks) == (program, nproc)
        codes = [int((wrote / f"{rank}.code").read_text()) for rank in range(nproc)]
        machinery.expect_success(int(any(codes)), "".join((wrote / f"{rank}.err").read_text() for rank in range(nproc)))
        for rank in range(nproc):
            shutil.copy(wrote / f"{rank}.json", into)
        for output in outputs:
            shutil.copytree(wrote / Path(output).name, output)

    monkeypatch.setattr(machinery, "run_script", run_script)
