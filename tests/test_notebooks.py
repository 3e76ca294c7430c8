"""Every lesson and every solution keeps the rules of `notebook_rules.py`, and every rule catches what it is for."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import notebook_rules as rules
import pytest
from notebook_rules import (
    FOR_LESSONS,
    FOR_SOLUTIONS,
    ROOT,
    Notebook,
    asserts,
    commands_can_fail,
    exercises,
    first_and_last_cell,
    first_and_last_cell_of_solutions,
    knobs,
    leaves_nothing_running,
    links,
    no_race_of_speeds,
    plain_file,
    rhythm,
    solves_its_lesson,
    taught_as_shared,
    writes_only_under_runs,
)

import checks

# --- the rules, applied ----------------------------------------------------------------------------------------------


def cases(paths: list[Path], applied: tuple[Callable, ...]) -> list:
    """One test for each rule and notebook, called after both."""
    return [
        pytest.param(path, rule, id=f"{rule.__name__}-{path.relative_to(ROOT).as_posix()}")
        for path in paths
        for rule in applied
    ]


@pytest.mark.parametrize(
    ("path", "rule"), cases(rules.lessons(), FOR_LESSONS) + cases(rules.solutions(), FOR_SOLUTIONS)
)
def test_rule(path, rule):
    violations = list(rule(Notebook(path)))
    assert not violations, "\n".join([rule.__doc__, *violations])


def test_there_are_lessons_and_every_notebook_is_one_or_its_solutions():
    assert len(rules.lessons()) >= 1
    found = [path for path in rules.repository_files() if path.suffix == ".ipynb"]
    assert found == sorted(rules.lessons() + rules.solutions())


def test_every_lesson_has_its_solutions():
    assert [path.parent / "solutions" / path.name for path in rules.lessons()] == rules.solutions()


def test_lessons_are_numbered_without_gaps():
    for chapter in {path.parent for path in rules.lessons()}:
        numbers = [int(path.name[:2]) for path in rules.lessons() if path.parent == chapter]
        assert numbers == list(range(1, len(numbers) + 1))


def test_every_check_belongs_to_exactly_one_lesson_and_is_lettered_in_order():
    used = [name for path in rules.lessons() for name in rules.all_checks(Notebook(path))]
    assert sorted(used) == sorted(name for name in vars(checks) if name.startswith("exercise_"))
    for path in rules.lessons():
        letters = "".join(name[-1] for name in rules.all_checks(Notebook(path)))
        assert "abcdefgh".startswith(letters)


def test_every_check_has_a_test_with_wrong_answers():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_checks*.py"))
    untested = [name for name in vars(checks) if name.startswith("exercise_") and not re.search(rf"\b{name}\b", tests)]
    assert untested == []


def test_every_exception_gives_a_reason_and_is_needed():
    for (path, identity), reason in rules.ALLOWED_TO_RAISE.items():
        assert len(reason.split()) >= 5
        cells = {cell.raw["id"]: cell for cell in Notebook(ROOT / path).cells}
        assert "raises-exception" in cells[identity].tags
    for (path, identity), reason in rules.TIMES_THAT_HOLD.items():
        assert len(reason.split()) >= 5
        assert identity in [cell.raw["id"] for cell, _ in rules.races(Notebook(ROOT / path))]


# --- a chapter that keeps every rule ---------------------------------------------------------------------------------

LESSON = [
    """\
# 3.1 A small lesson

**You see a rule kept.**

| | |
|---|---|
| **Time** | 5 minutes |
| **Hardware** | a laptop |
| **Comes after** | nothing |
| **You will be able to** | keep rules |

