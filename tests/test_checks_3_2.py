"""The checks of lesson 3.2: the stub and plausible wrong answers are rejected with a message that helps."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from answers import assert_accepts, assert_rejects, launch_together, replay, stub
from runs import ROOT as ROOT_FOLDER

from shared import checks
from shared.checks import chapter_3, machinery


@pytest.mark.parametrize("check", [checks.exercise_3_2a, checks.exercise_3_2c])
def test_a_stub_is_not_done_yet(check, capsys):
    assert_rejects(check, stub, "not done yet", capsys)


# --- 3.2a: five runs to diagnose --------------------------------------------------------------------------------------

LESSON = ROOT_FOLDER / "03-fsdp-deepspeed" / "02_fsdp2.ipynb"
RIGHT_DIAGNOSIS = {"A": "blocks only", "B": "own norm", "C": "none", "D": "root only", "E": "optimizer first"}


def diagnosis(**changed):
    return lambda: RIGHT_DIAGNOSIS | changed


def test_3_2a_accepts(capsys):
    assert_accepts(checks.exercise_3_2a, diagnosis(), capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (lambda: None, "return a dict with the keys A, B, C, D and E; yours is None"),
    (diagnosis(A="none"), "for run A you say 'none'. Then the loss would fall, and each rank would keep 16 / 2 bytes"),
    (diagnosis(B="same batch"), "for run B you say 'same batch'. Then the two ranks would have the same losses"),
    (diagnosis(C="own norm"), "for run C you say 'own norm'. Then the two ranks would scale their gradients"),
    (diagnosis(D="blocks only"), "for run D you say 'blocks only'. Then some parameters would be whole on every rank"),
    (diagnosis(E="root only"), "for run E you say 'root only'. Then a step would gather a single group"),
    (diagnosis(E="frozen"), "for E you say 'frozen', which is not one of 'none', 'blocks only', 'root only'"),
])  # fmt: skip
def test_3_2a_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_3_2a, answer, because, capsys)


def test_the_five_runs_show_what_3_2a_says(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (printed, _) = machinery.run_script(LESSON.with_name("five_shardings.py"), 2)
    assert re.findall("run (.)", printed) == list(RIGHT_DIAGNOSIS)
    for run, lines in zip(RIGHT_DIAGNOSIS.values(), printed.split("run ")[1:], strict=True):
        pattern = r"losses ([\d. ]+)  gradients x (\S+)  state (\S+) B/parameter  all-gathers +(\d+)  embedding (\S+)"
        losses, factors, states, gathers, embeddings = zip(*re.findall(pattern, lines), strict=True)
        assert (embeddings[0] != embeddings[1]) == (run == "blocks only")
        assert (factors[0] != factors[1]) == (run == "own norm")
        assert (len(set(losses[0].split())) == 1) == (run == "optimizer first")
        assert set(states) == {{"blocks only": "8.6", "optimizer first": "4.0"}.get(run, "8.0")}
        assert set(gathers) == {{"blocks only": "5", "root only": "1"}.get(run, "11")}
        assert losses[0] != losses[1]  # no run answers "same batch"


# --- 3.2b: a vision model, on two ranks -------------------------------------------------------------------------------

IMPORT = "from torch.distributed.fsdp import fully_shard\n\n\ndef shard(model):\n"
STAGES = "    for layer in (model.layer1, model.layer2, model.layer3, model.layer4):\n        "
BY_BLOCK = f"{STAGES}for block in layer:\n            fully_shard(block)\n"
LARGE = "    for block in model.layer4:\n        fully_shard(block)\n"
GROUPS = f"    fully_shard([model.layer1, model.layer2, model.layer3])\n{LARGE}"
ROOT = "    fully_shard(model)\n"


WRONG_3_2b = [
    (GROUPS, r"parameters are not sharded \(conv1.weight, .*Which call takes what belongs to no group"),
    (ROOT + GROUPS, "Did you shard the model before its blocks"),
    (ROOT, "the root holds 100% of the weights, and it stays gathered"),
    (LARGE + ROOT, "the root holds 25% of the weights, and it stays gathered"),
    (f"{STAGES}fully_shard(layer)\n{ROOT}", "one group holds 75% of the weights, and the largest block only 42%"),
    (f"    fully_shard([*model.layer1, *model.layer2, *model.layer3, *model.layer4])\n{ROOT}", "group holds 100% of"),
    (BY_BLOCK + ROOT, "17 all-gathers in a step, and seven are enough.* so small that they could be one"),
    (
        GROUPS.replace(")\n", ", reshard_after_forward=False)\n") + ROOT,
        "4 all-gathers in a step, for 3 groups.* not freed",
    ),
]


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> dict[str, Path]:
    scripts = {body: IMPORT + body for body, _ in WRONG_3_2b}
    return launch_together(tmp_path_factory.mktemp("answers"), chapter_3.SHARD_RESNET, scripts, 2)


def exercise_3_2b(body, tmp_path):
    path = tmp_path / "exercise.py"
    path.write_text(IMPORT + body)
    return checks.exercise_3_2b(path, strict=True)


def test_3_2b_accepts(tmp_path):
    """As a learner runs it, two processes started."""
    assert exercise_3_2b(GROUPS + ROOT, tmp_path)


def test_3_2b_is_a_stub(tmp_path):
    with pytest.raises(AssertionError, match="not done yet"):
        exercise_3_2b("    raise NotImplementedError\n", tmp_path)


@pytest.mark.parametrize(("body", "because"), WRONG_3_2b)
def test_3_2b_rejects(body, because, launched, monkeypatch):
    replay(monkeypatch, chapter_3.SHARD_RESNET, 2, launched[body])
    with pytest.raises(AssertionError, match=because):
        checks.exercise_3_2b(launched[body] / "answer.py", strict=True)


# --- 3.2c: collectives of a step --------------------------------------------------------------------------------------


def collectives(num_blocks, micro_batches, reshard_blocks, reshard_root):
    return micro_batches * (num_blocks + 1 + num_blocks * reshard_blocks + reshard_root), num_blocks + 1


def reduced_each_time(*case):
    return collectives(*case)[0], case[1] * collectives(*case)[1]


def gathered_once(num_blocks, micro_batches, *flags):
    return collectives(num_blocks, 1, *flags)


def root_forgotten(num_blocks, micro_batches, reshard_blocks, reshard_root):
    return collectives(num_blocks, micro_batches, reshard_blocks, False)


def test_3_2c_accepts(capsys):
    assert_accepts(checks.exercise_3_2c, collectives, capsys)


@pytest.mark.parametrize(("answer", "because"), [
    (reduced_each_time, "is (260, 33), you say (260, 132). Each group's gradients are reduced once per step"),
    (gathered_once, "you say (65, 33). After a backward pass everything is freed"),
    (root_forgotten, "reshard_root=True) is (12, 6), you say (11, 6). Forward gathers every group"),
    (lambda *case: collectives(*case)[0], "should return two numbers, (all_gathers, reduce_scatters); yours is 11"),
])  # fmt: skip
def test_3_2c_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_3_2c, answer, because, capsys)


COUNT = """
import json
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from shared import models

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
seen = []
cases = ((1, True, False), (3, True, False), (2, False, True), (2, True, True))
for micro_batches, reshard_blocks, reshard_root in cases:
    model = models.GPT(models.GPT_PRESETS["nano"])
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_blocks)
    fully_shard(model, reshard_after_forward=reshard_root)
    with CommDebugMode() as comm:
        for number in range(micro_batches):
            model.set_requires_gradient_sync(number == micro_batches - 1)
            model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    counts = {str(operation): number for operation, number in comm.get_comm_counts().items()}
    gathers = sum(number for name, number in counts.items() if "gather" in name)
    reduces = sum(number for name, number in counts.items() if "reduce_scatter" in name)
    seen.append([(5, micro_batches, reshard_blocks, reshard_root), (gathers, reduces)])
print(json.dumps(seen))
"""


def test_3_2c_is_what_fsdp2_does():
    """By a fake process group: nothing is sent, everything is counted."""
    done = subprocess.run([sys.executable, "-c", COUNT], check=True, capture_output=True, text=True, timeout=600)
    for case, seen in json.loads(done.stdout):
        assert tuple(seen) == collectives(*case)
