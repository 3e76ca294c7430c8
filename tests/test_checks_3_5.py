"""The checks of lesson 3.5: the stub and plausible wrong answers are rejected with a message that helps."""

import json
from pathlib import Path

import pytest
from answers import assert_accepts, assert_rejects, launch_together, replay, stub
from runs import ROOT

from shared import checks
from shared.checks import chapter_3

# --- 3.5a: which blocks keep their gathered weights, on two ranks -----------------------------------------------------

HEAD = "from torch.distributed.fsdp import fully_shard\n\n\ndef shard(model):\n"
BLOCKS = "    for number, block in enumerate(model.blocks):\n        fully_shard(block, reshard_after_forward={})\n"
WHOLE = "    fully_shard(model)\n"
LAST_FOUR_KEPT = BLOCKS.format("number < 4") + WHOLE
ENDS_KEPT = BLOCKS.format("1 < number < 6") + WHOLE  # the first two and the last two

WRONG_3_5A = {
    "all free": (
        BLOCKS.format("True") + WHOLE,
        r"has a peak of 11\.\d\d MB and sends 5.02 MB. It fits, but it sends more than the 4.30 MB allowed. Each block",
    ),
    "all kept": (
        BLOCKS.format("False") + WHOLE,
        r"has a peak of 13\.\d\d MB and sends 3.44 MB. The limit is 12.30 MB. Every block keeps its gathered weights",
    ),
    "the first four kept": (
        BLOCKS.format("number >= 4") + WHOLE,
        r"has a peak of 1[23]\.\d\d MB and sends 4.23 MB. The limit is 12.30 MB. Which blocks' gathered weights",
    ),
    "every second one kept": (
        BLOCKS.format("number % 2 == 0") + WHOLE,
        "The limit is 12.30 MB. Which blocks' gathered",
    ),
    "blocks 3 to 6 kept": (BLOCKS.format("not 3 <= number <= 6") + WHOLE, "The limit is 12.30 MB. Which blocks'"),
    "the last one kept": (
        BLOCKS.format("number < 7") + WHOLE,
        "sends 4.83 MB. It fits, but it sends more than the 4.30",
    ),
    "the last two kept": (
        BLOCKS.format("number < 6") + WHOLE,
        "sends 4.63 MB. It fits, but it sends more than the 4.30",
    ),
    "the last three kept": (BLOCKS.format("number < 5") + WHOLE, "sends 4.43 MB. It fits, but .* how many must keep"),
    "the last five kept": (BLOCKS.format("number < 3") + WHOLE, "The limit is 12.30 MB. It sends less than it may"),
    "root only": (WHOLE, "All weights are gathered at once: shard each block first, then the model"),
    "blocks only": (
        BLOCKS.format("number < 4"),
        "the gradients are off by .* Call fully_shard on the whole model last",
    ),
    "root first": (WHOLE + BLOCKS.format("number < 4"), "Did you shard the model before its blocks"),
    "DDP": (
        "    from torch.nn.parallel import DistributedDataParallel\n    return DistributedDataParallel(model)\n",
        "Nothing is sharded, so each rank keeps the whole state",
    ),
}


def write_answer(folder: Path, body: str) -> Path:
    path = folder / "shard.py"
    path.write_text(HEAD + body)
    return path


def test_3_5a_accepts(tmp_path):
    """As a learner runs it, two processes started."""
    assert checks.exercise_3_5a(write_answer(tmp_path, LAST_FOUR_KEPT), strict=True)


def test_3_5a_is_a_stub(tmp_path):
    with pytest.raises(AssertionError, match="not done yet"):
        checks.exercise_3_5a(write_answer(tmp_path, "    raise NotImplementedError\n"), strict=True)


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> dict[str, Path]:
    bodies = {name: body for name, (body, _) in WRONG_3_5A.items()}
    bodies |= {"the last four kept": LAST_FOUR_KEPT, "the first two and the last two kept": ENDS_KEPT}
    scripts = {name: HEAD + body for name, body in bodies.items()}
    return launch_together(tmp_path_factory.mktemp("answers"), chapter_3.MEASURE_SHARDED_GPT, scripts, 2)


