"""The checks of lesson 3.4: the stub and plausible wrong answers are rejected with a message that helps."""

import json
import re
from pathlib import Path

import pytest
from answers import assert_accepts, assert_rejects, stub

from shared import checks
from shared.checks import chapter_3

LESSON = Path(__file__).parents[1] / "03-fsdp-deepspeed" / "04_deepspeed_zero.ipynb"
SOLUTION = LESSON.parent / "solutions" / LESSON.name

# --- exercise 3.4a: whose logs are these? -----------------------------------------------------------------------------

RIGHT_DIAGNOSIS = {"A": "step once", "B": "divided twice", "C": "none", "D": "not gathered", "E": "clipped by hand"}


def diagnosis(**changed):
    return lambda: RIGHT_DIAGNOSIS | changed


def test_right_diagnosis_is_accepted(capsys):
    assert_accepts(checks.exercise_3_4a, diagnosis(), capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("return a dict with the keys A, B, C, D and E; yours is None", lambda: None),
    ("for run A you say 'none'. Then nothing in its logs would be wrong", diagnosis(A="none")),
    ("for run B you say 'none'. Then nothing in its logs would be wrong", diagnosis(B="none")),
    ("for run C you say 'step once'. Then the engine would have made fewer updates", diagnosis(C="step once")),
    ("for run D you say 'not split'. Then both ranks would train on the same windows", diagnosis(D="not split")),
    ("for run E you say 'none'. Then nothing in its logs would be wrong", diagnosis(E="none")),
    ("for run D you say 'clipped by hand'. Clipping by hand has no effect", diagnosis(D="clipped by hand")),
    ("for run E you say 'divided twice'. Then its gradients would be half as long", diagnosis(E="divided twice")),
    ("for D you say 'gathered', which is not one of 'none', 'step once'", diagnosis(D="gathered")),
])  # fmt: skip
def test_wrong_diagnosis_gets_help(answer, because, capsys):
    assert_rejects(checks.exercise_3_4a, answer, because, capsys)


def read_logs(text: str) -> tuple[list[dict], dict[str, list[dict]]]:
    """Return the two reference lines, and for each run the lines of its ranks, as lists of numbers by name."""
    references, runs = [], {}
    for line in text.splitlines():
        columns = dict(re.findall(r"(loss|norm|updates) ([\d. ]+)", line))
        numbers = {name: [float(number) for number in values.split()] for name, values in columns.items()}
        run = re.match(r"run (.) ", line)
        (runs.setdefault(run[1], []) if run else references).append(numbers)
    return references, runs


def assert_shows_the_mistakes(text: str) -> None:
    """Raise AssertionError unless the logs show what the check says of each run."""
    (clipped, unclipped), runs = read_logs(text)
    steps = list(range(1, len(clipped["loss"]) + 1))
    assert list(runs) == list(RIGHT_DIAGNOSIS)
    for run, (zero, one) in runs.items():
        mistake = RIGHT_DIAGNOSIS[run]
        means = [(a + b) / 2 for a, b in zip(zero["loss"], one["loss"], strict=True)]
        assert (zero["updates"] != steps) == (mistake == "step once")
        if mistake in ("none", "divided twice"):
            assert means == pytest.approx(clipped["loss"], abs=2e-3)
        factor = 0.5 if mistake == "divided twice" else 1
        if mistake in ("none", "divided twice"):
            assert zero["norm"] == pytest.approx([factor * norm for norm in clipped["norm"]], rel=2e-2)
        assert (abs(means[0] - clipped["loss"][0]) > 0.01) == (mistake == "not gathered")
        assert zero["loss"] != one["loss"]
        if mistake == "clipped by hand":
            assert means == pytest.approx(unclipped["loss"], abs=1e-3)
            assert max(abs(a - b) for a, b in zip(means, clipped["loss"], strict=True)) > 2e-3


def test_the_recorded_logs_show_what_the_check_says():
    assert_shows_the_mistakes(LESSON.with_name("five_engines.txt").read_text())


def test_the_five_engines_still_make_such_logs():
    (printed, _) = chapter_3.run_script(LESSON.with_name("five_engines.py"), 2)
    assert_shows_the_mistakes(printed)


# --- exercise 3.4b: a port to DeepSpeed -------------------------------------------------------------------------------


def written_file(notebook: Path) -> str:
    """Return the text of the notebook's cell that writes port.py."""
    cells = ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"]]
    (cell,) = (cell for cell in cells if cell.startswith("%%writefile") and "port.py" in cell.partition("\n")[0])
    return cell.partition("\n")[2]


RIGHT_PORT = written_file(SOLUTION)
WRONG_PORTS = {
    "as it was": (
        re.sub(r"^raise NotImplementedError.*\n", "", written_file(LESSON), flags=re.MULTILINE),
        "parameters do not have their start values",
    ),
    "not gathered": (
        re.sub(r", gathered=partial\(.*\)\)", ")", RIGHT_PORT),
        "parameters do not have their start values.* what is its shape while it is filled",
    ),
    "filled by each rank, without broadcast": (
        RIGHT_PORT.replace("modifier_rank=0", "modifier_rank=None"),
        "parameters do not have their start values.* what becomes of the new values",
    ),
    "step once": (
        RIGHT_PORT.replace("        engine.step()\n", "").replace(
            "    return distributed", "    engine.step()\n    return distributed"
        ),
        "the engine has made 0 updates instead of 1. How does it know that a part of a step is over",
    ),
    "divided twice": (RIGHT_PORT.replace("backward(loss)", "backward(loss / len(parts))"), "half of the"),
    "not through the engine": (
        RIGHT_PORT.replace("engine(tokens)", "engine.module(tokens)"),
        "Compare the port line by line with what section 2 says of the engine's three calls",
    ),
    "clipped by hand": (
        RIGHT_PORT.replace('    settings["gradient_clipping"] = 0.5\n', "").replace(
            "        engine.step()\n",
            "        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.5)\n        engine.step()\n",
        ),
        "where one process is that never clips. After engine.backward.*, what is left in the parameters' .grad",
    ),
    "own loss": (
        RIGHT_PORT.replace("distributed.global_sum(mean).item() / dist.get_world_size()", "mean.item()"),
        "step 1's loss on rank 0 is .* That is the mean over this rank's own windows",
    ),
    "no loss": (re.sub("    return distributed.*", "    return None", RIGHT_PORT), "loss on rank 0 should be a number"),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the two ranks saw of each port, all of them in one launch."""
    folder = tmp_path_factory.mktemp("ports")
    ports = {"right": RIGHT_PORT, **{name: port for name, (port, _) in WRONG_PORTS.items()}}
    assert len(set(ports.values())) == len(ports)
    for number, port in enumerate(ports.values()):
        (folder / f"{number}.py").write_text(port)
    observed = chapter_3.watch_ports(*(folder / f"{number}.py" for number in range(len(ports))))
    return dict(zip(ports, observed, strict=True))


def test_right_port_is_accepted(seen):
    chapter_3.judge_port(seen["right"])


@pytest.mark.parametrize("name", WRONG_PORTS)
def test_wrong_port_gets_help(name, seen):
    with pytest.raises(chapter_3.Wrong, match=WRONG_PORTS[name][1]):
        chapter_3.judge_port(seen[name])


def test_port_of_the_lesson_is_a_stub(tmp_path):
    (tmp_path / "port.py").write_text(written_file(LESSON))
    with pytest.raises(AssertionError, match="not done yet"):
        checks.exercise_3_4b(tmp_path / "port.py", strict=True)
