"""explain_hang.py on ranks that really hang: the hangs of lesson 4.6, of lessons 1.4 and 4.1, and of the gallery.

A rank has TIMEOUT_S for each collective, and its dump and stack are taken before. The time only bounds the hangs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from notebook_rules import ROOT
from runs import LIMIT

CHAPTER = ROOT / "04-ray-in-production"
TIMEOUT_S = "30"  # on a busy machine it takes this long to look at 72 ranks
sys.path.insert(0, str(CHAPTER))

import explain_hang  # noqa: E402
import hanging_ranks  # noqa: E402

sys.path.remove(str(CHAPTER))
HANGS = hanging_ranks.GUILTY
NOBODY = {"two_against_two", "receive_cycle"}
# What the stacks of all ranks do not say. In the third, rank 3 stands outside, and looks as idle as the guilty rank.
STACKS_DO_NOT_TELL = {*NOBODY, "opposite_groups", "outside_the_group"}
ORDER_MATTERS_TO_TORCHFRTRACE = {"only_on_rank_0", "fewer_batches", "resumes_alone", "two_against_two", "other_shape"}


def collect(script: Path, *arguments: object, **environment: str) -> None:
    variables = {
        **os.environ,
        "TIMEOUT_S": TIMEOUT_S,
        "QUIET_S": "5",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    variables["PYTHONPATH"] = os.pathsep.join([str(CHAPTER), str(ROOT / "05-bug-gallery"), str(ROOT)])
    command = [sys.executable, script, *map(str, arguments)]
    subprocess.run(command, env={**variables, **environment}, check=True, timeout=LIMIT)


@pytest.fixture(scope="module")
def left(tmp_path_factory) -> Path:
    """A folder per hang, with what it has left behind."""
    folder = tmp_path_factory.mktemp("hangs")
    collect(CHAPTER / "hanging_ranks.py", folder, *HANGS)
    return folder


@pytest.mark.parametrize("name", HANGS)
def test_dumps_of_all_ranks_name_the_guilty_one(name, left):
    answer = explain_hang.explain([left / name / "dumps"])
    assert answer["ranks"] == HANGS[name], answer
    assert answer["certainty"] == ("likely" if HANGS[name] else answer["certainty"])
    assert (answer["operation"] is None) == (name == "receive_cycle")  # gloo does not record it
    missing = set(range(4)) - set(answer["read"]["dumps"])
    assert missing == (set(HANGS[name]) if name in ("stopped", "holds_the_gil") else set())
    assert (answer["rule"] == "missing_dump") == bool(missing)
    files = sorted((left / name / "dumps").iterdir())
    assert explain_hang.explain(files) == explain_hang.explain(files[::-1]) == answer


@pytest.mark.parametrize("name", HANGS)
def test_stacks_of_all_ranks_name_most(name, left):
    answer = explain_hang.explain([left / name / "stacks"])
    assert answer["ranks"] == ([] if name in STACKS_DO_NOT_TELL else HANGS[name]), answer
    assert answer["certainty"] in ("possible", "cannot tell which rank", "cannot tell")
    assert (answer["operation"] is None) == (name in ("opposite_groups", "receive_cycle"))  # all in one line


@pytest.mark.parametrize("name", HANGS)
def test_plain_logs_of_gloo_name_nobody(name, left):
    answer = explain_hang.explain([left / name / "logs"])
    assert (answer["ranks"], answer["operation"], answer["certainty"]) == ([], None, "cannot tell"), answer
    if name == "only_on_rank_0":  # in a ring, the rank that waits to send may be the guilty one's neighbor: not here
        logs = {rank: (left / name / f"logs/rank_{rank}.log").read_text() for rank in range(4)}
        assert not any("send operation" in log and (rank - 1) % 4 in HANGS[name] for rank, log in logs.items()), logs


@pytest.mark.parametrize("name", HANGS)
def test_all_evidence_together_is_as_good_as_the_best(name, left):
    answer = explain_hang.explain([left / name / kind for kind in ("logs", "stacks", "dumps")])
    assert answer["ranks"] == HANGS[name], answer


@pytest.mark.parametrize("name", HANGS)
def test_whom_torchfrtrace_blames_depends_on_the_order_of_the_files(name, left):
    """It needs the names of the groups, which write_dump has put in."""
    blamed = [hanging_ranks.torchfrtrace(left / name / "dumps", reverse) for reverse in (False, True)]
    assert (blamed[0] != blamed[1]) == (name in ORDER_MATTERS_TO_TORCHFRTRACE), blamed
    if name not in ORDER_MATTERS_TO_TORCHFRTRACE and name not in ("opposite_groups", "receive_cycle"):
        assert blamed[0] == str(HANGS[name][0])


def test_reports_of_detail_name_the_guilty_one(tmp_path):
    collect(CHAPTER / "hanging_ranks.py", tmp_path, *HANGS, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    for name in HANGS:
        answer = explain_hang.explain([tmp_path / name / "logs"])
        assert answer["ranks"] == HANGS[name], (name, answer)
        assert answer["rule"] == "explicit_reports" or name in NOBODY, (name, answer)


OTHER_LESSONS = """
import sys
import time
from pathlib import Path

