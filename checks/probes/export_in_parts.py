"""Call the learner's export_in_parts on a sharded Llama, and look at the folder that it writes, for exercise 3.6b.

torchrun --nproc-per-node 2 export_in_parts.py FOLDER FILE

FILE defines export_in_parts(model, folder, max_bytes). Each rank writes to FOLDER/RANK.json the peak of its tensors and
the promised limit, and what was missing in the folder when the function returned. Rank 0 adds what the files hold.
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"

import safetensors.torch
import torch
from safetensors import safe_open
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, logging

from shared import distributed, measure

INDEX = "model.safetensors.index.json"
SLOW_S = 0.1  # each file takes at least this long, so that a rank that does not wait is seen


def make_model() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=63, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def slowly(save: Callable) -> Callable:
    """Return `save` with a pause before it, as on a slow disk."""

    def save_slowly(*args, **kwargs):
        time.sleep(SLOW_S)
        return save(*args, **kwargs)

    return save_slowly


def missing(folder: Path) -> str | None:
    """Return the first file that the folder lacks: the index, or a file that it names."""
    try:
        files = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return INDEX
    return next((name for name in sorted(files) if not (folder / name).is_file()), None)


def read(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of each safetensors file."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors[path.name] = {name: file.get_tensor(name) for name in sorted(file.keys())}
    return tensors


def begins_early(
    expected: dict[str, torch.Tensor], weight_map: dict[str, str], max_bytes: int
) -> tuple[str, str, int] | None:
    """Return the first file that begins with a tensor that fits the file before, this tensor, and the bytes before."""
    file, size = None, 0
    for name, tensor in expected.items():
        if weight_map.get(name) != file:
            if file is not None and size + tensor.nbytes <= max_bytes:
                return weight_map.get(name), name, size
            file, size = weight_map.get(name), 0
        size += tensor.nbytes
    return None


def describe(folder: Path, plain: torch.nn.Module, max_bytes: int) -> dict:
    """Return what rank 0 reports of the folder, of which nothing is missing."""
    files, expected = read(folder), dict(plain.named_parameters())
    found = [(file, name, tensor) for file, tensors in files.items() for name, tensor in tensors.items()]
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    names = {name for _, name, _ in found}
    wrong = [
        (name, list(tensor.shape), list(expected[name].shape))
        for _, name, tensor in found
        if name in expected and not torch.equal(tensor, expected[name])
    ]
    sizes = {file: sum(tensor.nbytes for tensor in tensors.values()) for file, tensors in files.items()}
    report = {
        "lost": sorted(expected.keys() - names), "surplus": sorted(names - expected.keys()),
        "twice": len(found) - len(names), "wrong": wrong,
        "misplaced": sorted(name for file, name, _ in found if weight_map.get(name) != file),
        "too large": [[file, size] for file, size in sizes.items() if size > max_bytes],
        "early": begins_early(expected, weight_map, max_bytes), "max_bytes": max_bytes,
    }  # fmt: skip
    if not any(report[key] for key in ("lost", "surplus", "twice", "wrong", "misplaced")):
        plain.config.save_pretrained(folder)
        tokens = torch.arange(12)[None]
        try:
            loaded = AutoModelForCausalLM.from_pretrained(folder)
            with torch.no_grad():
                report["apart"] = (loaded(tokens).logits - plain(tokens).logits).abs().max().item()
        except Exception as error:  # from_pretrained raises many kinds
            report["load_error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return report


logging.set_verbosity_error()
logging.disable_progress_bar()
out, path = Path(sys.argv[1]), sys.argv[2]
worker = distributed.join(timeout_s=20)
safetensors.torch.save_file = slowly(safetensors.torch.save_file)
export_in_parts = runpy.run_path(path)["export_in_parts"]
plain, model = make_model(), make_model()
for part in (*model.model.layers, model):
    fully_shard(part)
sizes = [parameter.nbytes for parameter in plain.parameters()]
folder, max_bytes = out / "export", 5 * max(sizes)
if worker.rank == 0:
    folder.mkdir()
distributed.wait_for_all()
slices = measure.storage_bytes(model.parameters())
memory = measure.PeakMemory(worker.device)
memory.start(model)
export_in_parts(model, folder, max_bytes)
lacks = missing(folder)
report = {
    "peak": memory.stop(), "limit": slices + max_bytes + 2 * max(sizes), "slices": slices,
    "whole": sum(sizes), "lacks": lacks,
}  # fmt: skip
distributed.wait_for_all()
if worker.rank == 0:
    report["lacks later"] = missing(folder)
    report["written"] = sorted(file.name for file in folder.iterdir())
    if report["lacks later"] is None:
        report |= describe(folder, plain, max_bytes)
(out / f"{worker.rank}.json").write_text(json.dumps(report))
distributed.leave()
