"""The checks of lesson 1.2: the stub and plausible wrong answers are told apart from the right one, with help."""

import importlib.util
import json
import runpy
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import pytest
import torch
from notebook_rules import ROOT

from shared import checks
from shared.checks import chapter_1, machinery

# --- 1.2a: a diagnosis ------------------------------------------------------------------------------------------------

RIGHT = {"A": "weights", "B": "summed", "C": "samples", "D": "correct"}


def four_runs():
    spec = importlib.util.spec_from_file_location("four_runs", ROOT / "01-ddp-pytorch-only/four_runs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_runs_have_the_faults_that_the_check_expects():
    assert four_runs().FAULTS == RIGHT == {run: cause for run, (cause, _) in chapter_1.RUNS_1_2A.items()}
    assert checks.exercise_1_2a(lambda: dict(RIGHT), strict=True)


def stub():
    raise NotImplementedError


@pytest.mark.parametrize(
    ("diagnose", "help_in_message"),
    [
        (stub, "not done yet"),
        (lambda: None, "keys A, B, C and D"),
        (
            lambda: {**RIGHT, "D": "?"},
            "for D you say '?', which is not one of 'correct', 'weights', 'samples'",
        ),
        (
            lambda: {**RIGHT, "A": "forgotten"},
            "equal before step 1 and different after it. Compare both ranks' weights",
        ),
        (lambda: {**RIGHT, "B": "correct"}, "run B is not 'correct'. The ranks agree with each other"),
        (lambda: {**RIGHT, "C": "correct"}, "run C is not 'correct'. Read both ranks' samples"),
        (lambda: {**RIGHT, "D": "forgotten"}, "run D is not 'forgotten'. In a forgotten run"),
    ],
)
def test_a_wrong_diagnosis_is_rejected_with_help(diagnose, help_in_message, capsys):
    assert checks.exercise_1_2a(diagnose) is False
    said = capsys.readouterr().out
    assert help_in_message in said
    with pytest.raises(AssertionError):
        checks.exercise_1_2a(diagnose, strict=True)


# --- 1.2b: a ring -----------------------------------------------------------------------------------------------------

RING = """
    n = len(chunks)
    for step in range(2 * (n - 1)):
        leaves, arrives = (rank - step) % n, (rank - step - 1) % n
        received = exchange(chunks[leaves])
        chunks[arrives] = chunks[arrives] + received if step < n - 1 else received
    return chunks
"""


def ring_file(folder: Path, body: str) -> Path:
    path = folder / "exercise_ring.py"
    head = "import torch.distributed as dist\n\n\ndef ring_all_reduce(chunks, rank, exchange):\n"
    path.write_text(head + textwrap.indent(textwrap.dedent(body), "    "))
    return path


@pytest.fixture
def ranks_are_threads(monkeypatch):
    """The check's ranks are threads of this process, and its script is not started."""

    def run_script(caller, num_ranks, folder, path, chunks):
        pipes = [Queue() for _ in range(num_ranks)]  # to each rank, from its left neighbour

        def work(rank: int, function: Callable) -> None:
            sent = []

            def exchange(tensor):
                sent.append(tensor.numel())
                pipes[(rank + 1) % num_ranks].put(tensor.clone())
                return pipes[rank].get(timeout=5)

            answer = function([torch.tensor(chunk) for chunk in json.loads(chunks)[rank]], rank, exchange)
            said = [chunk.tolist() for chunk in answer] if isinstance(answer, list) else repr(answer)
            Path(folder, f"{rank}.json").write_text(json.dumps({"chunks": said, "sent": sent}))

        function = runpy.run_path(path)["ring_all_reduce"]
        ranks = [threading.Thread(target=work, args=(rank, function)) for rank in range(num_ranks)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()

    monkeypatch.setattr(machinery, "run_script", run_script)


def test_a_ring_of_real_processes_is_accepted(tmp_path):
    assert checks.exercise_1_2b(ring_file(tmp_path, RING), strict=True)


@pytest.mark.parametrize(
    ("body", "help_in_message"),
    [
        ("raise NotImplementedError", "not done yet"),
        (RING.replace("return chunks", "return sum(chunks)"), "return the list of the 3 chunks, 2 numbers each"),
        (RING.replace("2 * (n - 1)", "n - 1"), "exchange() was called 2 times. The first round alone"),
        (RING.replace(" if step < n - 1 else received", ""), "they replace a chunk, and are not added"),
        (RING.replace("(rank - step - 1) % n", "(rank - step) % n"), "holds numbers of other chunks"),
        (RING.replace("(rank - step - 1) % n", "(rank - step + 1) % n"), "holds numbers of other chunks"),
        (RING.replace("step < n - 1", "step < n - 2"), "A finished sum has been overwritten, or never came"),
        (
            """
            total = [chunk.clone() for chunk in chunks]
            for number in range(len(chunks)):
                travelling = chunks[number]
                for _ in range(len(chunks) - 1):
                    travelling = exchange(travelling)
                    total[number] += travelling
            return total
            """,
            "the sum is right, and rank 0 has sent 6 chunks; a ring sends 4",
        ),
        (
            """
            import torch
            travelling = torch.cat(chunks)
            total = travelling.clone()
            for _ in range(len(chunks) - 1):
                travelling = exchange(travelling)
                total += travelling
            return list(total.split(2))
            """,
            "sends 6 numbers at once; a chunk has 2",
        ),
    ],
)
def test_a_wrong_ring_is_rejected_with_help(body, help_in_message, tmp_path, ranks_are_threads, capsys):
    assert checks.exercise_1_2b(ring_file(tmp_path, body)) is False
    assert help_in_message in capsys.readouterr().out


def test_threads_accept_the_right_ring_too(tmp_path, ranks_are_threads):
    assert checks.exercise_1_2b(ring_file(tmp_path, RING), strict=True)


# --- 1.2c: an accuracy ------------------------------------------------------------------------------------------------


def exercise_file(folder, body):
    path = folder / "exercise.py"
    head = "import torch\nimport torch.distributed as dist\n\n\ndef global_accuracy(hits, samples):\n"
    path.write_text(head + textwrap.indent(textwrap.dedent(body), "    "))
    return path


def test_global_accuracy_accepts_the_right_answer(tmp_path):
    body = """
        counts = torch.tensor([hits, samples])
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()
    """
    assert checks.exercise_1_2c(exercise_file(tmp_path, body), strict=True)


@pytest.mark.parametrize(
    ("body", "help_in_message"),
    [
        ("raise NotImplementedError", "not done yet"),
        (
            """
            accuracy = torch.tensor(hits / samples)
            dist.all_reduce(accuracy)
            return accuracy.item() / dist.get_world_size()
            """,
            "mean of the ranks' accuracies",
        ),
        (
            """
            counts = torch.tensor([hits, samples])
            dist.reduce(counts, dst=0)
            return counts[0] / counts[1] if dist.get_rank() == 0 else hits / samples
            """,
            "The ranks have different answers",
        ),
    ],
)
def test_global_accuracy_rejects_wrong_answers_with_help(body, help_in_message, tmp_path, capsys):
    assert checks.exercise_1_2c(exercise_file(tmp_path, body)) is False
    assert help_in_message in capsys.readouterr().out


def answers_without_ranks(monkeypatch, answers):
    """The check's two ranks answer so, without being started; an answer in words is an error of the script."""

    def run_script(script, nproc, folder, exercise, cases):
        if isinstance(answers, str):
            raise machinery.Wrong(answers)
        for rank, answer in enumerate(answers):
            Path(folder, f"{rank}.json").write_text(json.dumps(answer))

    monkeypatch.setattr(machinery, "run_script", run_script)


def test_hits_added_and_samples_not_is_asked_about(tmp_path, monkeypatch, capsys):
    answers_without_ranks(monkeypatch, [[47 / 50, 37 / 4], [47 / 10, 37 / 36]])
    assert checks.exercise_1_2c(exercise_file(tmp_path, "return 0.5")) is False
    assert "Did you add up the samples too" in capsys.readouterr().out


def test_all_reduce_taken_for_its_result_gets_help(tmp_path, monkeypatch, capsys):
    said = "the script failed: [rank0]: TypeError: 'NoneType' object is not subscriptable"
    answers_without_ranks(monkeypatch, said)
    assert checks.exercise_1_2c(exercise_file(tmp_path, "return 0.5")) is False
    assert "`all_reduce` returns nothing: it writes the sum over the tensor" in capsys.readouterr().out


def test_a_rank_that_does_not_call_is_asked_about(tmp_path, monkeypatch, capsys):
    """What two ranks say where one of them reaches no all_reduce."""
    said = "the script failed: [rank0]: RuntimeError: [gloo] Connection closed by peer"
    answers_without_ranks(monkeypatch, f"{said}. This is typically caused by a remote worker crashing. GLHF!")
    assert checks.exercise_1_2c(exercise_file(tmp_path, "return 0.5")) is False
    said = capsys.readouterr().out
    assert "Did every rank call every collective" in said
    assert "Connection closed by peer)" in said
