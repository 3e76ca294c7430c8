"""Chapter 4's program, from a copy that is installed elsewhere: what it computes, survives and refuses."""

import ast
import contextlib
import gzip
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import ray
import torch
from packaging.requirements import Requirement
from program import EXACT, PROGRAM, SMALL, begin, here, losses, options, result, run
from ray.train import ScalingConfig
from runs import LIMIT, ROOT, has_traceback
from training import config as configuration
from training import data, distributed_training, local_training, model, predict, trainer, utils

from shared.checkpoint import load, path_for_step, save_atomically
from shared.distributed import UsageError, Worker
from shared.on_ray import cluster
from shared.running import lease, script

SYNTHETIC = ("dataset.kind=synthetic", "model.kind=mlp", "dataset.num_samples=200", "training.batch_size=8")


def without_times(outcome: dict) -> list[dict]:
    return [{key: value for key, value in line.items() if "second" not in key} for line in outcome["epochs"]]


# --- without the workshop --------------------------------------------------------------------------------------------


SHARED_OF_OTHERS = {"a package": "shared/__init__.py", "a file": "shared.py", "a folder": "shared/notes.txt"}


@pytest.mark.parametrize("there", [None, *SHARED_OF_OTHERS])
def test_without_shared_the_program_says_how_to_get_it(there, tmp_path):
    """Even where something else has the name `shared`. -S: no package is installed."""
    if there:
        (tmp_path / SHARED_OF_OTHERS[there]).parent.mkdir(exist_ok=True)
        (tmp_path / SHARED_OF_OTHERS[there]).touch()
    environment = {**os.environ, "PYTHONPATH": f"{PROGRAM / 'src'}:{tmp_path}"}
    command = [sys.executable, "-S", "-m", "training.local_training"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith("ModuleNotFoundError: the package `shared` is missing.")
    assert "never from a package index" in said and "`pip install -e WORKSHOP`" in said


def test_a_shared_that_is_not_installed_but_on_the_path_will_do(tmp_path):
    """As Ray's workers get it, and as a copy has it in `src/`."""
    environment = {**os.environ, "PYTHONPATH": f"{PROGRAM / 'src'}:{ROOT}"}
    subprocess.run([sys.executable, "-S", "-c", "import training"], cwd=tmp_path, env=environment, check=True)


def test_the_installed_program_asks_for_no_package_of_the_workshop(program):
    (installed,) = metadata.distributions(name="text-training", path=[str(program.parent / "site")])
    asked_for = {Requirement(each).name for each in installed.requires}
    assert asked_for == {"numpy", "psutil", "pyarrow", "pydantic", "PyYAML", "ray", "torch", "tqdm"}


# --- what it computes ------------------------------------------------------------------------------------------------


def test_tracebacks_of_our_own_are_told_from_those_of_ray(tmp_path):
    shown = []
    for fails in (
        lambda: configuration.load(tmp_path),
        lambda: load(tmp_path / "state.pt"),
        lambda: ScalingConfig(elastic_resize_monitor_interval_s=-1),
    ):
        try:
            fails()
        except Exception:
            shown.append(traceback.format_exc())
    assert [has_traceback(text) for text in shown] == [True, True, False], shown


def test_one_process_and_two_workers_have_the_same_losses(program, on_cluster, tmp_path):
    run(program, tmp_path, "local_training", *options(program, "local", *EXACT))
    said = run(program, tmp_path, "distributed_training", *options(program, "ray", *EXACT, "checkpoint.keep_best=1"))
    local, ray = result(tmp_path, "local"), result(tmp_path, "ray")
    assert len(losses(local)) == 3 * 43
    assert losses(ray) == pytest.approx(losses(local), abs=1e-9)
    assert [line["val_accuracy"] for line in ray["epochs"]] == [line["val_accuracy"] for line in local["epochs"]]
    assert [line["train_accuracy"] for line in ray["epochs"]] == [line["train_accuracy"] for line in local["epochs"]]
    assert {line["world_size"] for line in ray["epochs"]} == {2}
    assert ray["test_accuracy"] == local["test_accuracy"] > 0.4
    assert said.count("test_accuracy") == 2 and not has_traceback(said)

    # Both keep their best; both predict what they have reported, to the last digit.
    for name in ("local", "ray"):
        (tmp_path / "output").unlink()
        assert float(run(program, tmp_path, "predict", f"runs/{name}", "--test")) == local["test_accuracy"]
    assert 1 <= len(list((tmp_path / "runs/ray").glob("checkpoint-*"))) <= 3  # with Ray's list
    (tmp_path / "lines").write_text("loop = asyncio.get_running_loop()\n\nself.assertEqual(1, 2)\\n\n")
    (tmp_path / "output").unlink()
    answers = run(program, tmp_path, "predict", "runs/local", "lines").splitlines()
    assert [answer.split("\t")[0] in data.PACKAGES for answer in answers] == [True] * 3

    # Every rank has a structured log of its own.
    logs = sorted((tmp_path / "logs/ray").glob("*.jsonl"))
    lines = [json.loads(line) for line in logs[1].read_text().splitlines()]
    assert len(logs) == 2 and {(line["rank"], line["local_rank"], line["run"]) for line in lines} == {(1, 1, "ray")}
    assert [line["step"] for line in lines if "lr" in line][:4] == [10, 20, 30, 40]


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> list[float]:
    return losses(here(tmp_path_factory.mktemp("exact"), *EXACT, "training.epochs=1"))


def test_predictions_are_made_in_the_precision_of_the_training(tmp_path, monkeypatch, capsys):
    trained = here(tmp_path, "training.precision=bf16", "training.epochs=1")
    seen, build = [], model.build

    def build_and_watch(*sizes: object) -> torch.nn.Module:
        network = build(*sizes)
        network.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
        return network

    monkeypatch.setattr(model, "build", build_and_watch)
    monkeypatch.setattr(sys, "argv", ["predict.py", str(tmp_path / "runs/here"), "--test"])
    capsys.readouterr()
    with torch.no_grad():
        predict.main()
    assert float(capsys.readouterr().out) == trained["test_accuracy"] and seen and all(seen)

    # Nobody reads on: no traceback.
    (tmp_path / "lines").write_text("import asyncio\n" * 5000)
    command = f"{sys.executable} -m training.predict {tmp_path}/runs/here {tmp_path}/lines | head -n 1"
    source = {**os.environ, "PYTHONPATH": f"{ROOT}:{PROGRAM}/src"}
    done = subprocess.run(["sh", "-c", command], env=source, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """The first step's loss is still finite: it is that of the first weights."""
    with pytest.raises(UsageError, match=r"diverged: .* is not finite \(not saved\)"):
        here(tmp_path, *EXACT, "training.lr=1e308", "checkpoint.every_steps=1")
    assert not list((tmp_path / "runs/here").glob("*.pt"))


@pytest.mark.parametrize(
    "change", ["training.accumulation_steps=3", "dataset.loader_workers=2", "checkpoint.every_steps=7"]
)
def test_what_must_not_change_the_losses(change, exact, tmp_path):
    assert losses(here(tmp_path, *EXACT, "training.epochs=1", change)) == pytest.approx(exact, abs=1e-9)


def test_gradients_are_clipped(exact, tmp_path):
    """To so little that the model stands still: Adam divides by their size, but not by less than its epsilon, 1e-8."""
    clipped = losses(here(tmp_path, *EXACT, "training.epochs=1", "training.max_grad_norm=1e-12"))
    still = losses(here(tmp_path, *EXACT, "training.epochs=1", "training.lr=1e-9"))
    assert clipped == pytest.approx(still, abs=1e-4)
    assert exact[0] == clipped[0] and exact != pytest.approx(still, abs=0.05)


def test_training_ends_early_and_the_best_are_kept(tmp_path):
    changes = (
        *SMALL,
        "training.epochs=40",
        "training.lr=0.05",
        "training.early_stopping_patience=2",
        "checkpoint.keep_best=2",
    )
    outcome = here(tmp_path, *changes)
    accuracies = [line["val_accuracy"] for line in outcome["epochs"]]
    assert len(accuracies) == accuracies.index(max(accuracies)) + 3 < 40
    ranked = sorted(range(1, len(accuracies) + 1), key=lambda epoch: (-accuracies[epoch - 1], -epoch))
    assert outcome["best_epoch"] == ranked[0]
    steps = sorted(int(path.stem[-8:]) for path in (tmp_path / "runs/here").iterdir())
    assert steps == sorted({43 * epoch for epoch in (*ranked[:2], len(accuracies))})
    assert outcome["checkpoint"].endswith(f"checkpoint-{43 * ranked[0]:08d}.pt")


def test_the_defaults_reach_what_the_readme_says(tmp_path):
    """On the snippets of Python 3.11, 3.12 and 3.13; those of their later releases may differ a little."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    folder = Path(data.prepare(configuration.load(PROGRAM / "config").dataset, f"{tmp_path}/data", max_workers=2))
    rows = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in data.SPLITS
    }
    assert [len(rows[name]) for name in data.SPLITS] == [2560, 320, 320]
    words = CountVectorizer(tokenizer=data.tokenize, token_pattern=None, lowercase=False, max_features=2000)
    counts = words.fit_transform([row["text"] for row in rows["train"]])
    baseline = LogisticRegression(max_iter=2000).fit(counts, [row["label"] for row in rows["train"]])
    seen = words.transform([row["text"] for row in rows["test"]])
    words, network = baseline.score(seen, [row["label"] for row in rows["test"]]), here(tmp_path)["test_accuracy"]
    assert 0.8 < network < words < 0.98


# --- data of one's own -----------------------------------------------------------------------------------------------


def rows_of_reviews(number: int) -> list[tuple[str, str]]:
    good, bad = ("splendid", "great", "lovely", "fine"), ("dull", "poor", "awful", "weak")
    return [
        (f"a {(good if each % 2 else bad)[each // 2 % 4]} film, number {each}", ("good" if each % 2 else "bad"))
        for each in range(number)
    ]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_file_of_one_s_own(suffix, tmp_path):
    path = tmp_path / f"reviews.{suffix}"
    rows = rows_of_reviews(200)
    if suffix == "csv":
        path.write_text("review,stars\n" + "".join(f'"{text}",{label}\n' for text, label in rows))
    else:
        path.write_text("".join(json.dumps({"review": text, "stars": label}) + "\n" for text, label in rows))
    columns = ("dataset.text_column=review", "dataset.label_column=stars", "dataset.kind=file", f"dataset.file={path}")
    outcome = here(tmp_path, *SMALL, *columns, "training.batch_size=8", "training.epochs=4", "model.dropout=0")
    assert outcome["test_accuracy"] == 1.0
    state = utils.best_state(str(tmp_path / "runs/here"))[1]
    assert state["vocabulary"]["labels"] == ["bad", "good"]
    # Of the training set alone: the numbers of other rows are unknown tokens.
    assert len(state["vocabulary"]["tokens"]) <= 198


LABELED = "text,label\n" + "".join(f"film {number},{('pos', 'neg')[number % 2]}\n" for number in range(30))
AS_JSONL = "".join(json.dumps({"text": f"film {number}", "label": number % 2}) + "\n" for number in range(30))


def file_dataset(path: Path | str) -> configuration.Dataset:
    return configuration.load(PROGRAM / "config", ["dataset.kind=file", f"dataset.file={path}"]).dataset


def read(path: Path, content: str | bytes) -> list[tuple[str, str]]:
    """The rows of a file with this content, as pairs of text and label."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [(row["text"], row["label"]) for row in data.read_file(file_dataset(path))]


@pytest.mark.parametrize(("name", "content", "words"), [
    ("none.csv", None, "No such file"),
    ("empty.csv", "", "has 0 rows"),
    ("empty.jsonl", "", "has 0 rows"),
    ("header.csv", "text,label\n", "has 0 rows"),
    ("short.csv", "text,label\na,b\nc,d\n", "has 2 rows; at least 20 are needed"),
    ("one.csv", "text,label\n" + "a,b\n" * 50, "all rows have the same label, b"),
    ("column.csv", "text,star\n" + "a,b\n" * 50, "line 1 has no label (dataset.label_column), only ['text', 'star']"),
    ("hole.csv", "text,label\n" + "a,b\n" * 20 + "a,\n", "line 22 has an empty label"),
    ("spaces.csv", LABELED + " ,pos\n", "line 32 has an empty text (dataset.text_column)"),
    ("null.jsonl", AS_JSONL + '{"text": "a", "label": null}\n', "line 31 has an empty label"),
    ("comma.csv", LABELED + "good, really,pos\n", "line 32 has 3 fields, and the header 2: separate fields"),
    ("comma last.csv", LABELED + "film,pos,\n", "line 32 has 3 fields, and the header 2"),
    ("few.csv", LABELED + "film\n", "line 32 has 1 field, and the header 2"),
    ("after two lines.csv", LABELED + '"two\nlines",pos\n\nfilm\n', "line 35 has 1 field, and the header 2"),
    ("open.csv", LABELED.replace("film 4", '"film 4'), "line 6: unexpected end of data: a quote that begins a field"),
    ("open last.csv", LABELED + '"film,pos\n', "line 32: unexpected end of data"),
    ("quote.csv", LABELED + '"it said "wow" twice",pos\n', "line 32: ',' expected after '\"': a quote that begins a"),
    ("tabs.csv", LABELED.replace(",", "\t"), "line 1 has no text (dataset.text_column), only ['text\\tlabel']"),
    ("no header.csv", LABELED.partition("\n")[2], "line 1 has no text (dataset.text_column), only ['film 0', 'pos']"),
    ("twice.csv", LABELED.replace("text", "text,label").replace(" ", ","), "the name label appears twice"),
    ("twice.jsonl", AS_JSONL + '{"text": "a", "label": 1, "label": 0}\n', "line 31 is not JSON (the name label"),
    ("nul.csv", LABELED + "fi\0lm,pos\n", r"line 32 has a character in its text (dataset.text_column) that no text"),
    ("nul.jsonl", AS_JSONL + '{"text": "a", "label": "p\\u0000"}\n', "line 31 has a character in its label"),
    ("half.jsonl", AS_JSONL + '{"text": "a\\ud800", "label": 1}\n', "line 31 has a character in its text"),
    ("broken.jsonl", '{"text": "a", "label": "b"}\n{"text"\n', "line 2 is not JSON (Expecting ':' delimiter): "),
    ("pretty.jsonl", AS_JSONL.replace(", ", ",\n"), "line 1 is not JSON"),
    ("deep.jsonl", AS_JSONL + "[" * 100_000, "line 31 is not JSON (maximum recursion depth"),
    ("number.jsonl", AS_JSONL + "1" * 5000, "line 31 is not JSON (Exceeds the limit"),
    ("list.jsonl", "[1, 2]\n" * 20, "line 1 is [1, 2], not a JSON object: write one object per line"),
    ("word.jsonl", AS_JSONL + '"film"\n', "line 31 is 'film', not a JSON object"),
    ("array.jsonl", "[" + AS_JSONL.strip().replace("\n", ", ") + "]", "line 1 is [{'label': 0, "),
    ("array.json", "[" + AS_JSONL.strip().replace("\n", ", ") + "]", "should end with .csv or .jsonl"),
    ("key.jsonl", AS_JSONL + '{"text": "a", "stars": 1}\n', "line 31 has no label (dataset.label_column), only"),
    ("float.jsonl", AS_JSONL + '{"text": "a", "label": 1.0}\n', "line 31 has 1.0 as its label (dataset.label_column)"),
    ("nan.jsonl", AS_JSONL + '{"text": "a", "label": NaN}\n', "line 31 has nan as its label"),
    ("labels.jsonl", AS_JSONL + '{"text": "a", "label": ["pos"]}\n', "line 31 has ['pos'] as its label"),
    ("texts.jsonl", AS_JSONL + '{"text": {"a": "b"}, "label": 1}\n', "line 31 has {'a': 'b'} as its text"),
    ("latin.csv", b"text,label\n\xe9,b\n", "line 2 is not text in UTF-8 (invalid continuation byte)"),
    ("utf-16.csv", LABELED.encode("utf-16"), "(invalid start byte): save it as UTF-8"),
    ("packed.csv", gzip.compress(LABELED.encode()), "line 1 is not text in UTF-8 (invalid start byte)"),
    ("packed.csv.gz", gzip.compress(LABELED.encode()), "should end with .csv or .jsonl; unpack"),
    ("table.xlsx", "", "should end with .csv or .jsonl"),
    ("numbers.csv", "text,label\n" + "".join(f"a,{each / 7}\n" for each in range(40)), "no training row has the label"),
])  # fmt: skip
def test_a_file_that_cannot_be_used(name, content, words, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as caught:
        data.prepare(file_dataset(path), str(tmp_path), max_workers=2)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"dataset.file = {path}: ") and words in line and len(line) < 300 + len(str(path))


@pytest.mark.parametrize(("name", "content", "last"), [
    ("mark.csv", LABELED.encode("utf-8-sig"), None),  # Excel writes a byte order mark before the first column's name
    ("mark.jsonl", AS_JSONL.encode("utf-8-sig"), None),
    ("UPPER.CSV", LABELED, None),
    ("UPPER.JSONL", AS_JSONL, None),
    ("windows.csv", LABELED.replace("\n", "\r\n"), None),
    ("old mac.csv", LABELED.replace("\n", "\r"), None),
    ("blank lines.csv", LABELED.replace("\n", "\n\n"), None),
    ("blank lines.jsonl", AS_JSONL.replace("\n", "\n \n"), None),
    ("spaces.csv", LABELED.replace(",", " , ").replace("\n", " \n"), None),
    ("unnamed columns.csv", LABELED.replace("\n", ",,\n"), None),  # Excel writes these
    ("quoted.csv", LABELED + 'film 30, "pos"\n', ("film 30", "pos")),
    ("quotes.csv", LABELED + '"a ""good"" film, really",pos\n', ('a "good" film, really', "pos")),
    ("quotes inside.csv", LABELED + 'a "good" film,pos\n', ('a "good" film', "pos")),
    ("lines.csv", LABELED + '"a\nfilm",pos\n', ("a\nfilm", "pos")),
    ("long.csv", LABELED + "x" * 140_000 + ",pos\n", ("x" * 140_000, "pos")),
    ("separator.jsonl", AS_JSONL + '{"text": "a\u2028b", "label": 1}\n', ("a\u2028b", "1")),
])  # fmt: skip
def test_a_file_that_is_read_as_it_is_meant(name, content, last, tmp_path):
    rows = read(tmp_path / name, content)
    labels = ("pos", "neg") if name.lower().endswith("csv") else ("0", "1")
    assert [(text.strip(), label) for text, label in rows[:30]] == [(f"film {i}", labels[i % 2]) for i in range(30)]
    assert rows[30:] == ([last] if last else [])


def test_labels_that_differ_by_spaces_are_one(tmp_path):
    content = LABELED + "film,pos \nfilm,\u00a0pos\nfilm,\tpos\n"
    assert {label for _, label in read(tmp_path / "films.csv", content)} == {"pos", "neg"}
    content = AS_JSONL.replace("1}", '" 1"}').replace("0}", '"0 "}')
    assert {label for _, label in read(tmp_path / "films.jsonl", content)} == {"0", "1"}


def test_rows_and_labels_are_counted_before_training(tmp_path, capsys):
    """So that a label which nobody meant is seen, however rare it is."""
    (tmp_path / "films.csv").write_text(LABELED + "film,pos\n")
    said = []
    data.prepare(file_dataset(tmp_path / "films.csv"), str(tmp_path), 2, said.append)
    assert said == ["31 rows, 2 labels: pos 16, neg 15"]
    rows = [{"label": f"{number:02}"} for number in range(20) for _ in range(40 - number)] + [{"label": "poss"}]
    assert data.describe_rows(rows) == (
        "611 rows, 21 labels: 00 40, 01 39, 02 38, 03 37, 04 36, 11 more, 16 24, 17 23, 18 22, 19 21, poss 1"
    )
    config = configuration.load(PROGRAM / "config", SYNTHETIC)
    assert data.prepare(config.dataset, str(tmp_path), max_workers=2) == ""


def test_a_row_that_cannot_be_used_is_found_before_anything_starts(tmp_path, monkeypatch):
    (tmp_path / "films.csv").write_text(LABELED + "good, really,pos\n")
    arguments = options(PROGRAM, "run", "dataset.kind=file", "dataset.file=films.csv")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["local_training.py", *arguments])
    with pytest.raises(UsageError, match=r"^dataset.file = films.csv: line 32 has 3 fields"):
        local_training.main()
    assert [path.name for path in tmp_path.iterdir()] == ["films.csv"]


def films(path: Path, number: int) -> tuple[str, ...]:
    """A file of so many rows, whose words are as frequent as those of any other number."""
    path.write_text("text,label\n" + "".join("bad film,0\n" if row % 4 else "good film,1\n" for row in range(number)))
    return (*SMALL, "training.epochs=3", "training.lr=0.03", "dataset.kind=file", f"dataset.file={path}")


def test_the_folder_s_name_tells_rows_and_splits(tmp_path, monkeypatch):
    def folder(number: int) -> str:
        changes = films(tmp_path / "films.csv", number)
        return data.prepare(configuration.load(PROGRAM / "config", changes).dataset, str(tmp_path), max_workers=2)

    first = folder(200)
    assert folder(201) != first == folder(200)
    monkeypatch.setattr(data, "HELD_OUT", 5)
    assert folder(200) != first


def test_a_run_goes_on_with_its_own_rows_alone(tmp_path, monkeypatch, capsys):
    """With rows added the vocabulary may be the same, but what was trained on is in the new test set."""
    changes = films(tmp_path / "films.csv", 200)
    accuracy = here(tmp_path, *changes)["test_accuracy"]
    path, state = utils.best_state(str(tmp_path / "runs/here"))
    monkeypatch.setattr(sys, "argv", ["predict.py", str(tmp_path / "runs/here"), "--test"])
    capsys.readouterr()
    predict.main()
    assert float(capsys.readouterr().out) == accuracy > 0.5

    films(tmp_path / "films.csv", 240)
    dataset = configuration.load(PROGRAM / "config", changes).dataset
    splits = data.load(dataset, data.prepare(dataset, f"{tmp_path}/data", max_workers=2))
    assert splits.vocabulary == state["vocabulary"] and splits.name != state["data"]
    other = f"the run was started with {state['data']}, and the data are now {splits.name}: restore the original rows"
    with pytest.raises(UsageError, match=other):
        here(tmp_path, *changes, state=state)
    with pytest.raises(UsageError, match=other):
        predict.main()

    films(tmp_path / "films.csv", 200)
    with pytest.raises(UsageError, match=r"a different dataset.vocab_size or max_length"):
        here(tmp_path, *changes, "dataset.max_length=13", state=state)
    del state["data"]
    save_atomically(state, path)
    for goes_on in (predict.main, lambda: here(tmp_path, *changes, state=state)):
        with pytest.raises(UsageError, match=r"by an older version of this program, .*: start a new run"):
            goes_on()


def test_synthetic_data_are_compared_too(tmp_path):
    changes = (*SMALL, "dataset.kind=synthetic", "model.kind=mlp", "training.epochs=1")
    here(tmp_path, *changes, "dataset.num_samples=200")
    state = utils.best_state(str(tmp_path / "runs/here"))[1]
    with pytest.raises(UsageError, match="started with synthetic-200, and the data are now synthetic-300"):
        here(tmp_path, *changes, "dataset.num_samples=300", state=state)


def test_what_prediction_refuses(tmp_path, monkeypatch):
    def refused(*args: object) -> str:
        monkeypatch.setattr(sys, "argv", ["predict.py", *map(str, args)])
        with pytest.raises(UsageError) as caught:
            predict.main()
        (line,) = str(caught.value).splitlines()
        return line

    here(tmp_path, *films(tmp_path / "films.csv", 200))
    (tmp_path / "films.csv").unlink()
    assert f"dataset.file = {tmp_path}/films.csv: No such file" in refused(tmp_path / "runs/here", "--test")
    (tmp_path / "latin.txt").write_bytes(b"a film\n\xe9\n")
    (tmp_path / "lines.CSV").write_text(LABELED)
    assert "lines.CSV: one text per line is expected, not rows" in refused(
        tmp_path / "runs/here", tmp_path / "lines.CSV"
    )
    assert "latin.txt: not text in UTF-8: " in refused(tmp_path / "runs/here", tmp_path / "latin.txt")
    assert "none.txt: No such file" in refused(tmp_path / "runs/here", tmp_path / "none.txt")
    assert "latin.txt" in refused(tmp_path / "latin.txt")  # no run's folder, but a file
    assert f"{tmp_path}/none: it has none" in refused(tmp_path / "none")
    save_atomically({"model": {}, "progress": {"step": 3}}, path_for_step(tmp_path, 3))  # as those of chapters 1 and 2
    assert "checkpoint-00000003.pt (not a checkpoint of this program)" in refused(tmp_path)


# --- the configuration -----------------------------------------------------------------------------------------------

ENVIRONMENT, HYPER = "environment.yaml", "hyperparameters.yaml"
WRONG = [
    (HYPER, "  epochs: 8\n", "", ["hyperparameters.yaml: training.epochs is missing"]),
    (
        HYPER,
        "  epochs: 8",
        "  epoch: 8",
        ["training.epochs is missing", "training.epoch: no such key; training has batch_size"],
    ),
    (HYPER, "batch_size: 64 ", "batch_size: many ", ["training.batch_size = 'many': should be a valid integer"]),
    (HYPER, "batch_size: 64 ", "batch_size: yes ", ["training.batch_size = True: should be a number"]),
    (HYPER, "dropout: 0.3", "dropout: 1.5", ["model.dropout = 1.5: should be less than 1"]),
    (HYPER, "lr: 0.003", "lr: 1.0e+39", ["training.lr = 1e+39: overflows in the optimizer, which computes in float32"]),
    (HYPER, "lr: 0.003", "lr: -1", ["training.lr = -1: should be greater than 0"]),
    (HYPER, "kind: rnn ", "kind: bert ", ["model.kind = 'bert': should be 'rnn', 'cnn' or 'mlp'"]),
    (
        HYPER,
        "precision: fp32",
        "precision: fp8",
        ["training.precision = 'fp8': should be 'fp32', 'bf16', 'fp16' or 'fp64'"],
    ),
    (HYPER, "kind: snippets", "kind: file    ", ["dataset.kind = file and dataset.file = None"]),
    (
        HYPER,
        "file: null ",
        "file: s3://bucket/reviews.csv ",
        ["dataset.file = 's3://bucket/reviews.csv': should be a path on this machine, not a URI"],
    ),
    (HYPER, "kind: snippets", "kind: synthetic", ["dataset.kind = synthetic and model.kind = rnn"]),
    (HYPER, "batch_size: 64 ", "batch_size: 63 ", ["training.batch_size = 63: is not divisible by 2"]),
    (HYPER, "lowest: 1e-4", "lowest: 1", ["tuning.lr: lowest = 1.0 is not below highest = 0.01"]),
    (HYPER, "training:", "training: [", ["hyperparameters.yaml: line ", "not YAML"]),
    (HYPER, "  epochs: 8\n", "  epochs: 8\n  epochs: 9\n", ["the key epochs appears twice"]),
    (HYPER, "model:", "modle:", ["hyperparameters.yaml: modle: not a section of this file", "model is missing"]),
    (
        ENVIRONMENT,
        "paths:",
        "training:",
        ["training: not a section of this file; it belongs in hyperparameters.yaml", "paths is missing"],
    ),
    (
        ENVIRONMENT,
        "num_workers: 2 ",
        "num_workers: [2, 1] ",
        ["cluster.num_workers = [2, 1]: the minimum must come first"],
    ),
    (ENVIRONMENT, "num_workers: 2 ", "num_workers: 0 ", ["cluster.num_workers = 0: should be greater than 0"]),
    (
        ENVIRONMENT,
        "model_save_dir: runs",
        "model_save_dir: ''",
        ["paths.model_save_dir = '': should have at least 1 char"],
    ),
]


@pytest.mark.parametrize(("file", "before", "after", "words"), WRONG)
def test_a_wrong_configuration(file, before, after, words, tmp_path):
    shutil.copytree(PROGRAM / "config", tmp_path / "config")
    text = (tmp_path / "config" / file).read_text()
    assert text.count(before) == 1
    (tmp_path / "config" / file).write_text(text.replace(before, after))
    with pytest.raises(UsageError) as caught:
        configuration.load(tmp_path / "config")
    for each in words:
        assert each in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1 + len([word for word in words if word not in ("not YAML",)])


def test_all_mistakes_at_once_in_the_program_s_own_words(program, tmp_path):
    wrong = ("training.lr=fast", "model.kind=bert", "traning.lr=1", "training.speed=2", "training.lr")
    said = run(program, tmp_path, "local_training", *options(program, "wrong", *wrong), code=2)
    assert said.startswith("local_training.py: error: the configuration cannot be used:\n")
    assert [line.split(":")[0].strip() for line in said.splitlines()[1:]].count("--set") == 3
    assert "--set: training.lr = 'fast': should be a valid number" in said
    assert len(said.splitlines()) == 6 and "Traceback" not in said


def test_a_missing_folder_and_numbers_as_yaml_writes_them(tmp_path):
    with pytest.raises(UsageError, match="No such file or directory; --config-dir names the folder"):
        configuration.load(tmp_path)
    config = configuration.load(PROGRAM / "config", ["training.lr=3e-4", "cluster.num_workers=[1, 2]"])
    assert config.training.lr == 3e-4 and config.cluster.num_workers == (1, 2)
    assert configuration.load(PROGRAM / "config").cluster.num_workers == (2, 2)
    configuration.write(config, tmp_path / "written")
    assert configuration.load(tmp_path / "written") == config


# --- what it survives ------------------------------------------------------------------------------------------------


def wait_for(folder: Path, pattern: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + LIMIT
    while not list(folder.glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline, (folder / "output").read_text()
        time.sleep(0.02)


def test_killed_inside_an_epoch_and_resumed(program, tmp_path):
    changes = (*SMALL, "checkpoint.every_steps=10")  # with dropout
    run(program, tmp_path, "local_training", *options(program, "whole", *SMALL))
    process = begin(program, tmp_path, "local_training", *options(program, "killed", *changes))
    wait_for(tmp_path, "runs/killed/checkpoint-000000[5-9]?.pt", process)
    process.send_signal(signal.SIGKILL)
    assert process.wait(LIMIT) == -signal.SIGKILL
    other = (*changes, "training.lr=0.02")
    said = run(program, tmp_path, "local_training", *options(program, "killed", *other), "--resume")
    assert said.count("note: training.lr was 0.01, which stays: it is restored; now 0.02") == 1, said
    assert "continuing after step " in said
    whole, killed = result(tmp_path, "whole"), result(tmp_path, "killed")
    assert without_times(killed) == without_times(whole)
    assert killed["test_accuracy"] == whole["test_accuracy"]
    assert "holds a run already" in run(
        program, tmp_path, "local_training", *options(program, "killed", *changes), code=2
    )
    other = (*changes, "model.hidden_dim=16")
    said = run(program, tmp_path, "local_training", *options(program, "killed", *other), "--resume", code=2)
    assert "error: the run was started with model.hidden_dim = 8, and now it is 16" in said


def trainer_of_ones(*changes: str, store: Callable = lambda *_: None) -> trainer.Trainer:
    """A trainer with two samples of ones."""
    config = configuration.load(PROGRAM / "config", [*SMALL, *changes])
    tokens, lengths, labels = (torch.ones(2, *shape, dtype=torch.int64) for shape in ((12,), (), ()))
    splits = data.Splits(*[torch.utils.data.TensorDataset(tokens, lengths, labels)] * 3, None, 9, 4, "ones")
    return trainer.Trainer(config, splits, Worker(), lambda *_, **__: None, store)


@pytest.mark.parametrize(("before", "after"), [("fp32", "fp16"), ("fp16", "fp32"), ("fp16", "fp16")])
def test_a_run_goes_on_in_another_precision(before, after):
    """The scale of fp16's gradients goes on where there is one, and begins anew where there was none."""
    states = []
    one = trainer_of_ones(f"training.precision={before}", store=lambda state, metrics: states.append(state))
    one.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=before == "fp16")
    one.save(None)
    other = trainer_of_ones(f"training.precision={after}")
    new = other.scaler.get_scale()
    other.restore(states[0])
    assert other.scaler.get_scale() == (8.0 if (before, after) == ("fp16", "fp16") else new)


def test_an_empty_share_takes_part():
    """Where the last batch is smaller than the number of ranks, some have no sample: their gradient is zero."""
    one = trainer_of_ones("training.precision=fp64", "model.dropout=0")
    one.join()
    before = [each.clone() for each in one.model.parameters()]
    assert one.train_step([each[:0] for each in one.splits.train.tensors], 1).tolist() == [0, 0]
    assert all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True))