![a picture](figure.svg) and [a heading](README.md#the-first-heading).""",
    "%%CODE\nimport os\n\nimport checks\n\nos.environ.setdefault('OMP_NUM_THREADS', '1')",
    "The knobs of this lesson.",
    "%%CODE\nEPOCHS = int(os.getenv('EPOCHS', 2))\nFOLDER = 'runs/lesson-3-1'",
    "A script, and how to run it:",
    "%%CODE\n%%writefile runs/lesson-3-1/hello.py\nimport os\n\nprint(os.environ['RANK'])",
    "%%CODE\n%%bash\ntorchrun --standalone \\\n  --nproc-per-node 2 runs/lesson-3-1/hello.py > runs/lesson-3-1/out.txt",
    "The size of a local batch, as in `shared/sampling.py`.",
    "%%CODE\n%%time\nassert EPOCHS > 0\nassert 1 + 1 == 2\nassert FOLDER.startswith('runs')",
    "**3.1a** Give the answer.\n\n<details><summary>Hint</summary>\n\nIt is 42.\n</details>",
    "%%CODE\ndef answer():\n    raise NotImplementedError",
    "%%CODE\nchecks.exercise_3_1a(answer);",
    """\
## What you have now

Rules. This lesson wrote only to `runs/lesson-3-1/`.

**Next:** [3.2 The next](02_next.ipynb) · **Solutions:** [here](solutions/01_small.ipynb)""",
]
SOLUTION = [
    "# Solutions to 3.1 A small lesson\n\nOf [the lesson](../01_small.ipynb).",
    "%%CODE\nimport checks",
    "**3.1a** The answer:",
    "%%CODE\ndef answer():\n    return 42\n\n\nchecks.exercise_3_1a(answer, strict=True)",
    "Back to [lesson 3.1](../01_small.ipynb).",
]