@pytest.mark.parametrize("name", WRONG_3_5A)
def test_3_5a_rejects(name, launched, monkeypatch):
    replay(monkeypatch, chapter_3.MEASURE_SHARDED_GPT, 2, launched[name])
    with pytest.raises(AssertionError, match=WRONG_3_5A[name][1]):
        checks.exercise_3_5a(launched[name] / "answer.py", strict=True)


def reports(launched: dict[str, Path], name: str) -> list[dict]:
    return [json.loads((launched[name] / f"{rank}.json").read_text()) for rank in range(2)]


def test_3_5a_the_last_four_blocks_are_cheaper_than_the_first_four(launched):
    first_four, last_four = reports(launched, "the first four kept"), reports(launched, "the last four kept")
    for first, last in zip(first_four, last_four, strict=True):
        assert first["sent"] == last["sent"]
        assert last["peak"] < 0.97 * first["peak"]


def test_3_5a_keeping_the_last_two_blocks_costs_almost_nothing(launched):
    all_free = reports(launched, "all free")
    for name in ("the last one kept", "the last two kept"):
        for free, kept in zip(all_free, reports(launched, name), strict=True):
            assert kept["sent"] < free["sent"] and kept["peak"] == pytest.approx(free["peak"], rel=0.025)
    for name in ("the last four kept", "the first two and the last two kept"):
        chapter_3.judge_sharded_gpt(reports(launched, name))


# --- 3.5b: five jobs, and what to change first ------------------------------------------------------------------------

DECISION = {
    "A": "change the default", "B": "use DDP", "C": "nothing", "D": "reduce once", "E": "checkpoint activations"
}  # fmt: skip


def test_3_5b_accepts(capsys):
    assert_accepts(checks.exercise_3_5b, lambda: DECISION, capsys)


@pytest.mark.parametrize(("because", "answer"), [
    ("job A: 'nothing' is not what to change first. Divide what a rank sends by (N-1)/N", DECISION | {"A": "nothing"}),
    ("job A: 'use DDP' is not what to change first. DDP keeps 16 bytes", DECISION | {"A": "use DDP"}),
    ("job B: 'nothing' is not", DECISION | {"B": "nothing"}),
    ("job C: 'change the default' is not what to change first. With DeepSpeed", DECISION | {"C": "change the default"}),
    ("job D: 'checkpoint activations' is not what to change first. Is the peak", DECISION | {"D": DECISION["E"]}),
    ("job E: 'reduce once' is not what to change first. How many micro-batches", DECISION | {"E": "reduce once"}),
    ("for E you say 'ZeRO-3', which is not one of 'nothing', 'use DDP', 'change the", DECISION | {"E": "ZeRO-3"}),
    ("return a dict with the keys A, B, C, D and E; yours is None", None),
])  # fmt: skip
def test_3_5b_rejects(answer, because, capsys):
    assert_rejects(checks.exercise_3_5b, lambda: answer, because, capsys)


def test_3_5b_is_a_stub(capsys):
    assert_rejects(checks.exercise_3_5b, stub, "not done yet", capsys)


def test_3_5b_the_decision_follows_from_the_log():
    log = json.loads((ROOT / "03-fsdp-deepspeed/five_jobs.json").read_text())
    parameters, num_ranks = log["parameters"], log["ranks"]

    def decide(job: dict, rank: str) -> str:
        state, peak, sent = (job[rank][key] for key in ("state", "peak", "sent"))
        rounds = sum(sent.values()) / (4 * parameters * (num_ranks - 1) / num_ranks)
        with_ddp = peak - state + 16 * parameters
        if peak > job["gpu_bytes"]:
            assert state < 5 * parameters and peak > 4 * state  # sharded already, and the rest is not state
            return "checkpoint activations"
        if job["micro_batches"] > 1 and rounds > 1.9 * job["micro_batches"]:
            return "reduce once"
        if state < 15 * parameters and with_ddp < 0.9 * job["gpu_bytes"]:
            return "use DDP"
        assert with_ddp > 1.1 * job["gpu_bytes"]
        if sent.get("allreduce", 0) > 0.9 * 2 * parameters * 4 * (num_ranks - 1) / num_ranks:
            assert rounds == pytest.approx(3, rel=0.05)
            return "change the default"
        assert rounds == pytest.approx(2, rel=0.05)
        return "nothing"

    for rank in range(num_ranks):
        assert {name: decide(job, f"rank {rank}") for name, job in log["jobs"].items()} == DECISION