@pytest.mark.parametrize("resources", ["{CPU: 9999}", "{CPU: 1, GPU: 99}"])
def test_workers_that_fit_nowhere_are_refused(resources, program, no_ray, tmp_path):
    """Ray Train would wait for ever."""
    changes = (*SMALL, f"cluster.resources_per_worker={resources}")
    said = run(program, tmp_path, "distributed_training", *options(program, "large", *changes), code=2)
    assert "error: cluster.resources_per_worker = {'CPU': " in said and "room for 0 on nodes with {'CPU': " in said
    assert not has_traceback(said)


class Trained(Exception):
    """Raised in place of training: the workers were not refused."""


@pytest.fixture
def train_on(monkeypatch, tmp_path) -> Callable:
    """Start a program as far as Ray's trainer or tuner, on a cluster whose nodes have these resources."""

    class Start:
        can_restore = staticmethod(lambda folder: False)

        def __init__(self, *_: object, **__: object) -> None:
            raise Trained

    def train_on(program: Path, nodes: list[dict], *changes: str) -> None:
        totals = sum(map(Counter, nodes), Counter())
        monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": node} for node in nodes])
        monkeypatch.setattr(ray, "cluster_resources", lambda: totals)
        monkeypatch.setattr(ray, "available_resources", lambda: totals)
        words = [word for change in (*SYNTHETIC, *changes) for word in ("--set", change)]
        monkeypatch.setattr(sys, "argv", [str(program), "--config-dir", str(PROGRAM / "config"), *words])
        if program.stem == "tune":
            sys.argv.append("--out=best")
        try:
            runpy.run_path(str(program), run_name="program")["main"]()
        finally:
            lease.release()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "a-cluster")
    monkeypatch.setattr(cluster, "join", lambda *_: None)
    monkeypatch.setattr(cluster, "grows", lambda *_: False)  # it would wait for 45 seconds
    monkeypatch.setattr(script, "stop_on_signals", lambda *_, **__: None)
    monkeypatch.setattr("ray.train.torch.TorchTrainer", Start)
    monkeypatch.setattr("ray.tune.Tuner", Start)
    return train_on


