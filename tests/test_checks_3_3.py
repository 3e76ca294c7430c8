"""The checks of lesson 3.3: the stub and plausible wrong answers are rejected with a message that helps."""

import json
import math
import os
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from answers import assert_accepts, assert_rejects, stub
from runs import ROOT, TORCHRUN

from shared import checks
from shared.checks import chapter_3, machinery

# --- 3.3a: a slice, from other ranks' slices --------------------------------------------------------------------------


def chunked(num_rows, world_size, rank):
    most = math.ceil(num_rows / world_size)
    return min(num_rows, rank * most), min(num_rows, (rank + 1) * most)


def load_slice(pieces, read, total_rows, world_size, rank, cut=chunked, order=sorted):
    first, end = cut(total_rows, world_size, rank)
    found = [read(pieces[0]["file"], 0, 0)]
    for piece_first, file, piece_rows in order(
        (piece["first_row"], piece["file"], piece["num_rows"]) for piece in pieces
    ):
        start, stop = max(first, piece_first), min(end, piece_first + piece_rows)
        if start < stop:
            found.append(read(file, start - piece_first, stop - piece_first))
    return torch.cat(found)


def evened_out(num_rows, world_size, rank):
    few, more = divmod(num_rows, world_size)
    return rank * few + min(rank, more), (rank + 1) * few + min(rank + 1, more)


def everything_first(pieces, read, total_rows, world_size, rank):
    first, end = chunked(total_rows, world_size, rank)
    pieces = sorted(pieces, key=lambda piece: piece["first_row"])
    return torch.cat([read(piece["file"], 0, piece["num_rows"]) for piece in pieces])[first:end]


def global_rows(pieces, read, total_rows, world_size, rank):
    return torch.cat([read(piece["file"], *chunked(total_rows, world_size, rank)) for piece in pieces])


def no_rows_are(nothing):
    """An answer that returns `nothing()` where a rank has no rows."""

    def answer(*case):
        first, end = chunked(*case[2:])
        return load_slice(*case) if first < end else nothing()

    return answer


def test_3_3a_is_a_stub(capsys):
    assert_rejects(checks.exercise_3_3a, stub, "not done yet", capsys)


def test_3_3a_accepts(capsys):
    assert_accepts(checks.exercise_3_3a, load_slice, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (everything_first, "rank 0 of 3, 12 rows in 2 files: you read 12 rows for a slice of 4. A rank that reads whole"),
    (partial(load_slice, order=list), "They are the right rows in the wrong order: nobody promised that the pieces"),
    (global_rows, "the slice is (4, 2), yours is (8, 2). Some of these rows belong to other ranks"),
    (lambda pieces, read, *case: read(pieces[0]["file"], *chunked(*case)), "12 rows in 2 files: the values differ"),
    (lambda pieces, read, *case: read(pieces[1]["file"], *chunked(*case)),
        "rank 1 of 3, 12 rows in 2 files: read('0.slice', 4, 8), and this file holds 6 rows. Count from"),
    (partial(load_slice, cut=evened_out),
        "rank 2 of 4, 10 rows in 3 files: the slice is (3, 2), yours is (2, 2). fully_shard cuts as torch.chunk does"),
    (no_rows_are(lambda: torch.empty(0)),
        "rank 3 of 4, 5 rows in 2 files: the slice is (0, 2), yours is (0,). This rank has no rows"),
    (no_rows_are(lambda: torch.cat([])), "This rank has no rows, but its slice still has columns."),
    (lambda *case: None, "return a tensor, not None"),
])  # fmt: skip
def test_3_3a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_3_3a, answer, because, capsys)


# --- 3.3b: complete or not at all, on three ranks ---------------------------------------------------------------------