def as_notebook(sources: list[str]) -> dict:
    """A notebook's JSON; sources that begin with %%CODE are code cells."""
    cells = []
    for number, source in enumerate(sources, start=1):
        is_code = source.startswith("%%CODE\n")
        cell = {"cell_type": "code" if is_code else "markdown", "id": f"cell-{number}", "metadata": {}}
        cell["source"] = source.removeprefix("%%CODE\n").splitlines(keepends=True)
        cells.append({**cell, "execution_count": None, "outputs": []} if is_code else cell)
    metadata = {"kernelspec": {"name": "python3"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


@pytest.fixture
def chapter(tmp_path) -> Path:
    """The folder of a chapter with two lessons, a README and a picture."""
    folder = tmp_path / "03-small"
    (folder / "solutions").mkdir(parents=True)
    (folder / "README.md").write_text("# The *first* heading\n\n```\n# no heading\n```\n")
    (folder / "figure.svg").write_text("<svg/>")
    (folder / "01_small.ipynb").write_text(json.dumps(as_notebook(LESSON)))
    (folder / "02_next.ipynb").write_text(json.dumps(as_notebook(["# 3.2 The next"])))
    (folder / "solutions" / "01_small.ipynb").write_text(json.dumps(as_notebook(SOLUTION)))
    return folder


def test_a_good_lesson_breaks_no_rule(chapter):
    assert [violation for rule in FOR_LESSONS for violation in rule(Notebook(chapter / "01_small.ipynb"))] == []
    solution = Notebook(chapter / "solutions" / "01_small.ipynb")
    assert [violation for rule in FOR_SOLUTIONS for violation in rule(solution)] == []


# --- and how it is broken --------------------------------------------------------------------------------------------


def edit(old: str, new: str) -> Callable[[Path], None]:
    """Replace `old` by `new` in the cell that holds it."""

    def breaks(path: Path) -> None:
        raw = json.loads(path.read_text())
        (cell,) = [cell for cell in raw["cells"] if old in "".join(cell["source"])]
        cell["source"] = "".join(cell["source"]).replace(old, new)
        path.write_text(json.dumps(raw))

    return breaks


def code(source: str, at: int = 8) -> Callable[[Path], None]:
    """Insert prose and a code cell before cell number `at` (from 0)."""
    return insert([f"Prose {at}.", f"%%CODE\n{source}"], at)


def prose(source: str) -> Callable[[Path], None]:
    """Insert a Markdown cell."""
    return insert([source], at=2)


def insert(sources: list[str], at: int) -> Callable[[Path], None]:
    def breaks(path: Path) -> None:
        raw = json.loads(path.read_text())
        new = as_notebook(sources)["cells"]
        for cell in new:
            cell["id"] = "new-" + cell["id"]
        raw["cells"][at:at] = new
        path.write_text(json.dumps(raw))

    return breaks


def change(how: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change the notebook's JSON."""

    def breaks(path: Path) -> None:
        raw = json.loads(path.read_text())
        how(raw)
        path.write_text(json.dumps(raw))

    return breaks


def cell(number: int, **values) -> Callable[[Path], None]:
    """Set fields of cell `number` (from 0)."""
    return change(lambda raw: raw["cells"][number].update(values))


def execution(**how) -> Callable[[Path], None]:
    """Set how the notebook is to be executed."""
    return change(lambda raw: raw["metadata"].update(execution=how))


def delete(number: int) -> Callable[[Path], None]:
    return change(lambda raw: raw["cells"].pop(number))


def beside(name: str) -> Callable[[Path], None]:
    """Another file in the same folder."""
    return lambda path: path.with_name(name).write_text("")


LONG = "\n".join(f"x{number} = {number}" for number in range(41))
OTHER_SAMPLER = "class UnpaddedDistributedSampler:\n    pass"
SHARED_FUNCTION = (
    "def global_batch_counts(num_samples: int, global_batch_size: int) -> list[int]:\n"
    '    """Other words."""\n'
    "    full, tail = divmod(num_samples, global_batch_size)  # a comment\n"
    "    return [global_batch_size] * full + [tail] * (tail > 0)"
)

CLOCKED = "import time; began = time.time()\n"
RACES = {
    "a clock": f"{CLOCKED}assert time.time() - began < 5",
    "a limit": f"{CLOCKED}limit = began + 5\nassert time.time() < limit",
    "a clock by another name": "from time import perf_counter as now\nbegan = now()\nassert now() - began < 5",
    "timeit": "import timeit\nleast = min(timeit.repeat('1'))\nassert least < 1",
    "%timeit": "result = %timeit -o f()\nassert result.best < 1",
    "a key": "rate = metrics['samples_per_second']\nassert rate > 300",
    "get": "assert metrics.get('tokens_per_second', 0) > 300",
    "an attribute": "assert result.elapsed < 5",
    "a ratio": "speedup = rates[2] / rates[1]\nassert 1 < speedup < 2",
    "a list": f"{CLOCKED}took = []\nfor _ in range(3):\n    took.append(time.time() - began)\nassert min(took[1:]) < 5",
    "a dict": f"{CLOCKED}took = dict.fromkeys('ab', 0.0)\nfor part in took:\n    took[part] += time.time() - began\n"
    "share = {part: value / 2 for part, value in took.items()}\nassert share['a'] > share['b']",
    "an entry": f"{CLOCKED}runs = [{{'loss': 0.5, 'took': time.time() - began}}]\nassert runs[0]['took'] < 5",
    "a function": f"def f():\n    {CLOCKED}    return time.time() - began\n\nassert f() < 5",
    "what a function stores": "import time\ntook = {}\n\ndef f(name, began):\n    took[name] = time.time() - began\n\n"
    "assert took['a'] < 5",
    "a method": "class Watch:\n    def stop(self):\n        return time.time() - self.began\n\nassert watch.stop() < 5",
    "unpacked": "one, two = {'a': runs[0]['seconds'], 'b': runs[1]['seconds']}.values()\nassert one < two",
    "the fastest": "best = min(seconds, key=seconds.get)\nassert best == 'DDP'",
    "a verdict": "faster = seconds[0] < seconds[1]\nassert faster",
    "among others": "assert loss < 1 and all((value < 5 for value in seconds))",
}
NO_RACES = [
    f"{CLOCKED}ended = time.time()\nassert began <= ended",  # an order of moments
    "assert len(seconds) == 2 and set(seconds) == {'a', 'b'} and 'a' in seconds",
    "assert isinstance(seconds, dict) and seconds.keys() == names and elapsed is not None",
    f"{CLOCKED}run = {{'loss': 0.5, 'took': time.time() - began}}\nassert run['loss'] < 1",
    "for name, value in seconds.items():\n    print(value)\n    assert name in names and name != ''",
    "for step, (took, loss) in enumerate(zip(seconds, losses)):\n    assert loss < step + 1",
    "one, two = seconds\none, two = losses\nassert one < two",  # other values by now
    "same = {k: v for k, v in line.items() if k != 'samples_per_second'}\nassert same == other",
    "assert rate == 0.1 and patience.total_seconds() == 600",  # a learning rate, a setting
    f"{CLOCKED}print('fast' if time.time() - began < 5 else 'slow')\nassert EPOCHS > 0",
    f"{CLOCKED}while not done() and time.time() < began + 600:\n    pass\nassert done()",
]

BROKEN_LESSONS = [
    # 1: plain files
    (plain_file, "outputs", cell(1, outputs=[{"output_type": "stream", "text": "hi"}]), "has outputs"),
    (plain_file, "count", cell(1, execution_count=3), "has an execution count"),
    (plain_file, "no id", change(lambda raw: raw["cells"][2].pop("id")), "has no valid id: None"),
    (plain_file, "id with spaces", cell(2, id="a b"), "has no valid id: 'a b'"),
    (plain_file, "same id twice", cell(2, id="cell-1"), "'cell-1' of a cell before it"),
    (plain_file, "numbered ids", cell(2, id="2"), "has the id '2', its place"),
    (plain_file, "paired script", beside("01_small.py"), "01_small.py is a second form"),
    (plain_file, "paired Markdown", beside("01_small.md"), "01_small.md is a second form"),
    (plain_file, "jupytext", change(lambda raw: raw["metadata"].update(jupytext={})), "jupytext"),
    (plain_file, "kernel", change(lambda raw: raw["metadata"]["kernelspec"].update(name="my-env")), "not python3"),
    (plain_file, "old format", change(lambda raw: raw.update(nbformat_minor=4)), "older than 4.5"),
    # 2: first and last cell
    (first_and_last_cell, "no number", edit("# 3.1 A small", "# A small"), "not '# 3.1 Title'"),
    (first_and_last_cell, "other number", edit("# 3.1 A small", "# 3.2 A small"), "not '# 3.1 Title'"),
    (first_and_last_cell, "deeper title", edit("# 3.1 A small", "## 3.1 A small"), "not '# 3.1 Title'"),
    (first_and_last_cell, "no promise", edit("**You see a rule kept.**", "Hello."), "not a **promise"),
    (first_and_last_cell, "two sentences", edit("rule kept.**", "rule. It is kept.**"), "not a **promise"),
    (first_and_last_cell, "no time", edit("| **Time** | 5 minutes |\n", ""), "no row **Time**"),
    (first_and_last_cell, "no hardware", edit("| **Hardware** | a laptop |", ""), "no row **Hardware**"),
    (first_and_last_cell, "empty row", edit("| nothing |", "|  |"), "no row **Comes after**"),
    (first_and_last_cell, "no aim", edit("You will be able to", "You will learn"), "no row **You will be able to**"),
    (first_and_last_cell, "code first", delete(0), "is not prose"),
    (first_and_last_cell, "code last", change(lambda raw: raw["cells"].append(raw["cells"].pop(1))), "is not prose"),
    (first_and_last_cell, "no summary", edit("## What you have now", ""), "no heading for its summary"),
    (first_and_last_cell, "no solutions", edit("(solutions/01_small.ipynb)", "()"), "not link to solutions/01_small"),
    (first_and_last_cell, "no next", edit("(02_next.ipynb)", "(README.md)"), "not link to the next lesson, 02_next"),
    (first_and_last_cell, "last without README", lambda path: path.with_name("02_next.ipynb").unlink(), "no README.md"),
    (first_and_last_cell, "link in code", edit("[3.2 The next](02_next.ipynb)", "`[3.2](02_next.ipynb)`"), "next"),
    # 3: knobs
    (knobs, "no default", edit("os.getenv('EPOCHS', 2)", "os.getenv('EPOCHS')"), "EPOCHS without a real default"),
    (knobs, "None", edit("os.getenv('EPOCHS', 2)", "os.environ.get('EPOCHS', None)"), "without a real default"),
    (knobs, "empty", edit("os.getenv('EPOCHS', 2)", "os.getenv('EPOCHS', default='')"), "without a real default"),
    (knobs, "must be set", edit("os.getenv('EPOCHS', 2)", "os.environ['EPOCHS']"), "which has no default"),
    (knobs, "two cells", code("LR = os.getenv('LR', 1)", at=4), "knobs stand in 2 cells"),
    (knobs, "late", code("LR = float(os.environ.get('LR', 1))"), "after the first 8 cells"),
    (knobs, "value of setdefault", code("LR = os.environ.setdefault('LR', '1')"), "knobs stand in 2 cells"),
    (knobs, "inside a function", code("def f():\n    return os.getenv('A', 1)"), "knobs stand in 2 cells"),
    (knobs, "none at all", edit("int(os.getenv('EPOCHS', 2))", "2"), "it has no knobs"),
    (knobs, "scaffolding", edit("'EPOCHS'", "'SMOKE_TEST'"), "not who turns it"),
    # 4: rhythm
    (rhythm, "long cell", code(LONG), "has 41 lines, more than 40"),
    (rhythm, "long script", code(f"%%writefile runs/lesson-3-1/a.py\n{LONG}"), "has 42 lines"),
    (rhythm, "long cells", change(lambda raw: [
        one.update(source="\n".join("123456789")) for one in raw["cells"] if one["cell_type"] == "code"
    ]), "the median code cell has 9 lines"),
    (rhythm, "three in a row", change(lambda raw: raw["cells"].pop(4)), "is code cell 3 in a row"),
    (rhythm, "empty prose", cell(4, source=""), "is empty"),
    # 5: asserts
    (asserts, "one fewer", edit("assert 1 + 1 == 2", "print(1 + 1 == 2)"), "it asserts 2 of its claims"),
    (asserts, "cannot fail", edit("assert 1 + 1 == 2", "assert True"), "it asserts 2"),
    (asserts, "a tuple", edit("assert 1 + 1 == 2", "assert (1 + 1 == 3, 'wrong')"), "it asserts 2"),
    (asserts, "in an exercise", lambda path: (
        edit("assert 1 + 1 == 2", "pass")(path), edit("answer():\n", "answer():\n    assert 1 + 1\n")(path)
    ), "it asserts 2"),
    (asserts, "in a script", lambda path: (
        edit("assert 1 + 1 == 2", "pass")(path), edit("import os\n\nprint", "import os\n\nassert os\nprint")(path)
    ), "it asserts 2"),
    # 5: no race of speeds
    *[(no_race_of_speeds, what, code(source), source.rpartition("assert ")[2]) for what, source in RACES.items()],
    (no_race_of_speeds, "two cells", lambda path: (
        code("assert took < 5", at=10)(path), code(f"{CLOCKED}took = time.time() - began")(path)
    ), "took < 5"),
    (no_race_of_speeds, "in a script", edit(
        "print(os", f"{CLOCKED}assert time.time() - began < 5\nprint(os"
    ), "time.time() - began < 5"),
    # 6: commands that can fail
    (commands_can_fail, "!", code("!torchrun a.py"), "runs a command with !"),
    (commands_can_fail, "! in a block", code("if True:\n    !ls"), "runs a command with !"),
    (commands_can_fail, "! into a name", code("files = !ls"), "runs a command with !"),
    (commands_can_fail, "!!", code("!!ls"), "runs a command with !"),
    (commands_can_fail, "%sx", code("%sx ls"), "runs a command with !"),
    (commands_can_fail, "os.system", code("os.system('ls')"), "runs a command with !"),
    (commands_can_fail, "!pip", code("!pip install torch"), "runs a command with !"),
    (commands_can_fail, "%pip", code("%pip install torch"), "installs with %pip"),
    (commands_can_fail, "bash pip", code("%%bash\npython -m pip install torch"), "installs packages"),
    (commands_can_fail, "%%sh", code("%%sh\nls"), "is a %%sh cell"),
    (commands_can_fail, "no raise", code("%%bash --no-raise-error\nls"), "--no-raise-error"),
    (commands_can_fail, "two commands", code("%%bash\nfalse\nls"), "only the last one can fail"),
    (commands_can_fail, "pipe", code("%%bash\nfalse | tail -1"), "has a pipe"),
    (commands_can_fail, "skipped", cell(1, metadata={"tags": ["skip-execution"]}), "is skipped"),
    (commands_can_fail, "raises", cell(1, metadata={"tags": ["raises-exception"]}), "gives no reason"),
    (commands_can_fail, "errors", execution(allow_errors=True), "allows errors"),
    (commands_can_fail, "slow", execution(timeout=900), "900 s"),
    (commands_can_fail, "endless", cell(1, metadata={"execution": {"timeout": -1}}), "-1 s"),
    # 9: writes only under runs/
    (writes_only_under_runs, "writefile", code("%%writefile hello.py\n1"), "writes to hello.py"),
    (writes_only_under_runs, "append", code("%%writefile -a ../runs/a.py\n1"), "writes to ../runs/a.py"),
    (writes_only_under_runs, "open", code("open('a.txt', 'w').write('')"), "writes to a.txt"),
    (writes_only_under_runs, "mode", code("with open('a.txt', mode='ab') as f: pass"), "writes to a.txt"),
    (writes_only_under_runs, "Path", code("(Path('out') / 'a.txt').write_text('')"), "writes to out"),
    (writes_only_under_runs, "torch.save", code("torch.save({}, f'model-{EPOCHS}.pt')"), "writes to model-"),
    (writes_only_under_runs, "figure", code("figure.savefig('a.png')"), "writes to a.png"),
    (writes_only_under_runs, "mkdir", code("Path('out').mkdir()"), "writes to out"),
    (writes_only_under_runs, "redirect", code("%%bash\nls > out.txt"), "writes to out.txt"),
    (writes_only_under_runs, "errors", code("%%bash\nls 2>> out.txt"), "writes to out.txt"),
    (writes_only_under_runs, "option", code("%%bash\npython train.py --storage-path /tmp/x"), "writes to /tmp/x"),
    (writes_only_under_runs, "in a script", edit("print(os", "open('log', 'w')\nprint(os"), "writes to log"),
    (writes_only_under_runs, "not said", edit("`runs/lesson-3-1/`", "a folder"), "does not say that it wrote"),
    (leaves_nothing_running, "background", code("%%bash\nset -e\nsleep 100 &\nls"), "leaves a process running"),
    (leaves_nothing_running, "Popen", code("job = subprocess.Popen(['sleep', '100'])"), "nothing waits for its end"),
    # 10: links and pictures
    (links, "picture of another host", prose("![logo](https://example.org/logo.png)"), "logo.png lies elsewhere"),
    (links, "without a scheme", prose("![logo](//example.org/logo.png)"), "logo.png lies elsewhere"),
    (links, "HTML picture", prose('<img width="3" src="http://example.org/a.gif">'), "a.gif lies elsewhere"),
    (links, "picture in a link", prose("[![b](https://e.org/b.svg)](README.md)"), "b.svg lies elsewhere"),
    (links, "picture in Mermaid", prose("```mermaid\na[<img src='https://e.org/a.png'>]\n```"), "a.png lies elsewhere"),
    (links, "missing picture", prose("![a](missing.svg)"), "missing.svg leads nowhere"),
    (links, "missing file", prose("See [there](03_missing.ipynb)."), "03_missing.ipynb leads nowhere"),
    (links, "missing file, with a title", prose('[there](<missing.md> "a title")'), "missing.md leads nowhere"),
    (links, "reference", prose("[there][1]\n\n[1]: missing.md"), "missing.md leads nowhere"),
    (links, "HTML link", prose('<a href="missing.md">there</a>'), "missing.md leads nowhere"),
    (links, "heading", prose("[there](README.md#second-heading)"), "leads to no heading of README.md"),
    (links, "heading in a code block", prose("[there](README.md#no-heading)"), "leads to no heading"),
    (links, "own heading", prose("[there](#nowhere)"), "leads to no heading of 01_small.ipynb"),
    (links, "absolute", prose("[there](/README.md)"), "is absolute"),
    (links, "ignored file", lambda path: (
        (path.parent / "runs").mkdir(), (path.parent / "runs" / "a.md").write_text(""), prose("[it](runs/a.md)")(path)
    ), "runs/a.md leads to a file that is not in the repository"),
    (links, "picture in code", code("Image(url='https://example.org/a.png')"), "shows a picture from elsewhere"),
    (links, "HTML in code", code("HTML('<img src=\"https://example.org/a.png\">')"), "shows a picture from elsewhere"),
    # 11: equal to shared/
    (taught_as_shared, "another body", code(SHARED_FUNCTION.replace("tail > 0", "tail >= 0")), "global_batch_counts"),
    (taught_as_shared, "no annotations", code(SHARED_FUNCTION.replace(": int", "")), "sampling.py in shared"),
    (taught_as_shared, "in a script", code(
        "%%writefile runs/lesson-3-1/a.py\n" + SHARED_FUNCTION.replace("divmod", "pow")
    ), "defines global_batch_counts"),
    (taught_as_shared, "a class", code(OTHER_SAMPLER), "defines UnpaddedDistributedSampler"),
    # exercises
    (exercises, "none", lambda path: (delete(10)(path), delete(10)(path)), "it has no exercise"),
    (exercises, "unchecked stub", delete(11), "the next cell does not check it"),
    (exercises, "solved", edit("raise NotImplementedError", "return 42"), "the cell before it is no stub"),
    (exercises, "no hint", edit("<details>", "<p>"), "no hint in <details>"),
    (exercises, "hint without a summary", edit("<summary>Hint</summary>", ""), "no hint in <details>"),
    (exercises, "not named", edit("**3.1a** Give", "Give"), "does not call **3.1a**"),
    (exercises, "of another lesson", lambda path: (
        edit("exercise_3_1a", "exercise_3_2a")(path), edit("**3.1a** Give", "**3.2a** Give")(path)
    ), "not of lesson 3.1"),
    (exercises, "strict", edit("(answer);", "(answer, strict=True)"), "must not end the lesson"),
    (exercises, "no leaf", code("answer() + 1", at=12), "a later cell depends on answer"),
    (exercises, "stub in a script", code(
        "%%writefile runs/lesson-3-1/exercise.py\nraise NotImplementedError('here')"
    ), "the next cell does not check it"),
]  # fmt: skip

BROKEN_SOLUTIONS = [
    (first_and_last_cell_of_solutions, "no number", edit("Solutions to 3.1", "To"), "not '# Solutions to 3.1"),
    (first_and_last_cell_of_solutions, "other number", edit("to 3.1 A", "to 3.2 A"), "not '# Solutions to 3.1"),
    (first_and_last_cell_of_solutions, "no way back", edit("Back to [lesson 3.1](../01_small.ipynb)", ""), "not link"),
    (solves_its_lesson, "lax", edit(", strict=True", ""), "a wrong solution would pass"),
    (solves_its_lesson, "strict=False", edit("strict=True", "strict=False"), "a wrong solution would pass"),
    (solves_its_lesson, "unsolved", edit("return 42", "raise NotImplementedError"), "is not solved"),
    (solves_its_lesson, "missing", delete(3), "the lesson has exercise_3_1a, the solutions "),
    (solves_its_lesson, "another", edit("exercise_3_1a", "exercise_3_1b"), "the solutions exercise_3_1b"),
    (plain_file, "outputs", cell(1, outputs=[{"output_type": "stream", "text": "hi"}]), "has outputs"),
]  # fmt: skip


def broken(rows: list[tuple]) -> list:
    return [pytest.param(*row, id=f"{row[0].__name__}: {row[1]}") for row in rows]


def assert_caught(rule: Callable, path: Path, breaks: Callable[[Path], None], words: str) -> None:
    breaks(path)
    violations = list(rule(Notebook(path)))
    assert any(words in violation for violation in violations), violations


@pytest.mark.parametrize(("rule", "what", "breaks", "words"), broken(BROKEN_LESSONS))
def test_a_broken_lesson_is_caught(chapter, rule, what, breaks, words):
    assert_caught(rule, chapter / "01_small.ipynb", breaks, words)


@pytest.mark.parametrize(("rule", "what", "breaks", "words"), broken(BROKEN_SOLUTIONS))
def test_broken_solutions_are_caught(chapter, rule, what, breaks, words):
    assert_caught(rule, chapter / "solutions" / "01_small.ipynb", breaks, words)


def test_every_rule_is_proven():
    proven = {row[0] for row in BROKEN_LESSONS + BROKEN_SOLUTIONS}
    assert proven == {*FOR_LESSONS, *FOR_SOLUTIONS}


ALLOWED = [
    (commands_can_fail, code("print('!ls', a != b)\n%matplotlib inline")),
    (commands_can_fail, code("%%bash\nset -euo pipefail\nls | tail -1\nls")),
    (commands_can_fail, code("%%bash\n# a comment\npython a.py --words 'a | b' \\\n  --more || echo failed")),
    (commands_can_fail, code("subprocess.run(['ls'], check=True)")),
    (writes_only_under_runs, code("%%bash\npython a.py > /dev/null 2>&1")),
    (writes_only_under_runs, code("print(open('a.txt').read(), Path('runs/a').write_text(''))")),
    (leaves_nothing_running, code("%%bash\nset -e\npython a.py &\npython b.py && true\nwait")),
    (leaves_nothing_running, code("job = subprocess.Popen(['ls'])\njob.wait()")),
    (links, prose("`[a](missing.md)` and [out](https://example.org)\n\n```\n[b](missing.md)\n```")),
    (links, prose("## A new heading\n\n[up](#a-new-heading), [Lab's way](#A-new-heading)")),
    (taught_as_shared, code(SHARED_FUNCTION)),
    (taught_as_shared, code("def global_batch_counts(num_samples):\n    raise NotImplementedError")),
    (knobs, code("environment = {**os.environ, 'A': '1'}\nos.environ['A'] = '1'")),
    (rhythm, code(LONG.replace("x40 = 40", ""))),
    *[(no_race_of_speeds, code(source)) for source in NO_RACES],
]


@pytest.mark.parametrize(("rule", "harmless"), ALLOWED)
def test_what_is_harmless_is_no_violation(chapter, rule, harmless):
    path = chapter / "01_small.ipynb"
    harmless(path)
    assert list(rule(Notebook(path))) == []


def test_an_exception_with_a_reason_is_allowed(chapter, monkeypatch):
    path = chapter / "01_small.ipynb"
    cell(1, metadata={"tags": ["raises-exception"]})(path)
    monkeypatch.setitem(rules.ALLOWED_TO_RAISE, (path.name, "cell-2"), "the error is what it teaches")
    assert list(commands_can_fail(Notebook(path))) == []


def test_a_time_that_holds_on_every_machine_is_allowed(chapter, monkeypatch):
    path = chapter / "01_small.ipynb"
    code(f"{CLOCKED}assert time.time() < began + 600")(path)
    assert list(no_race_of_speeds(Notebook(path)))
    monkeypatch.setitem(rules.TIMES_THAT_HOLD, (path.name, "new-cell-2"), "after ten minutes the job hangs")
    assert list(no_race_of_speeds(Notebook(path))) == []


def test_python_that_does_not_parse_is_no_silent_pass(chapter):
    path = chapter / "01_small.ipynb"
    code("if True print('!ls')")(path)
    with pytest.raises(SyntaxError):
        list(commands_can_fail(Notebook(path)))


def test_the_summary_names_are_those_of_the_rules():
    """A reader of a failure sees the rule's sentence, so each has one."""
    assert all(re.fullmatch(r"[A-Z].*\.", rule.__doc__, re.DOTALL) for rule in {*FOR_LESSONS, *FOR_SOLUTIONS})


def test_what_lessons_teach_and_shared_holds():
    """The definitions that `taught_as_shared` compares. Without a module of `shared` it would compare nothing."""
    taught = {
        name
        for path in rules.lessons()
        for cell in Notebook(path).code
        for name, node in {**rules.definitions(cell.python), **rules.definitions(cell.script)}.items()
        if name in rules.shared_definitions() and not rules.raises_not_implemented(node)
    }
    assert taught == {"global_sum", "even_batches"}
    modules = {module for found in rules.shared_definitions().values() for module in found}
    assert {"sampling.py", "cluster.py", "storage.py", "workers.py"} <= modules
