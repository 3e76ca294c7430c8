"""train_ray_finetune.py as a user starts it: held to a plain process, exported, reloaded, killed and refused."""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from runs import ROOT, TORCHRUN

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


# --- Exported, and loaded in another process ----------------------------------------------------------------------


def other_bases(folder: Path, tokenizer) -> dict[str, Path]:
    """Qwen2 in bfloat16 and several files, Gemma 3, and GPT-2 without a chat template."""
    from transformers import AutoTokenizer, Gemma3TextConfig, GPT2Config, Qwen2Config

    qwen = Qwen2Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    gemma = Gemma3TextConfig(**SMALL, **HEADS, max_position_embeddings=128, sliding_window=16)
    gpt2 = GPT2Config(vocab_size=1024, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    save_base(folder / "qwen2", qwen, tokenizer, torch.bfloat16, max_shard_size="40KB")
    plain = AutoTokenizer.from_pretrained(folder / "qwen2")
    plain.chat_template = None
    return {
        "qwen2": folder / "qwen2",
        "gemma3": save_base(folder / "gemma3", gemma, tokenizer),
        "gpt2": save_base(folder / "gpt2", gpt2, plain),
    }


@pytest.fixture(scope="module")
def exported(base, rows, tokenizer, tmp_path_factory) -> dict[str, tuple[Path, Path, dict]]:
    """Four architectures, fine-tuned on two ranks and exported: name -> (base, export, last metrics and what was said)."""
    folder, commands = tmp_path_factory.mktemp("exported"), {}
    others = other_bases(folder / "bases", tokenizer)
    bases = {"llama": base, "adapter": base, "merged": base, **others, "merged bf16": others["qwen2"]}
    adapters = {"adapter": [], "merged": ["--merge"], "merged bf16": ["--merge", "--precision", "bf16", "--lr", 1e-3]}
    for name, path in bases.items():
        options = ["--data-file", rows[0], "--val-file", rows[1], "--batch-size", 16, "--max-steps", 12, "--lr", 1e-2]
        more = ["--lora-rank", 4, *adapters[name]] if name in adapters else []
        files = ["--metrics-out", folder / f"{name}.jsonl", "--export", folder / name]
        commands[name] = [FINETUNE, "--base", path, *options, *more, *files, "--num-workers", 0]
    folders = launch(2, folder / "commands", commands)
    metrics = {name: json.loads((folder / f"{name}.jsonl").read_text().splitlines()[-1]) for name in bases}
    said = {name: (folders[name] / "0.err").read_text() for name in bases}
    return {name: (path, folder / name, {**metrics[name], "said": said[name]}) for name, path in bases.items()}


def load_exported(name: str, base: Path, export: Path) -> tuple[object, object]:
    """Model and tokenizer, in float32, as somebody loads them who has the folder alone."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = base if name == "adapter" else export
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if name == "adapter":
        model = peft.PeftModel.from_pretrained(model, export)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "adapter", "qwen2", "gemma3", "gpt2"])
def test_an_export_answers_as_the_run_has_measured(name, exported, rows):
    """Loss of the answers, and how many `generate` writes exactly, one row at a time."""
    base, export, metrics = exported[name]
    model, tokenizer = load_exported(name, base, export)
    loss, tokens, exact = 0.0, 0, 0
    lines = [json.loads(line) for line in rows[1].read_text().splitlines()]
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
    # A bfloat16 export rounds the float32 weights that the run has measured.
    assert loss / tokens == pytest.approx(metrics["val_loss"], rel=2e-2 if name == "qwen2" else 1e-5)
    assert exact / len(lines) == metrics["val_exact_match"]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt2"])
def test_an_export_is_as_its_base(name, exported):
    """Its dtype, its files but the weights, and tensors by the same names: it can be a base."""
    from safetensors import safe_open

    import pretrained

    base, export, _ = exported[name]
    for path in base.iterdir():
        if "model" not in path.name or path.name.startswith("tokenizer"):
            assert (export / path.name).read_bytes() == path.read_bytes()
    assert {path.name for path in export.iterdir()} == {path.name for path in base.iterdir()}
    assert pretrained.weight_files(export) == pretrained.weight_files(base)
    for path in export.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            kinds = {file.get_tensor(key).dtype for key in list(file.keys())}
        assert kinds == {torch.bfloat16 if name == "qwen2" else torch.float32}


@torch.no_grad()
def test_a_merged_export_is_base_and_adapter_in_one(exported):
    """The run is that of the adapter, and sums in float32 differ in rounding alone."""
    tokens = torch.randint(3, 1024, (2, 20), generator=torch.Generator().manual_seed(0))
    both, merged = (load_exported(name, *exported[name][:2])[0] for name in ("adapter", "merged"))
    assert exported["adapter"][2]["step_losses"] == exported["merged"][2]["step_losses"]
    assert torch.allclose(both(input_ids=tokens).logits, merged(input_ids=tokens).logits, rtol=0, atol=1e-5)


def test_merging_into_bfloat16_says_what_rounding_swallows(exported):
    """The share that the run has printed is that of the two folders' elements."""
    from safetensors import safe_open

    def tensors(folder: Path) -> dict[str, torch.Tensor]:
        found = {}
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                found |= {key: file.get_tensor(key) for key in list(file.keys())}
        return found

    base, export, metrics = exported["merged bf16"]
    before, after = tensors(base), tensors(export)
    adapted = [name for name in before if "proj" in name and name.endswith("weight")]
    unchanged = sum((before[name] == after[name]).sum().item() for name in adapted)
    share = unchanged / sum(before[name].numel() for name in adapted)
    assert 0.01 < share < 0.99
    assert f"rounding left {share:.1%} of the adapted weights as they were" in metrics["said"]
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - set(adapted))


# --- Killed -------------------------------------------------------------------------------------------------------


def test_a_killed_worker_leaves_no_trace(base, rows, on_cluster, tmp_path):
    """Two workers with dropout and accumulation: one is killed between two saves, and the metrics, all steps' losses
    and norms, are those of the undisturbed run, bit for bit. The checkpoint holds adapters and no base.
    """
    options = ["--base", base, "--data-file", rows[0], "--val-file", rows[1], "--batch-size", 8, "--accumulate", 2,
        "--lora-rank", 4, "--lora-dropout", 0.2, "--epochs", 40, "--save-every-steps", 5, "--warmup-steps", 10,
        "--max-grad-norm", 0.5]  # fmt: skip
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Fork(2, tmp_path / "undisturbed", *options, "--num-workers", 0, script=FINETUNE)
    run = Fork(0, tmp_path, *options, "--num-workers", 2, "--run-name", "run", script=FINETUNE)
    run.wait_for(tmp_path, "run/checkpoint-*")
    run.ray_processes("RayTrainWorker")[-1].kill()
    assert run.finish() == 0, run.text
    assert undisturbed.finish() == 0, undisturbed.text
    assert run.text.count("continuing after step") == 1, run.text
    assert_bit_for_bit(run.metrics(), undisturbed.metrics())
    newest = max((tmp_path / "run").glob("checkpoint-*"))
    size = sum(path.stat().st_size for path in newest.glob("*.distcp"))
    adapters = 12 * 4 * sum(before.numel() for before in []) or size
    assert size == adapters