SOURCE = PROGRAM / "src/training"
TRAIN, TUNE = SOURCE / "distributed_training.py", SOURCE / "tune.py"
TUNE_OVER_TRAIN = PROGRAM.parent / "tune_over_train.py"
NODE = {"CPU": 4, "GPU": 4, "slot": 2, "memory": 8e9}


@pytest.mark.parametrize(("number", "resources"), [
    (8, "{CPU: 0.5}"), (8, "{GPU: 0.5}"), (4, "{GPU: 1}"), (2, "{slot: 1}"), (8, "{memory: 1e9}"),
])  # fmt: skip
@pytest.mark.parametrize("program", [TRAIN, TUNE_OVER_TRAIN])
def test_workers_ask_for_what_they_need(program, number, resources, train_on):
    """And not for a CPU each as well."""
    node = NODE | {"CPU": 4 * ("CPU" in resources) + (program is TUNE_OVER_TRAIN)}  # whose trials need one themselves
    if "GPU" not in resources:
        del node["GPU"]
    with pytest.raises(Trained):
        train_on(program, [node], f"cluster.num_workers={number}", f"cluster.resources_per_worker={resources}")


@pytest.mark.parametrize(("program", "changes", "said"), [
    (TRAIN, ["cluster.resources_per_worker={CPU: 0.5}", "cluster.num_workers=20", "cluster.use_gpu=false"],
     r"cluster.resources_per_worker = {'CPU': 0.5}: 20 workers are requested, but there is room for 8 on nodes with"),
    (TRAIN, ["cluster.resources_per_worker={tpu: 1}", "cluster.use_gpu=false"], r"room for 0 on nodes with {'tpu': 0}"),
    (TRAIN, ["cluster.resources_per_worker={memory: 1e10}"], r"room for 0 on nodes with {'memory': 8000000000"),
    (TRAIN, ["cluster.num_workers=20", "cluster.use_gpu=false"],
     r"20 workers need 20 CPUs and no GPU, and there are 4 CPUs and 4 GPUs: fewer cluster.num_workers or RAY_ADDRESS"),
    (TRAIN, ["cluster.num_workers=5"], r"5 workers need 5 CPUs and 5 GPUs, .*: fewer cluster.num_workers or "
     r"cluster.use_gpu=false or RAY_ADDRESS of a larger cluster will do"),
    # A trial of two workers that take all CPUs would wait for ever for its own hundredth of one.
    (TUNE_OVER_TRAIN, ["cluster.resources_per_worker={CPU: 2}", "cluster.use_gpu=false"],
     r"2 workers and 1 more CPU are requested, but there is room for 2 on nodes with {'CPU': 4} in total"),
    (TUNE, ["tuning.resources_per_trial={CPU: 5}"], r"tuning.resources_per_trial = {'CPU': 5.0}: more than any node"),
])  # fmt: skip
def test_what_is_too_much_is_refused_by_its_key(program, changes, said, train_on):
    changes = [*changes, "training.batch_size=100"]
    with pytest.raises(UsageError) as refused:
        train_on(program, [NODE], *changes)
    assert re.search(said.replace("{", r"\{"), configuration.name_keys(refused.value))