import gallery
import hanging_ranks
import torch
import torch.distributed as dist
import torch.distributed.tensor  # which DDP imports: before the ranks are forked, or each would do it
from torch.nn.parallel import DistributedDataParallel

from shared.distributed import Worker


def lesson_1_4(rank):
    impatient = hanging_ranks.new_group("impatient")
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=impatient)
    time.sleep(3600)


def lesson_4_1(rank):
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    for step in range(5):
        while (rank, step) == (1, 3):
            time.sleep(1)  # its disk is away
        model(torch.ones(1, 2)).sum().backward()


def exhibit(name):
    def run(rank):
        getattr(gallery, name)(Worker(rank, rank, hanging_ranks.RANKS), Path(sys.argv[1]))

    return run


folder, hanging_ranks.RANKS, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
exhibits = {name: exhibit(name) for name in names if name.startswith("exhibit")}
vars(hanging_ranks).update(exhibits, lesson_1_4=lesson_1_4, lesson_4_1=lesson_4_1)
hanging_ranks.collect({folder / name: name for name in names})
"""
ON_TWO_RANKS = ("exhibit_09_before", "exhibit_09_variant", "exhibit_10_before", "lesson_1_4", "lesson_4_1")


@pytest.fixture
def other_lessons(tmp_path):
    """A function that runs hangs of other lessons on a number of ranks, and returns the folder of what they left."""
    script = tmp_path / "other_lessons.py"
    script.write_text(OTHER_LESSONS)

    def run(ranks: int, *names: str, **environment: str) -> Path:
        # On a busy machine, building DDP may take as long as QUIET_S of the other hangs.
        collect(script, tmp_path / "left", ranks, *names, **{"QUIET_S": "10", **environment})
        return tmp_path / "left"

    return run


def test_the_hangs_of_the_other_lessons_on_two_ranks(other_lessons):
    left = other_lessons(2, *ON_TWO_RANKS)
    verdicts = {name: explain_hang.explain([left / name / "dumps"]) for name in ON_TWO_RANKS}
    for name, answer in verdicts.items():  # it is one rank against one
        if name.startswith("lesson"):
            assert (answer["ranks"], answer["certainty"], answer["rule"]) == ([1], "possible", "ranks_behind")
        assert "all_reduce" in answer["operation"] and answer["certainty"] != "likely", (name, answer)
        assert "left a call out" in answer["readings"] and "one too many" in answer["readings"]
        assert explain_hang.explain([left / name])["certainty"] != "likely"


def test_the_gallerys_sums_of_tensors_with_different_sizes(other_lessons):
    left = other_lessons(3, "exhibit_11_before") / "exhibit_11_before"
    answer = explain_hang.explain([left / "dumps"])
    assert (answer["ranks"], answer["certainty"], answer["rule"]) == ([1], "likely", "first_difference")
    assert answer["because"].endswith("ranks 0, 2: all_reduce [[4]] Long; rank 1: all_reduce [[5]] Long")
    assert explain_hang.explain([left / "logs"])["ranks"] == []  # ranks 0 and 2 got a sum, and print no error


@pytest.mark.parametrize(
    ("version", "kind"), [("before", "TensorShape=[5], TensorDtypes=Long"), ("variant", "TensorDtypes=Double")]
)
def test_detail_ends_the_gallerys_sums_with_an_error_that_names_sizes_and_types(version, kind, other_lessons):
    name = f"exhibit_11_{version}"
    left = other_lessons(3, name, TORCH_DISTRIBUTED_DEBUG="DETAIL", TIMEOUT_S="8", QUIET_S="2") / name / "logs"
    for rank in range(3):
        log = (left / f"rank_{rank}.log").read_text()
        assert f"Rank {rank} is running collective: CollectiveFingerPrint(" in log and kind in log, log
    assert explain_hang.explain([left])["ranks"] == [1]
