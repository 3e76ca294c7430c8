"""What tests of train_ray_finetune.py start from: bases with random weights, rows, and how an export is judged."""

import json
import os
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from runs import ROOT

from checks import machinery

CHAPTER = ROOT / "03-fsdp-deepspeed"
FINETUNE = CHAPTER / "train_ray_finetune.py"
LLAMA = "transformers.models.llama.modeling_llama"
SMALL = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def make_tokenizer() -> object:
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


def save_llama(folder: Path, tokenizer: object) -> Path:
    """A small Llama."""
    from transformers import LlamaConfig

    config = LlamaConfig(**SMALL, **HEADS, max_position_embeddings=128, tie_word_embeddings=True)
    return save_base(folder / "llama", config, tokenizer)


def as_on_the_hub(folder: Path) -> Path:
    """Give a GPT-2 the names that it has on the Hub: without a prefix, and with the masks of an early version."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("transformer."): value for name, value in weights.items()}
    for block in {name.split(".")[1] for name in weights if name.startswith("h.")}:
        weights[f"h.{block}.attn.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.bool).tril()
        weights[f"h.{block}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_rows(folder: Path) -> tuple[Path, Path]:
    """A file of 50 pairs whose answers have one to nine words, and one of 10 for validation."""
    draw = random.Random(3)
    words = ["yield", "return", "import", "class", "def", "for", "while", "with", "raise", "pass"]

    def row() -> str:
        prompt = " ".join(draw.choices(words, k=draw.randint(1, 6)))
        return json.dumps({"prompt": prompt, "completion": " ".join(prompt.split()[:1] * draw.choice([1, 1, 2, 9]))})

    for name, count in (("train", 50), ("val", 10)):
        (folder / f"{name}.jsonl").write_text("\n".join(row() for _ in range(count)))
    return folder / "train.jsonl", folder / "val.jsonl"


def launch(nproc: int, commands: dict[str, list[object]]) -> dict[str, str]:
    """Run scripts on `nproc` ranks that have imported transformers once; what rank 0 has printed, by name."""
    modules = ["pairs", "pretrained", LLAMA, "torch._dynamo", "ray.train.torch", "torch.distributed.fsdp"]
    path = os.pathsep.join([str(CHAPTER), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = machinery.run_scripts(list(commands.values()), nproc, modules, own_stores=True, PYTHONPATH=path)
    for each in ended:
        assert each.exit_code == 0, each.errors
    return {name: each.printed[0] for name, each in zip(commands, ended, strict=True)}


def tune(base: Path, rows: tuple[Path, Path], out: Path, *more: object) -> list[object]:
    """The command of a short run that is exported: into `out`, with its metrics beside it."""
    options = ["--data-file", rows[0], "--val-file", rows[1], "--batch-size", 16, "--max-steps", 12, "--lr", 1e-2]
    files = ["--metrics-out", out.with_suffix(".jsonl"), "--export", out]
    return [FINETUNE, "--base", base, *options, *more, *files, "--num-workers", 0]


def last_metrics(out: Path) -> dict:
    """The metrics of the last epoch of a run that was exported into `out`."""
    return json.loads(out.with_suffix(".jsonl").read_text().splitlines()[-1])


def load_exported(export: Path, adapter: bool = False) -> tuple[object, object]:
    """Model and tokenizer, in float32, as somebody loads them who has the folder alone."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load = peft.AutoPeftModelForCausalLM if adapter else AutoModelForCausalLM
    model = load.from_pretrained(export, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(export)


@torch.no_grad()
def assert_answers_as_measured(export: Path, file: Path, tolerance: float = 1e-5, adapter: bool = False) -> None:
    """Loss of the answers in `file`, and how many `generate` writes exactly, one row at a time."""
    metrics = last_metrics(export)
    model, tokenizer = load_exported(export, adapter)
    loss, tokens, exact = 0.0, 0, 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if tokenizer.chat_template:
            user = {"role": "user", "content": line["prompt"]}
            turns = [user, {"role": "assistant", "content": line["completion"]}]
            prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=False)
            ids = tokenizer.apply_chat_template(turns, return_dict=False)
        else:
            prompt = tokenizer(line["prompt"])["input_ids"]
            ids = [*prompt, *tokenizer(line["completion"])["input_ids"], tokenizer.eos_token_id]
        answer = torch.tensor(ids[len(prompt) :])
        logits = model(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        loss += F.cross_entropy(logits.float(), answer, reduction="sum").item()
        tokens += len(answer)
        written = model.generate(input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(),
            do_sample=False, max_new_tokens=len(answer), eos_token_id=tokenizer.eos_token_id)  # fmt: skip
        exact += written[0, len(prompt) :].tolist() == answer.tolist()
    assert loss / tokens == pytest.approx(metrics["val_loss"], rel=tolerance)
    assert exact / len(lines) == metrics["val_exact_match"]


def assert_is_as_its_base(export: Path, base: Path, dtype: torch.dtype = torch.float32) -> None:
    """Its dtype, its files but the weights, and tensors by the same names: it can be a base."""
    from safetensors import safe_open

    import pretrained

    for path in base.iterdir():
        if "model" not in path.name or path.name.startswith("tokenizer"):
            assert (export / path.name).read_bytes() == path.read_bytes()
    assert {path.name for path in export.iterdir()} == {path.name for path in base.iterdir()}
    assert pretrained.weight_files(export) == pretrained.weight_files(base)
    for path in export.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            kinds = {file.get_tensor(key).dtype for key in list(file.keys())}
        assert kinds == {dtype}
