"""train_ray_finetune.py as a user starts it: held to a plain process, exported, reloaded, killed and refused."""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from runs import ROOT, TORCHRUN, Fork, assert_bit_for_bit, refused_here

from shared.rendezvous import free_port

CHAPTER = ROOT / "03-fsdp-deepspeed"
FINETUNE = CHAPTER / "train_ray_finetune.py"
RECORDED = ROOT / "tests/recorded_finetune.py"
LLAMA = "transformers.models.llama.modeling_llama"
SMALL = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}

pytestmark = pytest.mark.usefixtures("no_ray")


@pytest.fixture(scope="module")
def tokenizer():
    """The workshop's tokenizer, with its chat template."""
    import tiny_base

    return tiny_base.build_tokenizer("".join(file.read_text() for file in tiny_base.source_files(True)[:10]))


def save_base(folder: Path, config: object, tokenizer: object, dtype: torch.dtype = torch.float32, **more) -> Path:
    """A base with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    config.bos_token_id = None
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():  # larger than as initialized: what the layers do shows in the losses
        if parameter.dim() == 2:
            parameter.data *= 3
    model.save_pretrained(folder, **more)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory) -> Path:
    from transformers import LlamaConfig

    config = LlamaConfig(**SMALL, **HEADS, max_position_embeddings=128, tie_word_embeddings=True)
    return save_base(tmp_path_factory.mktemp("base") / "llama", config, tokenizer)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> tuple[Path, Path]:
    """A file of 50 pairs whose answers have one to nine words, and one of 10 for validation."""
    draw = random.Random(3)
    words = ["yield", "return", "import", "class", "def", "for", "while", "with", "raise", "pass"]

    def row() -> str:
        prompt = " ".join(draw.choices(words, k=draw.randint(1, 6)))
        return json.dumps({"prompt": prompt, "completion": " ".join(prompt.split()[:1] * draw.choice([1, 1, 2, 9]))})

    folder = tmp_path_factory.mktemp("rows")
    for name, count in (("train", 50), ("val", 10)):
        (folder / f"{name}.jsonl").write_text("\n".join(row() for _ in range(count)))
    return folder / "train.jsonl", folder / "val.jsonl"


def launch(nproc: int, folder: Path, commands: dict[str, list[object]]) -> dict[str, Path]:
    """Run scripts one after the other on `nproc` ranks that have imported transformers once: name -> its folder."""
    found = {}
    for number, (name, words) in enumerate(commands.items()):
        found[name] = folder / str(number)
        found[name].mkdir(parents=True)
        (found[name] / "command.json").write_text(json.dumps([str(word) for word in words]))
        (found[name] / "port").write_text(str(free_port()))
    modules = ["pairs", "pretrained", LLAMA, "torch._dynamo", "ray.train.torch", "torch.distributed.fsdp"]
    command = [*TORCHRUN, "--nproc-per-node", str(nproc), ROOT / "tests/many_answers.py", folder, *modules]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(
        [str(CHAPTER), *filter(None, [os.environ.get("PYTHONPATH")])])}  # fmt: skip
    subprocess.run(command, check=True, timeout=900, env=environment)
    for path in found.values():
        for rank in range(nproc):
            assert (path / f"{rank}.code").read_text() == "0", (path / f"{rank}.err").read_text()
    return found


LORA = ("--lora-rank", 3, "--lora-alpha", 6, "--lora-targets", "q_proj,v_proj,down_proj")
# 50 rows in batches of 16: the last one has two, in two passes; so two of four ranks get none.
STEPS = ("--precision", "fp64", "--batch-size", 16, "--accumulate", 2, "--epochs", 2, "--seed", 5, "--lr", 1e-2,
    "--num-workers", 0)  # fmt: skip


@pytest.fixture(scope="module", params=[1, 2, 4])
def recorded(request, base, rows, tmp_path_factory) -> dict[str, tuple[dict, list[dict], list[dict]]]:
    """What recorded_finetune.py says of a full and a LoRA run in float64: recorded, metrics, peaks; and the export."""
    folder, commands = tmp_path_factory.mktemp(f"ranks{request.param}"), {}
    data = ("--base", base, "--data-file", rows[0], "--val-file", rows[1])
    for name, more in (("full", ()), ("lora", (*LORA, "--merge"))):
        files = ("--metrics-out", folder / f"{name}.jsonl", "--export", folder / f"{name}-export")
        commands[name] = [RECORDED, folder / f"{name}.pt", *data, *STEPS, *more, *files]
    launch(request.param, folder / "commands", commands)
    return {
        name: (
            torch.load(folder / f"{name}.pt", weights_only=True),
            [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()],
            [json.loads((folder / f"{name}.pt.{rank}.json").read_text()) for rank in range(request.param)],
        )
        for name in commands
    }


def plain_gradients(base: Path, file: Path, tokenizer, lora: bool, before: list[torch.Tensor]) -> list:
    """Every trainable gradient of the same steps, as a user of transformers computes them: row by row, nothing of ours.

    before: with LoRA, the adapters' first values.
    """
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    if lora:
        config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"])
        model = peft.get_peft_model(model, config).double()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            if lora:
                parameter.copy_(value)
            else:
                assert torch.equal(parameter, value)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    optimizer, gradients = torch.optim.AdamW(parameters, lr=1e-2), []
    for epoch in range(2):
        order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(5 + epoch)).tolist()
        for start in range(0, len(lines), 16):
            optimizer.zero_grad()
            total, answer_tokens = 0.0, 0
            for index in order[start : start + 16]:
                user = {"role": "user", "content": lines[index]["prompt"]}
                turns = [user, {"role": "assistant", "content": lines[index]["completion"]}]
                prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=False)
                ids = torch.tensor(tokenizer.apply_chat_template(turns, return_dict=False))
                logits = model(input_ids=ids[None]).logits[0, :-1]
                total = total + F.cross_entropy(logits[len(prompt) - 1 :], ids[len(prompt) :], reduction="sum")
                answer_tokens += len(ids) - len(prompt)
            (total / answer_tokens).backward()
            gradients.append([parameter.grad.clone() for parameter in parameters])
            optimizer.step()
    return gradients


@pytest.mark.parametrize("name", ["full", "lora"])
def test_every_gradient_is_that_of_a_plain_process(name, recorded, base, rows, tokenizer):
    seen, metrics, _ = recorded[name]
    expected = plain_gradients(base, rows[0], tokenizer, name == "lora", seen["before"])
    assert len(seen["gradients"]) == len(expected) == 8
    for ours, plain in zip(seen["gradients"], expected, strict=True):
        for one, other in zip(ours, plain, strict=True):
            assert one.shape == other.shape
            assert torch.allclose(one, other, rtol=0, atol=1e-9)
    norms = [norm for line in metrics for norm in line["step_grad_norms"]]
    whole = [torch.cat([each.flatten() for each in step]).norm().item() for step in expected]
    assert norms == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("name", ["full", "lora"])
def test_bytes(name, recorded, base):
    """State: 16 bytes a weight in float32, here 32; with LoRA 8 a frozen weight. While the base is read and the model
    written: at most a shard, one tensor and a megabyte."""
    from transformers import AutoModelForCausalLM

    seen, metrics, peaks = recorded[name]
    weights = [parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(base).parameters()]
    trained = sum(value.numel() for value in seen["before"])
    world_size = metrics[0]["world_size"]
    predicted = (32 * trained + (8 * sum(weights) if name == "lora" else 0)) / world_size
    for line in metrics:
        assert line["state_bytes_per_rank"] == pytest.approx(predicted, rel=0.02)
    shard, largest = 8 * sum(weights) / world_size, 8 * max(weights)
    for peak in peaks:
        assert peak["fill"] <= largest + 2**20
        assert peak["export"] <= shard + largest + 2**20
