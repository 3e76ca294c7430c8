"""Exercise 4.5a on its machines: both kinds of illness, the right answer, and what is missing in wrong ones."""

import contextlib
import json
from pathlib import Path

import pytest
import ray
from notebook_rules import ROOT

from checks import chapter_4, rescue
from checks.machinery import Wrong

SOLUTION = json.loads((ROOT / "04-ray-in-production/solutions/05_onto_a_cluster.ipynb").read_text())
SICK = {"clock": ("a", {"clock_wrong_by_s": -180}), "package": ("b", {"package": ("numpy", "2.1.0")})}


def solution():
    """The function of the solutions, without the call of its check."""
    (cell,) = ("".join(cell["source"]) for cell in SOLUTION["cells"] if cell["id"] == "rescue")
    names = {"ray": ray, "Path": Path}
    exec(cell.partition("\nchecks.")[0], names)
    return names["rescue"]


@pytest.fixture(scope="module", params=SICK)
def sick(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.delenv("RAY_AUTH_MODE", raising=False)
        with rescue.sick_cluster(SICK[request.param]) as cluster:
            yield cluster


def test_a_right_answer_resumes_the_run(sick):
    failed = {item["name"] for item in sick.items if not item["ok"]}
    assert failed in ({"clocks", "training"}, {"packages", "training"})
    praise = chapter_4.judge_rescue(rescue.try_rescue(solution(), sick))
    assert f"Machine {sick.sick} was sick" in praise


@contextlib.contextmanager
def rejected(words: str):
    with pytest.raises(Wrong, match=words):
        yield


@pytest.mark.parametrize("sick", ["clock"], indirect=True)
def test_wrong_answers_are_told_what_is_missing(sick):
    right = solution()

    def but(command=lambda command: command, **job):
        def answer(items, laptop, storage):
            given = right(items, laptop, storage)
            changed = {**given["job"], "command": command(given["job"]["command"]), **job}
            return {"sick": given["sick"], "job": {name: value for name, value in changed.items() if value}}

        return answer

    for answer, words in (
        (lambda *given: {**right(*given), "sick": "b"}, "Which machine has that ID"),
        (lambda *given: "a", "yours is 'a'"),
        (but(env_vars={"A": "1"}), "yours has 'env_vars' too"),
        (but(working_dir=None), "has to travel with the command"),
        (but(py_modules=None), "what else sends code"),
        (but(lambda command: command.replace("--workers 1", "--workers 2")), "How many CPUs do healthy"),
        (but(lambda command: command.replace("--avoid a", "--avoid b")), "ran on the sick machine a"),
        (but(lambda command: command.replace("--avoid a", "")), "Which option of train.py keeps it away"),
        (but(lambda command: command.replace("--save-to ", "--save-to ~")), "Where is newest.pt"),
    ):
        with rejected(words):
            chapter_4.judge_rescue(rescue.try_rescue(answer, sick))
