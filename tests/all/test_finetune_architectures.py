"""train_ray_finetune.py on bases of other architectures, in bfloat16, and next to a model under DeepSpeed ZeRO-3."""

import json
from pathlib import Path

import pytest
import torch
from finetune import (
    HEADS,
    SMALL,
    as_on_the_hub,
    assert_answers_as_measured,
    assert_is_as_its_base,
    last_metrics,
    launch,
    make_tokenizer,
    save_base,
    save_llama,
    tune,
    write_rows,
)

ZERO_3 = Path(__file__).with_name("zero3_from_readme.py")

pytestmark = pytest.mark.usefixtures("no_ray")


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """A Llama, Qwen2 in bfloat16 and several files, Gemma 3, GPT-2 without a chat template, and others.

    Apertus has tensors without dimensions. transformers renames tensors of GPT-NeoX and of the Hub's own GPT-2. Mamba
    has blocks inside blocks.
    """
    from transformers import (
        ApertusConfig,
        AutoTokenizer,
        Gemma3TextConfig,
        GPT2Config,
        GPTNeoXConfig,
        MambaConfig,
        Qwen2Config,
    )

    folder, tokenizer = tmp_path_factory.mktemp("bases"), make_tokenizer()
    qwen = Qwen2Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    gemma = Gemma3TextConfig(**SMALL, **HEADS, max_position_embeddings=128, sliding_window=16)
    apertus = ApertusConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    gpt2 = GPT2Config(vocab_size=1024, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    save_base(folder / "qwen2", qwen, tokenizer, torch.bfloat16, max_shard_size="40KB")
    plain = AutoTokenizer.from_pretrained(folder / "qwen2")
    plain.chat_template = None
    neox = GPTNeoXConfig(**SMALL, num_attention_heads=4, max_position_embeddings=128)
    mamba = MambaConfig(vocab_size=1024, hidden_size=32, num_hidden_layers=2, state_size=4)
    hub = save_base(folder / "hub", GPT2Config(**gpt2.to_diff_dict()), plain)
    as_on_the_hub(hub)
    return {
        "llama": save_llama(folder, tokenizer),
        "qwen2": folder / "qwen2",
        "gemma3": save_base(folder / "gemma3", gemma, tokenizer),
        "gpt2": save_base(folder / "gpt2", gpt2, plain),
        "apertus": save_base(folder / "apertus", apertus, tokenizer),
        "neox": save_base(folder / "neox", neox, tokenizer),
        "mamba": save_base(folder / "mamba", mamba, tokenizer),
        "hub": hub,
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> tuple[Path, Path]:
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def exported(bases, rows, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """(folder, what was said) of runs that were tuned on two ranks and exported into FOLDER/NAME."""
    folder = tmp_path_factory.mktemp("exported")
    commands = {name: tune(base, rows, folder / name) for name, base in bases.items()}
    merged = ["--lora-rank", 4, "--merge", "--precision", "bf16", "--lr", 1e-3]
    commands["merged bf16"] = tune(bases["qwen2"], rows, folder / "merged bf16", *merged)
    commands["merged hub"] = tune(bases["hub"], rows, folder / "merged hub", "--lora-rank", 4, "--merge")
    commands["zero3"] = [ZERO_3, bases["llama"], rows[0], folder / "zero3.json", 1e-2]
    return folder, launch(2, commands)


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gpt2", "apertus", "neox", "mamba", "hub", "merged hub"])
def test_an_export_answers_as_the_run_has_measured(name, exported, rows):
    """(Llama and an adapter: test_finetune.py.) A bfloat16 export rounds the float32 weights that the run measured."""
    assert_answers_as_measured(exported[0] / name, rows[1], tolerance=2e-2 if name == "qwen2" else 1e-5)


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gpt2", "apertus", "neox", "mamba"])
def test_an_export_is_as_its_base(name, exported, bases):
    assert_is_as_its_base(exported[0] / name, bases[name], torch.bfloat16 if name == "qwen2" else torch.float32)


@pytest.mark.parametrize("name", ["hub", "merged hub"])
def test_an_export_has_the_names_of_its_base_and_not_its_masks(name, exported, bases):
    import pretrained

    found = pretrained.weight_files(exported[0] / name)
    stored = pretrained.weight_files(bases["hub"])
    assert found == {key: kind for key, kind in stored.items() if not key.endswith((".attn.bias", ".masked_bias"))}
    assert "wte.weight" in found and len(stored) == len(found) + 4


def test_merging_into_bfloat16_says_what_rounding_swallows(exported, bases):
    """The share that the run has printed is that of the two folders' elements, and the error is no smaller than theirs.

    An unchanged weight has lost its whole update. So the error, over the update, is far from 0 and below 1 here.
    """
    from safetensors import safe_open

    def tensors(folder: Path) -> dict[str, torch.Tensor]:
        found = {}
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                found |= {key: file.get_tensor(key) for key in list(file.keys())}
        return found

    folder, said = exported
    before, after = tensors(bases["qwen2"]), tensors(folder / "merged bf16")
    adapted = [name for name in before if "proj" in name and name.endswith("weight")]
    unchanged = sum((before[name] == after[name]).sum().item() for name in adapted)
    share = unchanged / sum(before[name].numel() for name in adapted)
    assert 0.01 < share < 0.99
    printed = f"rounding left {share:.1%} of the adapted weights as they were, and its error is "
    assert 0.01 < float(said["merged bf16"].partition(printed)[2].split()[0]) < 1
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - set(adapted))


def test_a_frozen_base_in_bfloat16_takes_two_bytes_a_weight(exported, bases):
    """It is stored and computed in bfloat16; the adapters take 16 bytes a weight."""
    from transformers import AutoModelForCausalLM

    metrics = last_metrics(exported[0] / "merged bf16")
    weights = AutoModelForCausalLM.from_pretrained(bases["qwen2"]).num_parameters()
    adapters = 2 * 4 * (4 * 32 + 2 * (32 + 16) + 3 * (32 + 64))  # A: blocks x rank x (in + out) of q, o, k, v and MLP
    assert metrics["state_bytes_per_rank"] == pytest.approx((2 * weights + 16 * adapters) / 2, rel=0.02)


def test_zero_3_as_on_the_page_computes_the_same(exported):
    """The README's block, over two epochs of four steps."""
    losses = json.loads((exported[0] / "zero3.json").read_text())
    lines = (exported[0] / "llama.jsonl").read_text().splitlines()[:2]
    expected = [loss for line in lines for loss in json.loads(line)["step_losses"]]
    assert len(losses) == len(expected) == 8
    assert losses == pytest.approx(expected, abs=1e-5)
