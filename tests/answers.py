"""How the tests of the exercises' checks (test_checks_chapter_N.py) run their tables of right and wrong answers."""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from checks import machinery


def stub(*arguments):
    raise NotImplementedError


def assert_accepts(check: Callable, answer, capsys) -> None:
    """Both in a lesson and in the solutions."""
    assert check(answer) is True
    assert check(answer, strict=True) is True
    assert all(line.startswith("[OK] Exercise ") for line in capsys.readouterr().out.splitlines())


def assert_rejects(check: Callable, answer, because: str | re.Pattern, capsys) -> None:
    """In a lesson by one line that contains `because`, in the solutions by an AssertionError with the same words."""
    assert check(answer) is False
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("[  ] Exercise ")
    assert because.search(line) if isinstance(because, re.Pattern) else because in line
    with pytest.raises(AssertionError) as caught:
        check(answer, strict=True)
    assert line == f"[  ] {caught.value}"


def judge(check: Callable, right: Sequence, wrong: Sequence | Mapping[str, tuple], prepare: str = "") -> Callable:
    """Make a test of a check: it accepts each right answer, and rejects the stub and each wrong one with help.

    wrong: (answer, because) for each, or by its name. because: words of the message, or a pattern that is found in it.
    prepare: a fixture that returns a function; what this makes of an answer is given to the check.
    """
    named = wrong if isinstance(wrong, Mapping) else {f"wrong-{number}": case for number, case in enumerate(wrong)}
    cases = {f"right-{number}": (answer, None) for number, answer in enumerate(right)} | named

    @pytest.mark.parametrize(("answer", "because"), cases.values(), ids=cases)
    def test(answer, because, request, capsys):
        prepared = request.getfixturevalue(prepare)(answer) if prepare else answer
        capsys.readouterr()
        if because is None:
            assert_accepts(check, prepared, capsys)
        else:
            assert_rejects(check, prepared, because, capsys)

    return test


@dataclass(frozen=True)
class Call:
    """An answer, and the program that judges it: the ranks start PROGRAM FOLDER ANSWER ARGUMENT... FOLDER/OUTPUT...

    Without a program they start ANSWER FOLDER.
    """

    answer: str
    program: Path | None = None
    outputs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launched:
    """A call that has ended: the folder that it wrote to, the file with the answer, and how its ranks ended."""

    folder: Path
    answer: Path
    ended: machinery.Ended


def launch_together(
    folder: Path, nproc: int, calls: Mapping[object, Call], modules: Sequence[str] = (), cwd: Path | None = None
) -> dict[object, Launched]:
    """Run many calls in one launch of `nproc` ranks, which have imported `modules`; the results by key."""
    places, commands = {}, []
    for number, (key, call) in enumerate(calls.items()):
        place = places[key] = folder / f"{number:03}"
        place.mkdir(parents=True)
        answer = place / "answer.py"
        answer.write_text(call.answer)
        outputs = [place / output for output in call.outputs]
        commands.append([call.program, place, answer, *call.arguments, *outputs] if call.program else [answer, place])
    ended = machinery.run_scripts(commands, nproc, modules, cwd=cwd)
    return {
        key: Launched(place, place / "answer.py", each)
        for (key, place), each in zip(places.items(), ended, strict=True)
    }


def replay(monkeypatch, call: Call, launched: Launched) -> Path:
    """Let the next check of this answer find what its ranks have done already; returns the file with the answer."""

    def run_script(path, nproc, into, script=None, *rest):
        assert (path, nproc) == (call.program or launched.answer, len(launched.ended.printed))
        arguments, outputs = rest[: len(call.arguments)], rest[len(call.arguments) :]
        assert arguments == call.arguments
        for report in launched.folder.glob("*.json"):
            shutil.copy(report, into)
        for output in outputs:
            shutil.copytree(launched.folder / Path(output).name, output)
        machinery.expect_success(launched.ended.exit_code, launched.ended.errors)
        return launched.ended.printed

    monkeypatch.setattr(machinery, "run_script", run_script)
    return launched.answer


class OnRanks:
    """The answers of a file of tests that ranks run: one launch for each number of ranks, after its imports.

    The file takes the fixtures with `launched, run_before = ON_RANKS.fixtures()`.
    """

    def __init__(self, imported: Mapping[int, Sequence[str]]) -> None:
        self.imported, self.calls = imported, {nproc: {} for nproc in imported}

    def fixtures(self) -> tuple[Callable, Callable]:
        @pytest.fixture(scope="module")
        def launched(tmp_path_factory) -> Callable[[int], dict[object, Launched]]:
            """Returns a function that runs all calls for so many ranks, once."""

            @cache
            def launch(nproc):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("HF_HUB_OFFLINE", "1")
                    patch.setenv("DS_ACCELERATOR", "cpu")
                    folder = tmp_path_factory.mktemp("launched")
                    return launch_together(folder, nproc, self.calls[nproc], self.imported[nproc])

            return launch

        @pytest.fixture
        def run_before(launched, monkeypatch):
            """Returns a function that lets the check of an answer find what its ranks have done already."""

            def prepare(answer):
                nproc, key = answer
                return replay(monkeypatch, self.calls[nproc][key], launched(nproc)[key])

            return prepare

        return launched, run_before

    def judge(
        self, check: Callable, nproc: int, probe: str, head: str, right: dict[str, str],
        wrong: dict[object, tuple[str, str]],
    ) -> Callable:  # fmt: skip
        """Make a test of a check for answers, by name, that `nproc` ranks run: each is `head` and what follows it.

        wrong: with a pattern that is found in the message.
        """
        bodies = right | {name: body for name, (body, _) in wrong.items()}
        assert len(set(bodies.values())) == len(bodies)
        keys = {name: (check.__name__, name) for name in bodies}
        self.calls[nproc] |= {keys[name]: Call(head + body, machinery.probe(probe)) for name, body in bodies.items()}
        rejected = {name: ((nproc, keys[name]), re.compile(because)) for name, (_, because) in wrong.items()}
        return judge(check, [(nproc, keys[name]) for name in right], rejected, prepare="run_before")


def printed(call: Launched) -> str:
    """What rank 0 has printed."""
    machinery.expect_success(call.ended.exit_code, call.ended.errors)
    return call.ended.printed[0]


def cell(notebook: Path, identity: str) -> str:
    """The source of the notebook's cell with this id."""
    (found,) = (each for each in json.loads(notebook.read_text())["cells"] if each["id"] == identity)
    return "".join(found["source"])


def written(notebook: Path, identity: str) -> str:
    """What a %%writefile cell writes."""
    return cell(notebook, identity).partition("\n")[2] + "\n"
