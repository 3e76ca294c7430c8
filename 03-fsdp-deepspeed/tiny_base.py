"""Make small pretrained models and a task to fine-tune them on, from the source code of Python's standard library.

    python tiny_base.py [FOLDER]        (default: ./data)

It writes FOLDER/tiny-llama, a Hugging Face folder, and the pairs FOLDER/python-lines/train.jsonl and val.jsonl. This
takes half a minute of one core and no network. What exists stays. Lesson 3.8 also makes FOLDER/tiny-gemma.
"""

import ast
import fcntl
import json
import os
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

BASE, PAIRS = "tiny-llama", ("python-lines/train.jsonl", "python-lines/val.jsonl")
GEMMA = "tiny-gemma"
VOCABULARY, CONTEXT, BATCH, STEPS = 1024, 128, 8, 300
GEMMA_STEPS = 120
MOST_PER_KIND = 320  # lines of each kind: most lines of Python are calls and assignments
TURNS = ("<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def source_files(for_validation: bool) -> list[Path]:
    """Return the standard library's files for training (four of five), or those for validation."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [file for file in files if (zlib.crc32(file.name.encode()) % 5 == 0) == for_validation]


def make(folder: str | Path, name: str, log: Callable[[str], None] = print) -> None:
    """Make BASE, GEMMA or PAIRS in `folder`, if it is missing. It appears under its name when it is complete."""
    writers = {BASE: pretrain_llama, GEMMA: pretrain_gemma}
    path, write = Path(folder, name), writers.get(name, write_pairs)
    path = path if name in writers else path.parent
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder, ".making"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits, and then finds it
        if not path.is_dir():
            log(f"making {path} from Python's standard library, once")
            with tempfile.TemporaryDirectory(dir=folder, prefix=f".{path.name}-") as partial:
                made = Path(partial, path.name)
                made.mkdir()
                write(made)
                os.rename(made, path)


# --- The pairs: a line of Python, and what it is ---------------------------------------------------------------------


def kind_of(node: ast.stmt) -> str | None:
    """Return in words what a statement is, or None for a kind that the task leaves out."""
    value = getattr(node, "value", None)
    what = "a constant" if isinstance(value, ast.Constant) else "a value"
    what = "the result of a call" if isinstance(value, ast.Call) else what
    match node:
        case ast.Import():
            return "an import of a module"
        case ast.ImportFrom():
            return "an import of names from a module"
        case ast.Assign():
            return f"an assignment of {what}"
        case ast.AugAssign(op=ast.Add()):
            return "an assignment that adds"
        case ast.Return():
            return f"a return of {what}" if value else None
        case ast.Raise():
            return "a raised exception"
        case ast.Expr(value=ast.Call()):
            return "a call"
        case ast.FunctionDef():
            return "the definition of a function"
        case ast.ClassDef():
            return "the definition of a class"
        case ast.If():
            return "a condition"
        case ast.For():
            return "a loop over items"
        case ast.While():
            return "a loop with a condition"
        case ast.With():
            return "a block with a context manager"
    return None


def lines_of_python(files: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield (line, kind) for the statements of `files` that begin on a line of their own, at most 60 characters."""
    for file in files:
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.stmt) and (kind := kind_of(node)):
                line, begins = lines[node.lineno - 1].strip(), getattr(node, "body", None)
                complete = node.end_lineno == node.lineno or (begins and line.endswith(":"))
                if complete and len(line) <= 60 and line.isascii() and not line.startswith("elif"):
                    yield line, kind


def write_pairs(folder: Path) -> None:
    """Write train.jsonl and val.jsonl: a line of Python and its kind. No line is in both."""
    used: set[str] = set()
    for name, for_validation, most in (("train", False, MOST_PER_KIND), ("val", True, MOST_PER_KIND // 4)):
        chosen: dict[str, list[str]] = {}
        for line, kind in lines_of_python(source_files(for_validation)):
            lines = chosen.setdefault(kind, [])
            if line not in used and len(lines) < most:
                used.add(line)
                lines.append(line)
        rows = [json.dumps({"prompt": line, "completion": kind}) for kind in sorted(chosen) for line in chosen[kind]]
        (folder / f"{name}.jsonl").write_text("".join(row + "\n" for row in rows))


# --- The base --------------------------------------------------------------------------------------------------------


def build_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with VOCABULARY tokens, and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(TURNS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=TURNS[2], pad_token=TURNS[2])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def pretrain_llama(folder: Path) -> None:
    """Train a Llama on the files for training, and write it to `folder`."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    pretrain(folder, config, STEPS, CONTEXT)


def pretrain_gemma(folder: Path) -> None:
    """Train a Gemma 3, less long and on shorter texts, and write it to `folder`."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=100, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=256, sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
        bos_token_id=None, architectures=["Gemma3ForCausalLM"],
    )  # fmt: skip
    pretrain(folder, config, GEMMA_STEPS, CONTEXT // 2)


def pretrain(folder: Path, config: PretrainedConfig, steps: int, context: int) -> None:
    """Train a model on the files for training, and write it to `folder` as `save_pretrained` does."""
    text = "".join(file.read_text(encoding="utf-8") for file in source_files(for_validation=False))
    tokenizer = build_tokenizer(text)
    # Two empty lines end a function or class. An end token there teaches the base that a text can end.
    tokens = torch.tensor(tokenizer(text.replace("\n\n\n", tokenizer.eos_token))["input_ids"])
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Muon learns more per step than Adam, but is made for the matrices between embedding and head.
        inner = [value for name, value in model.named_parameters() if value.dim() == 2 and "embed" not in name]
        outer = [value for name, value in model.named_parameters() if value.dim() != 2 or "embed" in name]
        optimizers = [torch.optim.Muon(inner, lr=0.02), torch.optim.AdamW(outer, lr=3e-3)]
        for step in range(steps):
            starts = torch.randint(len(tokens) - context, (BATCH,))
            windows = torch.stack([tokens[start : start + context + 1] for start in starts.tolist()])
            logits = model(input_ids=windows[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                for group in optimizer.param_groups:  # down to a tenth
                    group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - 0.9 * step / steps)
                optimizer.step()
    # Not model.save_pretrained, which imports DeepSpeed where it is installed.
    save_file(dict(model.named_parameters()), folder / "model.safetensors", metadata={"format": "pt"})
    config.dtype = torch.float32
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    for each in (PAIRS[0], BASE):
        make(sys.argv[1] if len(sys.argv) > 1 else "data", each)
