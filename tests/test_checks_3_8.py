"""The check of lesson 3.8: the stub and plausible wrong answers are rejected with a message that helps."""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from answers import launch_together, replay
from runs import ROOT

from shared import checks
from shared.checks import chapter_3_finetuning

SOLUTION = ROOT / "03-fsdp-deepspeed/solutions/08_another_architecture.ipynb"


def cell(start: str) -> str:
    """Return the source of the solution's cell whose id is `start`."""
    cells = json.loads(SOLUTION.read_text())["cells"]
    (source,) = ("".join(each["source"]) for each in cells if each["id"] == start)
    return source


def written(start: str) -> str:
    """Return what a %%writefile cell writes."""
    return cell(start).partition("\n")[2] + "\n"


PARTS = ("imports", "shard", "fill", "batches", "train", "export", "rest")
RIGHT = "".join(written(f"write-{part}") for part in PARTS)
GATHERED = "AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)"
ON_META = """with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
"""
FROM_FILE = "dcp.load(dict(model.named_parameters()), storage_reader=HuggingFaceStorageReader(BASE))\n"
SHARDED = "for part in (*model.model.layers, model):\n    fully_shard(part)\n"
CHANGES = {  # by name: what to replace, by what, and what the check says
    "from_pretrained": (ON_META, f"model = {GATHERED}\n", "rank 0 calls from_pretrained, which loads the whole model"),
    "not sharded": (SHARDED, "", "rank 0's optimizer holds 100% of the weights. On two ranks, half is enough"),
    "no scale": ("model.model.embed_tokens.embed_scale.fill_(config.hidden_size**0.5)",
                 "model.model.embed_tokens.embed_scale.zero_()",
                 "the loss of step 1 is .* Which buffers are empty"),
    "no frequencies": ("model.model.rotary_emb = type(model.model.rotary_emb)(config)",
                       "[each.zero_() for each in model.model.rotary_emb.buffers()]",
                       "the loss of step 1 is .* Which buffers are empty"),
    "own mean": ("answer_tokens = distributed.global_sum((targets != -100).sum())",
                 "answer_tokens = (targets != -100).sum() * 2",
                 "the loss of step 1 is .* over which answer tokens is the loss the mean"),
    "not multiplied": ("(loss * worker.world_size).backward()", "loss.backward()",
                       "the loss of step 2 is .* so it is the gradient that is wrong. .* what does FSDP divide by"),
    "the wrong 8": ("config.hidden_size**0.5", "config.sliding_window", "the loss of step 1 is .* Which buffers are"),
    "sum of means": ("losses.append(distributed.global_sum(loss.detach()).item())",
                     "losses.append(2 * distributed.global_sum(loss.detach()).item())",
                     "That is about half of it, or twice as much. Over which answer tokens is it the mean"),
    "float64": (".detach().float()", ".detach()", "the exported weights are float64, expected float32"),
    "no config": ('    shutil.copy(f"{BASE}/config.json", FOLDER)\n', "", "the folder .* holds no config.json"),
    "a tensor less": ("for name, weight in model.named_parameters()}",
                      'for name, weight in model.named_parameters() if "layers.1.mlp.up" not in name}',
                      "the exported model lacks model.layers.1.mlp.up_proj.weight"),
}  # fmt: skip


@pytest.fixture(scope="module")
def lesson(tmp_path_factory) -> Path:
    """A folder in which the lesson's cells have made the base and plain.py."""
    folder = tmp_path_factory.mktemp("lesson")
    (folder / "runs/lesson-3-8/base").mkdir(parents=True)
    (folder / "runs/lesson-3-8/plain.py").write_text(written("write-plain"))
    before = os.getcwd()
    os.chdir(folder)
    try:
        exec(cell("imports") + "\nFOLDER = Path('runs/lesson-3-8')\n" + cell("make-base"), {})
    finally:
        os.chdir(before)
    return folder


@pytest.fixture(scope="module")
def launched(lesson) -> dict[str, Path]:
    """By the name of each answer, the folder with what its two ranks wrote: one launch for all, to save time."""
    answers = {"right": RIGHT}
    for name, (old, new, _) in CHANGES.items():
        assert RIGHT.count(old) == 1, name
        answers[name] = RIGHT.replace(old, new)
    modules = ["transformers.models.gemma3.modeling_gemma3"]
    folder = lesson / "answers"
    return launch_together(folder, chapter_3_finetuning.WATCH_SCRIPT, answers, 2, "export", modules=modules, cwd=lesson)


@pytest.fixture
def check_launched(lesson, launched, monkeypatch):
    """Return a function that runs the check on an answer that was launched already, in this process."""
    monkeypatch.chdir(lesson)

    def check(name: str) -> bool:
        replay(monkeypatch, chapter_3_finetuning.WATCH_SCRIPT, 2, launched[name])

        def run_command(words):  # plain.py and the comparison, without the imports of a new process
            monkeypatch.setattr(sys, "argv", words)
            runpy.run_path(words[0], run_name="__main__")
            return 0, ""

        monkeypatch.setattr(chapter_3_finetuning, "run_command", run_command)
        shutil.copy("runs/lesson-3-8/plain.py", launched[name])
        return checks.exercise_3_8a(launched[name] / "answer.py", strict=True)

    return check


def test_3_8a_accepts(check_launched):
    assert check_launched("right")


@pytest.mark.parametrize("name", CHANGES)
def test_3_8a_rejects(name, check_launched):
    with pytest.raises(AssertionError, match=CHANGES[name][2]):
        check_launched(name)


def test_3_8a_is_a_stub(tmp_path):
    (tmp_path / "sharded.py").write_text("raise NotImplementedError  # put your script here instead\n")
    with pytest.raises(AssertionError, match="not done yet"):
        checks.exercise_3_8a(tmp_path / "sharded.py", strict=True)