def test_trials_wait_for_nodes_that_are_coming(train_on, monkeypatch):
    monkeypatch.setattr(cluster, "grows", lambda *_: True)
    with pytest.raises(Trained):
        train_on(TUNE, [{"CPU": 0}], "tuning.resources_per_trial={CPU: 2}")


def refused_by(program: Path, *words: str) -> str:
    """The line of a program that refuses these words."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as errors:
        patch.setattr(sys, "argv", [str(program), *words])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(program), run_name="__main__")
    (line,) = errors.getvalue().splitlines()
    assert caught.value.code == 2 and line.startswith(f"{program.name}: error: ")
    return line


@pytest.mark.parametrize("program", [SOURCE / "local_training.py", TRAIN, TUNE, TUNE_OVER_TRAIN])
@pytest.mark.parametrize("folder", ["ftp://host/runs", "s3://bucket/runs?region=x", "/proc/runs"])
def test_a_folder_that_cannot_be_used_is_refused_by_its_key(program, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [f"--set={change}" for change in (*SYNTHETIC, f"paths.model_save_dir={folder}")]
    words += ["--config-dir", str(PROGRAM / "config"), *(["--out=best"] * (program is TUNE))]
    line = refused_by(program, *words)
    assert "paths.model_save_dir" in line and "--storage-path" not in line


def test_other_messages_name_keys_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--config-dir", str(PROGRAM / "config"), *(f"--set={change}" for change in SYNTHETIC)]
    line = refused_by(SOURCE / "local_training.py", *words, "--run-name", "a/b")
    assert "argument --run-name: 'a/b' is not the name of a run: it becomes a folder under paths.model_save_dir" in line
    assert "training.precision fp16 needs" in refused_by(
        SOURCE / "local_training.py", *words, "--set=training.precision=fp16"
    )
    assert "with a smaller training.lr" in refused_by(SOURCE / "local_training.py", *words, "--set=training.lr=1e30")
    assert "cannot use run: Unrecognized" in refused_by(SOURCE / "predict.py", "ftp://host/runs")


def test_every_option_that_a_message_names_is_one_of_the_program():
    """In whatever `shared` may say to its user: they are its own, or it has keys in their place."""
    own = {"--resume", "--run-name", "--help"}
    # The scripts' data sets and models; their local mode; torchrun's and srun's own options; papermill's.
    elsewhere = {"tasks", "datasets", "models", "distributed", "doctor"}
    unreachable = {"--metrics-out", "--dataset"}  # the program has neither
    modules = [path for path in (ROOT / "shared").rglob("*.py") if path.stem not in elsewhere]
    modules.remove(ROOT / "shared/on_ray/options.py")  # of the scripts
    for path in modules:
        raised = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
        texts = [text.value for node in raised for text in ast.walk(node) if isinstance(text, ast.Constant)]
        for option in re.findall(r"--[a-z][a-z-]+", " ".join(map(str, texts))):
            assert option in own | unreachable | configuration.OPTION_KEYS.keys(), f"{path.name} names {option}"


def test_workers_that_may_fit_later_are_waited_for(ray_cluster, monkeypatch, capsys):
    """On a cluster whose one node has four CPUs."""

    def uses_gpu(resources: str) -> bool:
        config = configuration.load(PROGRAM / "config", [f"cluster.resources_per_worker={resources}"])
        return distributed_training.check_resources(config.cluster, False, Worker(label="driver"))

    monkeypatch.setattr(cluster, "AUTOSCALER_WAIT_S", 1)
    ray.init(ray_cluster, log_to_driver=False)
    try:
        assert not uses_gpu("{CPU: 2}") and not uses_gpu("null")
        with pytest.raises(UsageError, match=r"2 workers are requested, .* room for 1 on nodes with {'CPU': 4.0} in"):
            uses_gpu("{CPU: 3}")
        with pytest.raises(UsageError, match=r"room for 0 on nodes with {'CPU': 4.0, 'GPU': 0} in total"):
            uses_gpu("{CPU: 1, GPU: 1}")
        # No autoscaler runs here: this is what one reports once it has begun.
        begun = Namespace(pending_launches=["a node"], pending_nodes=[])
        monkeypatch.setattr(cluster, "get_cluster_status", lambda address: begun)
        assert uses_gpu("{CPU: 1, GPU: 1}")
        assert "the cluster is starting nodes; waiting for 2 times 1 CPU and 1 GPU" in capsys.readouterr().out
    finally:
        ray.shutdown()