HEAD = "import torch\nimport torch.distributed as dist\n\n\ndef save(folder, rank, data, write):\n"
MARK = '    if rank == 0:\n        write("complete", b"")\n'
REMOVE = '    if rank == 0:\n        (folder / "complete").unlink(missing_ok=True)\n'
TRY = '    try:\n        write(f"{rank}.slice", data)\n    except OSError:\n'
AGREE = f"    written = torch.ones(1)\n{TRY}        written.zero_()\n    dist.all_reduce(written, dist.ReduceOp.MIN)\n"
MARK_IF = MARK.replace("rank == 0", "rank == 0 and written")
UNTOLD = f"{REMOVE}    dist.barrier()\n{AGREE}{MARK_IF}    dist.barrier()\n    return bool(written)\n"
TRY_MARK = '    try:\n        if rank == 0 and written:\n            write("complete", b"")\n    except OSError:\n'
TELL = f"{TRY_MARK}        written.zero_()\n    dist.all_reduce(written, dist.ReduceOp.MIN)\n"
RIGHT = UNTOLD.replace(f"{MARK_IF}    dist.barrier()\n", TELL)
WRONG = [
    (f'    write(f"{{rank}}.slice", data)\n{MARK}    return True\n', "wrote 'complete' when the slice of rank .*2 was"),
    (f'    write(f"{{rank}}.slice", data)\n    dist.barrier()\n{MARK}    return True\n',
        "rank 1's disk was full. save raised .*No space left on device' there and left the other ranks waiting"),
    (f"{TRY}        pass\n    dist.barrier()\n{MARK}    return True\n", "checkpoint is marked as complete: rank 0 did"),
    (f'{AGREE}    if written:\n        write("complete", b"")\n    return bool(written)\n',
        "rank 1 writes 'complete' as well"),
    (f"{AGREE}{MARK_IF}    return bool(written)\n", "the old mark calls the mixture complete"),
    (f"{REMOVE}{AGREE}{MARK_IF}    return bool(written)\n", "while the older checkpoint was still marked as complete"),
    (RIGHT.replace("bool(written)", "True"), r"returned \[True, True, True\], expected False three times"),
    (RIGHT.replace("rank == 0 and written", "False"), "'complete' was missing: expected True three times"),
    (UNTOLD, "rank 0 failed to write 'complete'. save raised .*No space left on device' there, and the other ranks"),
    (RIGHT.replace(TELL, f"{TRY_MARK}        written.zero_()\n    dist.barrier()\n"),
        r"rank 0 failed to write 'complete'; the ranks returned \[False, True, True\], expected False three times"),
]  # fmt: skip


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> dict[str, Path]:
    """By each answer the folder with what its three ranks have written: all of them in one launch, to save time."""
    folder, found = tmp_path_factory.mktemp("answers"), {}
    for number, (body, _) in enumerate(WRONG):
        found[body] = folder / str(number)
        found[body].mkdir()
        (found[body] / "exercise.py").write_text(HEAD + body)
        (found[body] / "call.py").write_text(chapter_3.SAVE_TOGETHER)
        command = [str(found[body] / "call.py"), str(found[body] / "exercise.py"), str(found[body])]
        (found[body] / "command.json").write_text(json.dumps(command))
    command = [*TORCHRUN, "--nproc-per-node", "3", ROOT / "tests/many_answers.py", folder]
    subprocess.run(command, check=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return found


def exercise_3_3b(body, tmp_path):
    path = tmp_path / "exercise.py"
    path.write_text(HEAD + body)
    return checks.exercise_3_3b(path, strict=True)


def test_3_3b_accepts(tmp_path):
    """As a learner runs it, three processes started."""
    assert exercise_3_3b(RIGHT, tmp_path)


def test_3_3b_is_a_stub(tmp_path):
    with pytest.raises(AssertionError, match="not done yet"):
        exercise_3_3b("    raise NotImplementedError  # delete this line\n" + RIGHT, tmp_path)


@pytest.mark.parametrize(("body", "because"), WRONG)
def test_3_3b_rejects(body, because, launched, tmp_path, monkeypatch):
    def run_script(path, nproc, script, folder):
        assert (Path(path).read_text(), nproc) == (chapter_3.SAVE_TOGETHER, 3)
        for rank in range(3):
            if (launched[body] / f"{rank}.json").exists():
                Path(folder, f"{rank}.json").write_text(read(f"{rank}.json"))
        codes = [int(read(f"{rank}.code")) for rank in range(3)]
        machinery.expect_success(int(codes != [0, 0, 0]), "".join(read(f"{rank}.err") for rank in range(3)))

    def read(name):
        return (launched[body] / name).read_text()

    monkeypatch.setattr(chapter_3, "run_script", run_script)
    with pytest.raises(AssertionError, match=because):
        exercise_3_3b(body, tmp_path)


@pytest.mark.parametrize(("last", "when"), [("full", "rank 1's disk was full"), ("mark", "rank 0 failed to write '")])
def test_3_3b_names_a_hang(last, when):
    """One rank returned at once when its write failed, and the others waited for it: without processes."""
    ended = {"marks": False, "mixed": False, "complete": False}
    cases = {"slow": {**ended, "returned": True, "complete": True}}
    if last == "mark":
        cases |= {case: {**ended, "returned": False} for case in ("full", "older")}
    reports = [{**cases, last: {}}, {**cases, last: {"returned": False}}, {**cases, last: {}}]
    failed = machinery.Wrong("the script failed: RuntimeError: Timed out waiting 30000ms for recv operation")
    with pytest.raises(machinery.Wrong, match=rf"Timed out .* when {when}.*\. Does each rank reach the same"):
        chapter_3._judge_saves(reports, failed)
