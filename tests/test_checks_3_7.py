"""The checks of lesson 3.7: the stub and plausible wrong answers are rejected with a message that helps."""

import zlib
from pathlib import Path

import pytest
from answers import assert_accepts, assert_rejects, launch_together, replay, stub
from safetensors.torch import load_file

from shared import checks
from shared.checks import chapter_3_finetuning

# --- 3.7a: the adapter out of the shards, on two ranks ----------------------------------------------------------------

HEAD = "import peft\nimport torch.distributed as dist\n\n\ndef adapter_weights(model):\n"
GATHER = """
    weights = {}
    for name, weight in peft.get_peft_model_state_dict(model, save_embedding_layers=False).items():
        whole = weight.full_tensor()
        if dist.get_rank() == 0:
            weights[name] = whole
    return weights
"""
OF_ALL = "peft.get_peft_model_state_dict(model, save_embedding_layers=False).items()"
WRONG_3_7A = {
    "own rows": (f"    return {{name: weight.to_local() for name, weight in {OF_ALL}}}\n",
                 "peft cannot load what rank 0 returns: .* Are these whole tensors, or a rank's rows"),
    "DTensors": (f"    return dict({OF_ALL}) if dist.get_rank() == 0 else {{}}\n", "rank 0 returns DTensors"),
    "kept everywhere": (f"    return {{name: weight.full_tensor() for name, weight in {OF_ALL}}}\n",
                        "rank 1 keeps 28 tensors as well: return an empty dict there"),
    "only rank 0 gathers": (
        f"    if dist.get_rank() > 0:\n        return {{}}\n"
        f"    return {{name: weight.full_tensor() for name, weight in {OF_ALL}}}\n",
        "one rank called a collective that another rank never reached. Which ranks call full_tensor",
    ),
    "gathers the base": (
        GATHER.replace("    weights = {}", "    whole = {n: p.full_tensor() for n, p in model.named_parameters()}\n"
                       "    weights = {}"),
        r"it works, but it gathers [\d,]+ bytes, and the adapter has [\d,]+. What else do you gather",
    ),
    "names of the model": (
        GATHER.replace(OF_ALL, "model.named_parameters()").replace("        whole", "        if 'lora_' not in name:\n"
                                                                   "            continue\n        whole", 1),
        r"the names are not those that peft stores: .*lora_A.default.weight is no tensor of the adapter",
    ),
    "only A": (GATHER.replace(OF_ALL, f"[(n, w) for n, w in {OF_ALL} if 'lora_A' in n]"),
               r"the names are not those that peft stores: .*lora_B.weight is missing"),
    "nothing": ("    return {}\n", "rank 0 returns nothing: return the whole adapter there"),
    "None on rank 1": (GATHER.replace("    return weights", "    return weights or None"),
                       "rank 1 returns an object of type NoneType: return a dict on every rank"),
}  # fmt: skip


def test_3_7a_is_a_stub(tmp_path):
    (tmp_path / "answer.py").write_text(HEAD + "    raise NotImplementedError\n")
    with pytest.raises(AssertionError, match="not done yet"):
        checks.exercise_3_7a(tmp_path / "answer.py", strict=True)


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> dict[str, Path]:
    scripts = {"right": HEAD + GATHER} | {name: HEAD + body for name, (body, _) in WRONG_3_7A.items()}
    folder = tmp_path_factory.mktemp("answers")
    modules = ["peft", "transformers.models.llama.modeling_llama"]
    return launch_together(folder, chapter_3_finetuning.TAKE_ADAPTER_OUT, scripts, 2, modules=modules)


def test_3_7a_accepts(launched, monkeypatch):
    replay(monkeypatch, chapter_3_finetuning.TAKE_ADAPTER_OUT, 2, launched["right"])
    assert checks.exercise_3_7a(launched["right"] / "answer.py", strict=True)


@pytest.mark.parametrize("name", WRONG_3_7A)
def test_3_7a_rejects(name, launched, monkeypatch):
    replay(monkeypatch, chapter_3_finetuning.TAKE_ADAPTER_OUT, 2, launched[name])
    with pytest.raises(AssertionError, match=WRONG_3_7A[name][1]):
        checks.exercise_3_7a(launched[name] / "answer.py", strict=True)


# --- 3.7b: why an adapter gives nothing -------------------------------------------------------------------------------


def is_other_base(folder: Path) -> bool:
    checksum = zlib.crc32((folder / "base/model.safetensors").read_bytes())
    return f"{checksum:08x}" not in (folder / "log.txt").read_text()


def adapter(folder: Path) -> dict:
    return load_file(folder / "adapter/adapter_model.safetensors")


def diagnose(folder: Path) -> str:
    if is_other_base(folder):
        return "base"
    if not all(name.startswith("base_model.model.") for name in adapter(folder)):
        return "names"
    return "fine" if any(each.any() for name, each in adapter(folder).items() if "lora_B" in name) else "zero"


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> dict[str, Path]:
    """A job with each cause, trained once for all answers."""
    causes = ("names", "fine", "base", "zero")
    jobs = chapter_3_finetuning.plant_adapters(tmp_path_factory.mktemp("jobs"), causes, seed=20)
    return dict(zip(causes, jobs, strict=True))


@pytest.fixture
def plant_once(planted, monkeypatch):
    def plant_adapters(folder, causes, seed):
        return [planted[cause] for cause in causes]

    monkeypatch.setattr(chapter_3_finetuning, "plant_adapters", plant_adapters)


def test_3_7b_accepts(plant_once, capsys):
    assert_accepts(checks.exercise_3_7b, diagnose, capsys)


def without(cause: str):
    """An answer that overlooks one cause."""
    return lambda folder: "fine" if diagnose(folder) == cause else diagnose(folder)


@pytest.mark.parametrize(("because", "answer"), [
    ("not done yet", stub),
    ("you return None, which is not one of 'base', 'zero', 'names', 'fine'", lambda folder: None),
    ("The log names other weights for the base than base/model.safetensors holds", without("base")),
    ("Every lora_B in the file is zero, so the adapter adds nothing", without("zero")),
    ("No tensor of the file has the name that peft looks for", without("names")),
    ("for one job you return 'zero', and that is not it. The base is the one in the log",
     lambda folder: "zero" if diagnose(folder) == "fine" else diagnose(folder)),
])  # fmt: skip
def test_3_7b_rejects(answer, because, plant_once, capsys):
    assert_rejects(checks.exercise_3_7b, answer, because, capsys)


def test_3_7b_each_job_learned_and_only_the_sound_one_shows_it(planted):
    """With what production loads, the sound job counts on; the other three do not."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    tokens = ((torch.arange(20)[:, None] + 3 * torch.arange(9)) % 62) + 2
    right = {}
    for cause, job in planted.items():
        lines = (job / "log.txt").read_text().split()
        assert float(lines[lines.index("40") + 2]) < 1
        base = AutoModelForCausalLM.from_pretrained(job / "base")
        model = peft.PeftModel.from_pretrained(base, job / "adapter").eval()
        with torch.no_grad():
            guesses = model(input_ids=tokens[:, :-1], use_cache=False).logits.argmax(dim=-1)
        right[cause] = (guesses[:, 1:] == tokens[:, 2:]).double().mean().item()
    assert right["fine"] > 0.9, right
    assert right["zero"] < 0.2 and right["names"] < 0.2, right
    assert right["base"] < right["fine"], right
