"""Shard a small Llama with LoRA adapters, and let the learner's function take the adapter out, for exercise 3.7a.

torchrun --nproc-per-node 2 gathered_adapter.py FOLDER FILE

FILE defines adapter_weights(model). Each rank writes to FOLDER/RANK.json what the function returns, how many bytes it
gathers, and how many the adapter has. Rank 0 adds whether peft can load the adapter onto a plain base, the names it
expects, and how far the logits are off.
"""

import json
import runpy
import sys
from pathlib import Path

import peft
import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from shared import distributed

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=1,
)  # fmt: skip
LORA = peft.LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")


class Gathers(TorchDispatchMode):
    """Add up the bytes that are gathered while it is on."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if "gather" in name and "c10d" in name:  # full_tensor's are in a namespace of their own, dist's in another
            leaves = tree_leaves((args[:1], result))
            self.bytes += max(leaf.nbytes for leaf in leaves if torch.is_tensor(leaf))
        return result


def make_base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


folder, path = sys.argv[1:]
worker = distributed.join(timeout_s=120)
tokens = torch.arange(20)[None]
base = make_base()
model = peft.get_peft_model(base, LORA).eval()
torch.manual_seed(1)
for name, parameter in model.named_parameters():
    if "lora_" in name:
        torch.nn.init.normal_(parameter.data, std=0.2)
adapter_bytes = sum(each.nbytes for each in model.parameters() if each.requires_grad)
with torch.no_grad():
    expected = model(input_ids=tokens).logits
for part in (*base.model.layers, base):
    fully_shard(part)
gathers = Gathers()
with gathers:
    weights = runpy.run_path(path)["adapter_weights"](model)
report = {"type": type(weights).__name__, "adapter_bytes": adapter_bytes, "gathered": gathers.bytes}
if isinstance(weights, dict):
    report["count"] = len(weights)
    report["types"] = sorted({type(each).__name__ for each in weights.values()})
    if worker.rank == 0 and weights and set(report["types"]) <= {"Tensor", "Parameter"}:
        whole = {key: each.detach().contiguous() for key, each in weights.items()}
        save_file(whole, Path(folder, "adapter_model.safetensors"))
        model.peft_config["default"].inference_mode = True
        model.peft_config["default"].save_pretrained(folder)
        try:
            loaded = peft.PeftModel.from_pretrained(make_base(), folder)
            report["stored"] = sorted(weights)
            report["wanted"] = sorted(peft.get_peft_model_state_dict(loaded, save_embedding_layers=False))
            with torch.no_grad():
                report["apart"] = (loaded(input_ids=tokens).logits - expected).abs().max().item()
        except (RuntimeError, ValueError, KeyError) as error:
            report["error"] = str(error).strip().splitlines()[-1].strip()
Path(folder, f"{worker.rank}.json").write_text(json.dumps(report))
distributed.leave()
